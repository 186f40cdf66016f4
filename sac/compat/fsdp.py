"""torch's ``checkpoint_wrapper`` and ``apply_activation_checkpointing``, implemented with regions.

``from sac.compat.fsdp import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper`` replaces the import
from ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``.

Differences: there is no wrapper. The module itself becomes a region and is returned, so its class, its name and the
names of its parameters stay, and ``sac.remove`` removes the region. Buffers advance once, routing ops keep their
results, and a model's K/V cache is turned off. What a wrapper can do and a region cannot is an error.
``offload_wrapper`` is torch's own: around a region, it moves what the region keeps to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from sac.blocks.applying import put_regions
from sac.blocks.stacks import is_callable
from sac.checkpointing import checkpoint
from sac.config import DEFAULT_CONFIG, FullConfig, settings_of
from sac.engine.compiled import checkpoint_contexts
from sac.engine.region import FULL
from sac.errors import ConfigError, Problem
from sac.policy.model import Policy
from sac.torch_private import checkpoint_wrapper_module

__all__ = ["CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]

CheckpointImpl: Any = checkpoint_wrapper_module().CheckpointImpl  # REENTRANT or NO_REENTRANT: how to recompute
offload_wrapper: Any = checkpoint_wrapper_module().offload_wrapper

_NAME = "checkpoint_wrapper"


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Make ``module`` a region that is recomputed in backward, and return it.

    ``checkpoint_fn``: None, torch's ``checkpoint`` or ``sac.checkpoint``, which all mean the same here.
    ``checkpoint_fn_kwargs`` are keywords of ``sac.checkpoint``, ``context_fn`` as returned by ``sac.context_fn``, and
    ``debug``, which changes nothing.

    Raises ``ConfigError`` for what a region cannot do, ``ModelError`` for a module that is already a region.
    """
    _put(module, (module,), checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs)
    return module


def _put(
    model: nn.Module,
    modules: Iterable[nn.Module],
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Any = None,
    *,
    context_fn: Any = noop_context_fn,
    debug: bool = False,
    config: FullConfig | None = None,
    **options: Any,
) -> None:
    """Make the modules regions; the other arguments are those of ``checkpoint_wrapper``."""
    policy = policy_of_contexts(context_fn)
    options.setdefault("use_reentrant", checkpoint_impl is CheckpointImpl.REENTRANT)
    legal: dict[str, str] = {}  # values of the arguments that are not
    if not isinstance(checkpoint_impl, CheckpointImpl):
        legal["checkpoint_impl"] = "a CheckpointImpl"
    if checkpoint_fn not in (None, torch_checkpoint, checkpoint):
        legal["checkpoint_fn"] = "torch's checkpoint, sac.checkpoint"
    if policy is None or (policy is not FULL and options["use_reentrant"]):
        legal["context_fn"] = (
            "the result of sac.context_fn, for NO_REENTRANT; FullConfig(state=...) restores other state"
        )
    if legal:
        raise ConfigError([Problem(f"{_NAME}.{name}", "a region cannot do this", legal[name]) for name in legal])
    put_regions(model, modules, policy or FULL, settings_of(config or DEFAULT_CONFIG, _NAME, **options))


def policy_of_contexts(context_fn: Any) -> Policy | None:
    """Return the policy behind a context function that is missing or made by ``sac.context_fn``; None for others."""
    if context_fn in (None, noop_context_fn):
        return FULL
    is_ours = isinstance(context_fn, partial) and context_fn.func is checkpoint_contexts
    return context_fn.args[0].policy if is_ours else None


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Make the modules below ``model`` for which ``check_fn`` returns True regions, in place.

    ``checkpoint_wrapper_fn``: ``checkpoint_wrapper``, a ``functools.partial`` of it, ``offload_wrapper``, or another
    function, whose result replaces the module. If ``auto_wrap_policy`` (a function or a policy object of FSDP) is
    given, it replaces ``check_fn``. Modules that are not called themselves (a ModuleList) are skipped.

    Raises what ``checkpoint_wrapper`` raises; with ``checkpoint_wrapper`` the model is then unchanged.
    """
    wrapper = checkpoint_wrapper_fn if isinstance(checkpoint_wrapper_fn, partial) else partial(checkpoint_wrapper_fn)
    is_ours = wrapper.func is checkpoint_wrapper and not wrapper.args
    together: list[nn.Module] = []  # equal layers share a decision table

    def wrap(module: nn.Module, **own: Any) -> nn.Module:
        if is_ours and not own and is_callable(module):
            together.append(module)
            return module
        return wrapper(module, **own) if is_callable(module) else module

    # torch's own function selects: it is what the script called before (private path, torch 1.12 to 2.13).
    checkpoint_wrapper_module().apply_activation_checkpointing(model, wrap, check_fn, auto_wrap_policy)
    if is_ours:
        _put(model, together, **wrapper.keywords)
