"""``sac.context_fn`` in eager mode: a call of ``torch.utils.checkpoint`` that is a call of a region."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

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


class _Call(NamedTuple):
    """The checkpointed call of which torch has asked for the contexts."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    settings: Settings


def eager_contexts(
    table: DecisionTable, module: nn.Module | None, *, in_graph: bool = False
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts of one call of ``torch.utils.checkpoint``; see Note [Inside torch.utils.checkpoint].

    ``in_graph``: the call is part of a Dynamo graph, in which torch restores no random states.
    """
    call = _call_of_torch()
    if in_graph:
        if table.left_in_eager == 1:
            _tell_of_graph_break(call.function)
        call = call._replace(settings=replace(call.settings, preserve_rng_state=True))
    return _Forward(table, module, call), nullcontext()


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


def _call_of_torch() -> _Call:
    """Return the call whose Python frame of torch has called ``sac.context_fn``'s function."""
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
    return _Call(names["fn"], tuple(names.get("args", ())), dict(names.get("kwargs", {})), as_torch_says(settings))


class _Forward(AbstractContextManager[None]):
    """Around the forward: the hooks and the mode of a region's frame."""

    def __init__(self, table: DecisionTable, module: nn.Module | None, call: _Call) -> None:
        self._table, self._module = table, module
        self._call: _Call | None = call
        self._frame: Any = None
        self._stack = ExitStack()

    def __enter__(self) -> None:
        assert self._call is not None
        (function, args, kwargs, settings), self._call = self._call, None
        known = () if self._module is None else (self._module,)
        parts = parts_of_function(function)
        group = group_of([*known] or parts, self._table, _NAME)
        modules = [part for part in parts if isinstance(part, nn.Module)]
        owners = (*known, *modules, *(argument for argument in args if isinstance(argument, nn.Module)))
        if any(is_lazy(parameter) for owner in owners for parameter in owner.parameters()):
            found = "a lazy module would create its parameters in this call, which recomputation cannot repeat"
            raise RegionError(Problem(_NAME, found, fix=_FIRST))
        outer = _hooks_around()
        self._frame = frame = Region(group, "").frame(function, owners, settings, outer)
        frame.begin(args, kwargs, outer)
        self._stack.enter_context(frame.recording())
        if isinstance(frame.function, Fp8Function):
            self._stack.enter_context(frame.function.forward())

    def __exit__(self, *error: Any) -> None:
        frame, self._frame = self._frame, None
        self._stack.__exit__(*error)
        if error[0] is None:
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
