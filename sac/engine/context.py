"""``sac.context_fn`` in eager mode: a call of ``torch.utils.checkpoint`` that is a call of a region."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from sac.engine.fp8 import Fp8Function
from sac.engine.region import Region, group_of, parts_of_function
from sac.engine.settings import PLAIN, Settings, as_torch_says
from sac.engine.table import DecisionTable
from sac.errors import Problem, RegionError, warn
from sac.outer_hooks import PackHooks, active_hooks
from sac.torch_private import CHECKPOINT_FUNCTION, last_graph_break, pop_hooks, push_hooks

# Note [Inside torch.utils.checkpoint]
#
# The context around the forward puts the hooks and the mode of a region's frame inside those of torch. So torch's frame
# is passed no tensor, has nothing to recompute, and never enters the context of its recomputation: our frame replays
# the call or runs the function again. The function and its arguments are read from torch's Python frame, which asks for
# the contexts.

_NAME = "sac.context_fn"
_ELSEWHERE = "pass it to torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=...)"
_FIRST = "run the model once under torch.no_grad() before training"


def eager_contexts(
    table: DecisionTable, module: nn.Module | None, *, in_graph: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts of one call of ``torch.utils.checkpoint``; see Note [Inside torch.utils.checkpoint].

    ``in_graph``: the call is part of a Dynamo graph, in which torch restores no random states.
    """
    function, args, kwargs, settings = _call_of_torch()
    if in_graph:
        if table.left_in_eager == 1:
            _tell_of_graph_break(function)
        settings = replace(settings, preserve_rng_state=True)
    return _forward(table, module, function, args, kwargs, settings), nullcontext()


def _tell_of_graph_break(function: Any) -> None:
    """Warn that a block was compiled and runs uncompiled: no graph can hold half a region."""
    modules = [part for part in parts_of_function(function) if isinstance(part, nn.Module)]
    if any(isinstance(module, GraphModule) for module in modules):  # the graph is run as it is (backend "eager")
        return
    forwards = (getattr(module.__dict__.get("forward"), "__self__", None) for module in modules)
    regions = (getattr(forward, "region", None) for forward in forwards)
    where = next((region.path for region in regions if isinstance(region, Region)), _NAME)
    found = "it was compiled, but runs uncompiled, since there is a graph break in it"
    fix = "compile its parts instead (module.compile()), or take the cause out of it"
    reason = last_graph_break().rstrip(".")
    warn(Problem(where, f"{found}: {reason}" if reason else found, fix=fix))


def _call_of_torch() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Settings]:
    """Return function, arguments and settings of the call whose frame in torch has asked for the contexts."""
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_name.startswith(CHECKPOINT_FUNCTION):
        frame = frame.f_back
    if frame is None or "fn" not in frame.f_locals:
        raise RegionError(Problem(_NAME, "it was not called by torch.utils.checkpoint", fix=_ELSEWHERE))
    names = frame.f_locals
    settings = replace(
        PLAIN,
        preserve_rng_state=names.get("preserve_rng_state", True),
        early_stop=names.get("early_stop", True),
        checks_metadata=names.get("determinism_check", "default") != "none",
    )
    return names["fn"], tuple(names.get("args", ())), dict(names.get("kwargs", {})), as_torch_says(settings)


@contextmanager
def _forward(
    table: DecisionTable, module: nn.Module | None, function: Any, args: Any, kwargs: Any, settings: Settings
) -> Iterator[None]:
    """Run the body, which is the forward, under the hooks and the mode of a region's frame."""
    known = () if module is None else (module,)
    parts = parts_of_function(function)
    group = group_of([*known] or parts, table, _NAME)
    modules = [part for part in parts if isinstance(part, nn.Module)]
    owners = (*known, *modules, *(argument for argument in args if isinstance(argument, nn.Module)))
    if any(is_lazy(parameter) for owner in owners for parameter in owner.parameters()):
        found = "a lazy module would create its parameters in this call, which recomputation cannot repeat"
        raise RegionError(Problem(_NAME, found, fix=_FIRST))
    outer = _hooks_around()
    frame = Region(group, "").frame(function, owners, settings, outer)
    frame.begin(args, kwargs, outer)
    with frame.recording(), frame.function.entered() if isinstance(frame.function, Fp8Function) else nullcontext():
        yield
    frame.end()


def _hooks_around() -> PackHooks | None:
    """Return the saved-tensor hooks below the innermost ones, which are those of torch's checkpoint."""
    top = active_hooks()
    if top is None:
        return None
    pop_hooks()
    try:
        return active_hooks()
    finally:
        push_hooks(*top)
