"""torch's ``checkpoint_wrapper`` and ``apply_activation_checkpointing``, implemented with regions.

``from sac.compat.fsdp import CheckpointImpl, apply_activation_checkpointing, checkpoint_wrapper`` replaces the import
from ``torch.distributed.algorithms._checkpoint.checkpoint_wrapper``.

Differences: there is no wrapper. The module itself becomes a region and is returned, so its class, its name and the
names of its parameters stay, and ``sac.remove`` removes the region. Buffers advance once, routing ops keep their
results, and a model's K/V cache is turned off. What a wrapper can do and a region cannot is an error.
``offload_wrapper`` on a module that is not a region moves what autograd saves in it, as torch's does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from sac.blocks.applying import Chosen, blocks_at, put_regions, refuse_regions
from sac.blocks.install import Applied, InstalledForward, RegionForward, UnmatchedRules, ours_on, remove, set_forward
from sac.blocks.stacks import is_callable
from sac.checkpointing import checkpoint
from sac.compat.keywords import NO_DEBUG, only, read_keywords
from sac.config import DEFAULT_CONFIG, CallOptions, FullConfig, settings_of
from sac.config_keys import Reader, read_flag
from sac.engine.compiled import checkpoint_contexts
from sac.engine.region import FULL
from sac.engine.tracker import TrackedForward
from sac.errors import ConfigError, ModelError, Problem, listing
from sac.policy.model import Policy
from sac.torch_private import checkpoint_wrapper_module

__all__ = ["CheckpointImpl", "apply_activation_checkpointing", "checkpoint_wrapper", "offload_wrapper"]

_NAME = "checkpoint_wrapper"


class CheckpointImpl(enum.Enum):
    """The mode in which a region is recomputed; torch's enumeration of this name is accepted too."""

    REENTRANT = enum.auto()
    NO_REENTRANT = enum.auto()


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
    ``sac.checkpoint``, and ``context_fn`` as returned by ``sac.context_fn``.

    Raises ``ConfigError`` for what a region cannot do, ``ModelError`` for a module that is already a region.
    """
    given = {"checkpoint_impl": checkpoint_impl, "checkpoint_fn": checkpoint_fn, "offload_to_cpu": offload_to_cpu}
    put_regions(module, [_chosen((module,), {**given, **checkpoint_fn_kwargs})])
    return module


def offload_wrapper(module: nn.Module) -> nn.Module:
    """Keep what ``module`` leaves for its backward in host memory, and return the module.

    For a region, these are its inputs. For any other module, it is all that autograd saves in its forward, as with
    torch's function; nothing is recomputed. ``sac.remove`` undoes it.

    Raises ``ModelError`` for a module inside a region, and for one whose tensors are already kept elsewhere.
    """
    forward = ours_on(module)
    if isinstance(forward, RegionForward):
        if forward.applied.settings.input_storing is not None:
            raise ModelError(Problem(forward.region.path, "its inputs are kept elsewhere already"))
        keeping = settings_of(_ON_HOST, CallOptions(), _NAME).input_storing
        forward.applied = replace(forward.applied, settings=replace(forward.applied.settings, input_storing=keeping))
        return module
    name = type(module).__name__
    if isinstance(forward, TrackedForward):
        found = "it is inside a region, which does not keep what its modules save"
        raise ModelError(Problem(name, found, fix="call offload_wrapper on the region: its inputs are moved then"))
    if forward is not None:
        raise ModelError(Problem(name, "what it saves is kept elsewhere already", fix="call sac.remove(module) first"))
    if not is_callable(module):
        found = "it is not called itself, so that nothing is saved in its forward"
        raise ModelError(Problem(name, found, fix="call offload_wrapper on each of its children"))
    set_forward(module, OffloadedForward(module, Applied("offload", (), UnmatchedRules((), (), strict=False))))
    return module


class OffloadedForward(InstalledForward):
    """Runs a module that is not a region, and moves what autograd saves in it to host memory."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
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

    Raises what ``checkpoint_wrapper`` raises; the model is then unchanged.
    """
    chosen: dict[nn.Module, dict[str, Any]] = {}

    def note(module: nn.Module, **given: Any) -> nn.Module:
        if is_callable(module):
            chosen.setdefault(module, given)
        return module

    # torch's own function selects: it is what the script called before (private path, torch 1.12 to 2.13).
    checkpoint_wrapper_module().apply_activation_checkpointing(model, note, check_fn, auto_wrap_policy)
    function: Any = checkpoint_wrapper_fn
    given: dict[str, Any] = {}
    while isinstance(function, partial) and not function.args:
        function, given = function.func, {**function.keywords, **given}
    if function is checkpoint_wrapper:  # regions with the same arguments are one group
        groups: list[tuple[list[nn.Module], dict[str, Any]]] = []
        for module, own in chosen.items():
            same_as = next((modules for modules, arguments in groups if arguments == own), None)
            if same_as is None:
                groups.append((same_as := [], own))
            same_as.append(module)
        put_regions(model, [_chosen(tuple(modules), {**given, **own}) for modules, own in groups])
        return
    offloads = function is offload_wrapper
    if not offloads:
        refuse_regions(blocks_at(model, chosen))
    try:
        for module, own in chosen.items():
            wrapped = checkpoint_wrapper_fn(module, **own)
            if wrapped is not module:
                found = f"it returned {type(wrapped).__name__} around {type(module).__name__}, not the module itself"
                fix = "let it call checkpoint_wrapper of sac.compat.fsdp"
                raise ConfigError(Problem("apply_activation_checkpointing.checkpoint_wrapper_fn", found, fix=fix))
    except BaseException:
        for module in () if offloads else chosen:
            remove(module)
        raise


def _chosen(modules: tuple[nn.Module, ...], given: Mapping[str, Any]) -> Chosen:
    """Return the modules with the meaning of ``given``, arguments of ``checkpoint_wrapper``, for them."""
    values = read_keywords(given, _KEYWORDS, _NAME)
    options = {name: value for name, value in values.items() if name in _OPTIONS}
    policy, config = values.get("context_fn"), values.get("config") or DEFAULT_CONFIG
    options.setdefault("use_reentrant", values.get("checkpoint_impl", False))
    if options["use_reentrant"] and policy is not None:
        found = "per-op decisions need the non-reentrant mode"
        raise ConfigError(Problem(f"{_NAME}.context_fn", found, fix="use CheckpointImpl.NO_REENTRANT"))
    if values.get("offload_to_cpu"):
        if config.store != "whole":
            found = f"config keeps inputs elsewhere (store {config.store!r})"
            raise ConfigError(Problem(f"{_NAME}.offload_to_cpu", found, fix="leave one of the two out"))
        config = replace(config, store=_ON_HOST.store, keep=_ON_HOST.keep)
    return Chosen(modules, policy or FULL, settings_of(config, CallOptions(**options), _NAME))


_ON_HOST = FullConfig(store="host", keep="all")


def policy_of_contexts(context_fn: Any) -> Policy | None:
    """Return the policy behind a context function made by ``sac.context_fn``; None for anything else."""
    if isinstance(context_fn, partial) and context_fn.func is checkpoint_contexts:
        policy: Policy = context_fn.args[0].policy
        return policy
    return None


def _read_implementation(value: Any, place: str) -> bool:
    """Return whether the implementation is the reentrant one."""
    name = getattr(value, "name", None)
    if name not in CheckpointImpl.__members__:
        legal = listing([f"CheckpointImpl.{name}" for name in CheckpointImpl.__members__])
        raise ConfigError(Problem(place, f"{value!r} is not an implementation", expected=legal))
    return bool(name == CheckpointImpl.REENTRANT.name)


def _read_contexts(value: Any, place: str) -> Policy | None:
    """Return the policy of a context function; None if it enters no contexts."""
    policy = policy_of_contexts(value)
    if value not in (None, noop_context_fn) and policy is None:
        found = "the caller's contexts around forward and recomputation are not entered"
        fix = "choose per op with context_fn=sac.context_fn(policy), or put state back with FullConfig(state=...)"
        raise ConfigError(Problem(place, found, fix=fix))
    return policy


def _read_config(value: Any, place: str) -> FullConfig | None:
    if value is not None and not isinstance(value, FullConfig):
        raise ConfigError(Problem(place, f"{value!r} is not a FullConfig", expected="a sac.full.FullConfig"))
    return value


_OPTIONS = tuple(one.name for one in fields(CallOptions))
_KEYWORDS: dict[str, Reader] = {
    **dict.fromkeys(_OPTIONS, lambda value, place: value),  # settings_of checks them
    "config": _read_config,
    "context_fn": _read_contexts,
    "debug": NO_DEBUG,
    "checkpoint_impl": _read_implementation,
    "checkpoint_fn": only(
        None,
        torch_checkpoint,
        checkpoint,
        found="{!r} cannot be made a region",
        expected="sac.checkpoint, torch's checkpoint",
        fix="leave it out, or call the function in the module's own forward",
    ),
    "offload_to_cpu": read_flag,
}
