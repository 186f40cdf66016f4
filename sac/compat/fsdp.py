"""torch's ``checkpoint_wrapper`` and ``apply_activation_checkpointing``, implemented with regions.

Differences: there is no wrapper. The module itself becomes a region and is returned, so its class, its name and the
names of its parameters stay, and ``sac.remove`` removes the region. Buffers advance once, routing ops keep their
results, and a model's K/V cache is turned off. What a wrapper can do and a region cannot is an error.
``offload_wrapper`` is torch's own: around a region, it moves what the region keeps to host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from sac.blocks.applying import put_regions
from sac.blocks.stacks import is_callable
from sac.checkpointing import checkpoint
from sac.config import DEFAULT_CONFIG, refuse, settings_of
from sac.engine.compiled import checkpoint_contexts
from sac.engine.region import FULL
from sac.engine.settings import Settings
from sac.policy.model import Policy
from sac.torch_private import checkpoint_wrapper_module

__all__ = ["CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]

CheckpointImpl: Any = checkpoint_wrapper_module().CheckpointImpl  # REENTRANT or NO_REENTRANT: how to recompute
offload_wrapper: Any = checkpoint_wrapper_module().offload_wrapper


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
    put_regions(module, (module,), *_read(checkpoint_impl, checkpoint_fn, **checkpoint_fn_kwargs))
    return module


def _read(
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT, checkpoint_fn: Any = None, **options: Any
) -> tuple[Policy, Settings]:
    """Return what these arguments of ``checkpoint_wrapper`` mean."""
    context_fn, config, _ = (options.pop(name, None) for name in ("context_fn", "config", "debug"))
    policy, found = policy_of_contexts(context_fn), "a region cannot do this"
    options.setdefault("use_reentrant", checkpoint_impl is CheckpointImpl.REENTRANT)
    is_refused = policy is None or (policy is not FULL and options["use_reentrant"])
    conflicts = [
        (not isinstance(checkpoint_impl, CheckpointImpl), "checkpoint_impl", found, "pass a CheckpointImpl"),
        (checkpoint_fn not in (None, torch_checkpoint, checkpoint), "checkpoint_fn", found, "pass sac.checkpoint"),
        (is_refused, "context_fn", found, "pass the result of sac.context_fn (NO_REENTRANT), or FullConfig(state=...)"),
    ]
    refuse(conflicts, "checkpoint_wrapper")
    return policy or FULL, settings_of(config or DEFAULT_CONFIG, "checkpoint_wrapper", **options)


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
    wrapper = partial(checkpoint_wrapper_fn)  # of a `partial`, another with the same arguments
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
        put_regions(model, together, *_read(**wrapper.keywords))
