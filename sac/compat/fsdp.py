"""torch's ``checkpoint_wrapper`` and ``apply_activation_checkpointing``, implemented with regions.

``from sac.compat.fsdp import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper`` replaces the import
from ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``.

Differences: there is no wrapper. The module itself becomes a region and is returned, so its class, its name and the
names of its parameters stay, and ``sac.remove`` removes the region. Buffers advance once, routing ops keep their
results, and a model's K/V cache is turned off. What a wrapper can do and a region cannot is an error.
``offload_wrapper`` on a module that is not a region moves what autograd saves in it, as torch's does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from sac.blocks.applying import put_regions
from sac.blocks.install import Applied, InstalledForward, RegionForward, ours_on, set_forward
from sac.blocks.stacks import is_callable
from sac.checkpointing import checkpoint
from sac.config import DEFAULT_CONFIG, FullConfig, settings_of
from sac.config_keys import CONFIG_KEYS, read_keys
from sac.engine.compiled import checkpoint_contexts
from sac.engine.region import FULL
from sac.errors import ConfigError, ModelError, Problem
from sac.policy.model import Policy
from sac.torch_private import checkpoint_wrapper_module

__all__ = ["CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]

CheckpointImpl: Any = checkpoint_wrapper_module().CheckpointImpl  # REENTRANT or NO_REENTRANT: how to recompute

_NAME = "checkpoint_wrapper"
_ON_HOST = FullConfig(store="host", keep="all")
_LEGAL = {
    "checkpoint_impl": "a CheckpointImpl",
    "checkpoint_fn": "torch's checkpoint, sac.checkpoint",
    "context_fn": "the result of sac.context_fn, for NO_REENTRANT; FullConfig(state=...) restores other state",
    "offload_to_cpu": "true without a config, which says where inputs are kept",
}


def checkpoint_wrapper(
    module: nn.Module,
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    *,
    offload_to_cpu: bool = False,
    **checkpoint_fn_kwargs: Any,
) -> nn.Module:
    """Make ``module`` a region that is recomputed in backward, and return it.

    ``checkpoint_fn``: None, torch's ``checkpoint`` or ``sac.checkpoint``, which all mean the same here.
    ``offload_to_cpu``: keep the region's inputs in host memory. ``checkpoint_fn_kwargs`` are keywords of
    ``sac.checkpoint``, ``context_fn`` as returned by ``sac.context_fn``, and ``debug``, which changes nothing.

    Raises ``ConfigError`` for what a region cannot do, ``ModelError`` for a module that is already a region.
    """
    _put(module, (module,), checkpoint_impl, checkpoint_fn, offload_to_cpu=offload_to_cpu, **checkpoint_fn_kwargs)
    return module


def _put(
    model: nn.Module,
    modules: Iterable[nn.Module],
    checkpoint_impl: Any = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Any = None,
    *,
    offload_to_cpu: Any = False,
    context_fn: Any = noop_context_fn,
    debug: bool = False,
    config: Any = None,
    **options: Any,
) -> None:
    """Make the modules regions; the other arguments are those of ``checkpoint_wrapper``."""
    policy = FULL if context_fn in (None, noop_context_fn) else policy_of_contexts(context_fn)
    options.setdefault("use_reentrant", checkpoint_impl is CheckpointImpl.REENTRANT)
    refused = {
        "checkpoint_impl": not isinstance(checkpoint_impl, CheckpointImpl),
        "checkpoint_fn": checkpoint_fn not in (None, torch_checkpoint, checkpoint),
        "context_fn": policy is None or (policy is not FULL and options["use_reentrant"]),
        "offload_to_cpu": bool(offload_to_cpu) and config is not None,
    }
    wrong = [name for name, is_refused in refused.items() if is_refused]
    if wrong:
        raise ConfigError([Problem(f"{_NAME}.{name}", "a region cannot do this", _LEGAL[name]) for name in wrong])
    is_flag = {"offload_to_cpu": CONFIG_KEYS["strict"]}
    moves = read_keys({"offload_to_cpu": offload_to_cpu}, _NAME, is_flag)["offload_to_cpu"]
    config = _ON_HOST if moves else config or DEFAULT_CONFIG
    put_regions(model, modules, policy or FULL, settings_of(config, _NAME, **options))


def policy_of_contexts(context_fn: Any) -> Policy | None:
    """Return the policy behind a context function made by ``sac.context_fn``; None for anything else."""
    if isinstance(context_fn, partial) and context_fn.func is checkpoint_contexts:
        policy: Policy = context_fn.args[0].policy
        return policy
    return None


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Keep what ``module`` leaves for its backward in host memory, and return the module.

    For a region, these are its inputs. For any other module, it is all that autograd saves in its forward, as with
    torch's function; nothing is recomputed. ``sac.remove`` undoes it.

    Raises ``ModelError`` for a module inside a region, and for one whose tensors are already kept elsewhere.
    """
    forward = ours_on(module)
    if forward is None and is_callable(module):
        applied = Applied("offload", ())
        set_forward(module, OffloadedForward(module, applied))
    elif isinstance(forward, RegionForward) and forward.applied.settings.input_storing is None:
        keeping = settings_of(_ON_HOST, _NAME).input_storing
        forward.applied = replace(forward.applied, settings=replace(forward.applied.settings, input_storing=keeping))
    else:
        found, fix = "it is inside a region, or its tensors are kept elsewhere", "call offload_wrapper on the region"
        if forward is None:
            found, fix = "it is not called itself", "call offload_wrapper on each of its children"
        raise ModelError(Problem(type(module).__name__, found, fix=fix))
    return module


class OffloadedForward(InstalledForward):
    """Runs a module that is not a region, and moves what autograd saves in it to host memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with save_on_cpu(pin_memory=True):  # pins only if there is a CUDA device
            return self.original(*args, **kwargs)


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., nn.Module] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], bool] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Make the modules below ``model`` for which ``check_fn`` returns True regions, in place.

    ``checkpoint_wrapper_fn``: ``checkpoint_wrapper``, a ``functools.partial`` of it, ``offload_wrapper``, or a function
    that calls one of them. If ``auto_wrap_policy`` (a function or a policy object of FSDP) is given, it replaces
    ``check_fn``. Modules that are not called themselves (a ModuleList) are skipped.

    Raises what ``checkpoint_wrapper`` raises; with ``checkpoint_wrapper`` the model is then unchanged.
    """
    chosen: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, **own: Any) -> nn.Module:
        if is_callable(module):
            chosen.setdefault(module, own)
        return module

    # torch's own function selects: it is what the script called before (private path, torch 1.12 to 2.13).
    checkpoint_wrapper_module().apply_activation_checkpointing(model, note, check_fn, auto_wrap_policy)
    wrapper = checkpoint_wrapper_fn if isinstance(checkpoint_wrapper_fn, partial) else partial(checkpoint_wrapper_fn)
    if wrapper.func is checkpoint_wrapper and not wrapper.args and not any(chosen.values()):
        _put(model, chosen, **wrapper.keywords)  # equal layers share a decision table
        return
    for module, own in chosen.items():
        wrapped = checkpoint_wrapper_fn(module, **own)
        if wrapped is not module:
            found = f"it returned {type(wrapped).__name__} around {type(module).__name__}, not the module itself"
            fix = "let it call checkpoint_wrapper of sac.compat.fsdp"
            raise ConfigError(Problem("apply_activation_checkpointing.checkpoint_wrapper_fn", found, fix=fix))
