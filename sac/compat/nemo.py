"""NeMo Automodel's activation checkpointing, implemented with regions.

Differences: nothing is wrapped. The layers themselves become regions, so lists of them stay valid and ``sac.remove``
removes the regions. The policy of the model's family decides what is saved. Regions restore attention backends and run
ops that appear only in recomputation, so the functions that make context functions and those that let ops be ignored
are for remaining calls of torch's own ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import noop_context_fn

from sac.blocks.applying import put_regions
from sac.blocks.checkpoint_context import context_fn
from sac.blocks.install import InstalledForward, ours_on
from sac.blocks.kv_cache import is_attention, shares_kv, turn_off_cache
from sac.blocks.paths import Node, children_of, root_node
from sac.blocks.stacks import is_callable
from sac.compat.fsdp import policy_of_contexts
from sac.config import family_policy, refuse
from sac.engine.flags import BackendFlags
from sac.engine.region import FULL
from sac.errors import ModelError, Problem, warn
from sac.ops.registry import find_op
from sac.policy.model import Policy
from sac.torch_private import WRAPPED_MODULE, ignored_ops

__all__ = [
    "SELECTIVE_AC_WRAPPER_FLAG", "apply_full_layer_checkpointing_to_layers", "apply_selective_checkpointing_to_layers",
    "apply_submodule_checkpointing", "detect_kv_sharing_and_maybe_disable_cache", "ensure_fsdp_ops_sac_ignored",
    "ensure_profiler_ops_sac_ignored", "ignore_sac_ops", "is_selective_activation_checkpointing",
    "make_selective_checkpoint_context_fn", "sdpa_backend_snapshot_context_fn",
    "transformer_engine_attention_backend_snapshot_context_fn", "unwrap_checkpoint_wrapper",
]  # fmt: skip

#: NeMo's flag on wrappers that are compiled as a whole. Nothing has it here: a region is compiled with its layer.
SELECTIVE_AC_WRAPPER_FLAG = "_nemo_selective_ac"
_DISABLED = "_nemo_disable_activation_checkpointing"  # NeMo's flag on layers that are not to be checkpointed


def is_selective_activation_checkpointing(activation_checkpointing: object) -> bool:
    """Return whether a config value is the word ``selective``, in any case."""
    return isinstance(activation_checkpointing, str) and activation_checkpointing.lower() == "selective"


def make_selective_checkpoint_context_fn() -> Callable[[], Any]:
    """Return a context function for non-reentrant ``torch.utils.checkpoint``, with the policy for any model."""
    return context_fn("general")


def unwrap_checkpoint_wrapper(module: nn.Module) -> Any:
    """Return the module inside torch's ``checkpoint_wrapper``, or ``module`` itself: a region has no wrapper."""
    return getattr(module, WRAPPED_MODULE, module)


class _AsInForward(ExitStack):
    """The process flags at the time of construction, inside ``inner``; may be entered repeatedly."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._flags, self._inner = BackendFlags(), inner

    def __enter__(self) -> Any:
        self.enter_context(self._inner)
        self._flags.enter_on(self)
        return self


def transformer_engine_attention_backend_snapshot_context_fn(
    context_fn: Callable[[], Any] | None = noop_context_fn,
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of ``context_fn``; the second one also restores what selects kernels."""
    forward, recompute = (context_fn or noop_context_fn)()
    return forward, _AsInForward(recompute)


sdpa_backend_snapshot_context_fn = transformer_engine_attention_backend_snapshot_context_fn  # which restores all of it


# The ops with which FSDP2 gathers parameters: in recomputation only, if the forward found them prefetched.
_GATHERING = (
    "fsdp.all_gather_copy_in fsdp.split_with_sizes_copy fsdp.chunk_cat fsdp.copy_ c10d._allgather_base_ "
    "aten.empty.memory_format aten.empty_like aten.view"
)


def ignore_sac_ops(ops: Iterable[object | None]) -> None:
    """Add ops, except None, to those that torch's own selective checkpointing does not count."""
    ignored_ops().update(op for op in ops if op is not None)


def ensure_profiler_ops_sac_ignored() -> None:
    """Let torch's own selective checkpointing ignore the ops of ``record_function``."""
    names = ("enter", "enter_new", "exit", "exit._RecordFunction")
    ignore_sac_ops(find_op(f"profiler._record_function_{name}") for name in names)


def ensure_fsdp_ops_sac_ignored() -> None:
    """Let torch's own selective checkpointing ignore the ops with which FSDP2 gathers parameters."""
    ignore_sac_ops(map(find_op, _GATHERING.split()))


def detect_kv_sharing_and_maybe_disable_cache(model: nn.Module) -> bool:
    """Return whether layers of ``model`` read other layers' keys and values from the cache; if not, turn it off.

    Raises ``ModelError`` for a config that cannot be written to: recomputation would then write to the cache again.
    """
    is_shared = shares_kv(model)
    if not is_shared:
        turn_off_cache(model)
    return is_shared


def apply_selective_checkpointing_to_layers(
    model: nn.Module, layers: list[nn.Module], has_kv_sharing: bool, enable_compile: bool = False
) -> None:
    """Make each of ``layers``, transformer blocks of ``model``, a region under the policy of the model's family.

    With ``has_kv_sharing``, attention cannot be recomputed: the other sub-modules then become regions that are
    recomputed as a whole, with a warning. ``enable_compile`` changes nothing: a region is part of what is compiled.

    Raises ``ModelError``, with nothing changed, for layers that are already regions.
    """
    _put_on_layers(model, layers, family_policy(model, layers), has_kv_sharing=has_kv_sharing)


def apply_full_layer_checkpointing_to_layers(model: nn.Module, layers: list[nn.Module]) -> None:
    """Make each of ``layers``, transformer blocks of ``model``, a region that is recomputed as a whole.

    Layers that are already regions, or are inside torch's ``checkpoint_wrapper``, are skipped. If layers of the model
    share keys and values, their parts without attention become regions, with a warning.
    """
    layers = [one for one in layers if not (hasattr(one, WRAPPED_MODULE) or isinstance(ours_on(one), InstalledForward))]
    _put_on_layers(model, layers, FULL, has_kv_sharing=shares_kv(model))


def _put_on_layers(model: nn.Module, layers: list[nn.Module], policy: Policy, *, has_kv_sharing: bool) -> None:
    if has_kv_sharing and layers:
        warn("these layers share keys and values, so that attention cannot be recomputed; their other parts are")
        apply_submodule_checkpointing(layers, has_kv_sharing)
    else:
        put_regions(model, (layer for layer in layers if not getattr(layer, _DISABLED, False)), policy)


def apply_submodule_checkpointing(
    layers: list[nn.Module],
    has_kv_sharing: bool,
    *,
    context_fn: Callable[[], Any] | None = sdpa_backend_snapshot_context_fn,
) -> None:
    """Make the parts of each layer (attention, MLP, norms) regions.

    With ``has_kv_sharing``, parts that are or contain attention are left alone. ``context_fn``: the result of
    ``sac.context_fn`` or ``make_selective_checkpoint_context_fn``, whose policy the regions get. The functions of this
    module that restore attention backends, and None, all mean regions that are recomputed as a whole.

    Raises ``ConfigError`` for another ``context_fn``; ``ModelError``, with nothing changed, for parts that are already
    regions, and if there are no parts.
    """
    inner, restores = context_fn, sdpa_backend_snapshot_context_fn
    if isinstance(inner, partial) and inner.func is restores:
        inner = next(iter((*inner.args, *inner.keywords.values())), None)
    policy = FULL if inner is restores else policy_of_contexts(inner)
    found = f"{inner!r} makes its own contexts around forward and recomputation, which regions do not enter"
    fix = "choose per op with context_fn=sac.context_fn(policy), or leave it out"
    refuse([(policy is None, "context_fn", found, fix)], "apply_submodule_checkpointing")
    layers = [layer for layer in layers if not getattr(layer, _DISABLED, False)]
    parts = tuple(part for layer in layers for part in _parts(root_node(layer), without_attention=has_kv_sharing))
    if layers and not parts:
        found = "the layers have no sub-modules with parameters that could be regions"
        raise ModelError(Problem("apply_submodule_checkpointing", found))
    put_regions(nn.ModuleList(layers), parts, policy or FULL)


def _parts(node: Node, *, without_attention: bool) -> Iterator[nn.Module]:
    for child in children_of(node):
        if without_attention and is_attention(child.path, child.module):
            continue
        has_attention = any(is_attention(name, part) for name, part in child.module.named_modules())
        if (without_attention and has_attention) or not is_callable(child.module):
            yield from _parts(child, without_attention=without_attention)
        elif any(True for _ in child.module.parameters()):
            yield child.module
