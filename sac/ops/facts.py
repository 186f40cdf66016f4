"""Properties of an op: which arguments it writes, whether it is a view, draws random numbers or communicates.

Most properties come from the schema. Where a schema omits or overstates one, a list here corrects it. The lists come
from calling the ops of torch 2.13 and comparing arguments before and after (``tests/unit/ops/test_facts_liars.py``
repeats this).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch

from sac.ops.registry import NamePattern, op_name
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.torch_private import MAYBE_ALIASING


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional"})

INFRASTRUCTURE = frozenset({"fsdp", "c10d", "profiler", "streams", "debug_mode_ops"})
"""Namespaces whose ops manage a training job rather than compute: hooks, buffers, streams, profiler marks."""

_NORMS = _words(
    """native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_gather_stats batch_norm_update_stats
    batch_norm_gather_stats_with_counts _batch_norm_impl_index batch_norm instance_norm"""
)
HIDDEN_WRITES: Mapping[str, tuple[str, ...]] = {
    **{f"aten.{norm}": ("running_mean", "running_var") for norm in _NORMS},
    "aten.mkldnn_rnn_layer_backward": ("workspace",),
    "aten._cudnn_rnn_flatten_weight": ("weight_arr",),
    "_c10d_functional.irecv": ("tensor",),
    "_c10d_functional.batch_p2p_ops": ("tensors",),
}
"""Arguments that an op writes although its schema does not say so."""

HIDDEN_ALIASES = _words(
    """aten._unsafe_view aten.unsafe_split aten.unsafe_split_with_sizes aten.unsafe_chunk aten.lift aten.data aten.set
    aten._remove_batch_dim aten._to_cpu aten._coalesce aten._coalesced aten._sparse_coo_tensor_with_dims_and_tensors
    aten.dequantize aten.to_dense aten.sum_to_size aten.type_as aten.broadcast_tensors aten._saturate_weight_to_fp16
    aten.to_dense_backward aten.to_mkldnn_backward aten.cumprod_backward inductor._reinterpret_tensor
    inductor._alloc_from_pool export.access_subclass_inner_tensor _c10d_functional.wait_tensor
    _c10d_functional._wrap_tensor_autograd c10d_functional.wait_tensor"""
)
"""Packets that return an argument or a view of its storage, always or for some arguments, undeclared in the schema."""

FILLING = _words(
    """copy_ fill_ zero_ set_ resize_ uniform_ normal_ bernoulli_ exponential_ geometric_ cauchy_ log_normal_ random_
    _foreach_copy_ _foreach_zero_ rrelu_with_noise rrelu_with_noise_ index_put_ _index_put_impl_ index_copy_ index_fill_
    scatter_ masked_fill_ masked_scatter_ put_ fill_diagonal_"""
)
"""Aten packets that fill an argument, or parts of it, without reading its old values."""

# FlashAttention 2's kernels take `q` by C++ reference to rebind it, which their schema marks as a write.
_REBINDS_Q = ("*flash_attn*.fwd", "*flash_attn*.varlen_fwd", "_vllm_fa*.fwd", "_vllm_fa*.varlen_fwd")

_UNINITIALISED = _words(
    """empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided
    _empty_affine_quantized _empty_per_channel_affine_quantized"""
)
_CONSTANT_OF_A_TENSOR = _words("zeros_like ones_like full_like new_zeros new_ones new_full zero _make_dep_token")
_FLASH = _words("aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_flash_attention")
_TAGS_ITS_RANDOM_OPS = frozenset({"aten", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd"})
_HIGHER_ORDER_REASONS = {
    **dict.fromkeys(("print", "call_torchbind", "_export_tracepoint"), "it returns no tensor"),
    "triton_kernel_wrapper_mutation": "it writes its arguments",
}


@dataclass(frozen=True, slots=True)
class OpTraits:
    """Properties of one op that hold for all arguments; positions and names are those of its schema."""

    mutated_args: tuple[int, ...] = ()
    mutated_kwargs: tuple[str, ...] = ()  # keyword-only arguments
    is_view: bool = False  # the result is an argument or shares its storage
    is_factory: bool = False  # a constant, a range or fresh memory: depends on no tensor values and no generator
    is_uninitialised: bool = False
    is_infrastructure: bool = False
    is_random: bool = False
    may_draw: bool = False  # the generator state has to be compared around a saved call
    chance: int = -1  # the argument without which attention does not draw: the probability of dropout
    returns_tensor: bool = True
    is_collective: bool = False  # ranks have to meet in it or in its wait
    tensor_positions: tuple[int, ...] = ()  # positions of its tensor arguments
    view_of: int = -1  # the argument of which the result is always a view, as a new tensor; -1 if there is none
    is_flat: bool = False  # each tensor argument is a separate positional argument, not in a list
    unsavable_reason: str = ""  # phrase for a message; empty when every call can be saved
    savable_if: str = ""  # a condition: calls that can be saved although there is an unsavable_reason

    @property
    def savable(self) -> bool:
        """Whether the result of every call can be saved instead of recomputed."""
        return not self.unsavable_reason


@cache
def traits_of(op: Any) -> OpTraits:
    """Return the properties of ``op``: an overload, a higher-order op, or a callable without a schema."""
    schema = getattr(op, "_schema", None)
    return _of_schema(op, schema) if isinstance(schema, torch.FunctionSchema) else _without_schema(op)


def _without_schema(op: Any) -> OpTraits:
    reason = _HIGHER_ORDER_REASONS.get(op_name(op).rpartition(".")[2], "")
    return OpTraits(may_draw=True, returns_tensor=not reason, unsavable_reason=reason)


def _of_schema(op: Any, schema: Any) -> OpTraits:
    name = op_name(op)
    namespace, own_name = name.split(".")[:2]
    packet = f"{namespace}.{own_name}"
    types = [str(argument.type) for argument in schema.arguments]
    arguments = [argument.name for argument in schema.arguments]
    written = _written_arguments(packet, schema)
    is_random = torch.Tag.nondeterministic_seeded in op.tags or any("Generator" in one for one in types)
    returns_tensor = any("Tensor" in str(result.type) for result in schema.returns)
    is_view = returns_tensor and not written and _aliases(packet, op, schema)
    is_uninitialised = own_name in _UNINITIALISED and not written
    is_constant = (
        own_name in _CONSTANT_OF_A_TENSOR
        or (own_name == "fill" and schema.overload_name == "Scalar")
        or (namespace in ("aten", "prims") and returns_tensor and not any("Tensor" in one for one in types))
    )
    is_factory = is_uninitialised or (is_constant and not written and not is_random)
    names = ", ".join(f"`{argument.name}`" for _, argument in written)
    reasons = (
        (namespace in INFRASTRUCTURE, f"{namespace} ops belong to the infrastructure"),
        (bool(written), f"it writes its argument{'s' if len(written) > 1 else ''} {names}"),
        (not returns_tensor, "it returns no tensor"),
        (is_view, "it is a view"),
        (is_uninitialised, "it makes an uninitialised tensor"),
        (is_factory, "it makes a constant"),
    )
    return OpTraits(
        mutated_args=tuple(position for position, argument in written if not argument.kwarg_only),
        mutated_kwargs=tuple(argument.name for _, argument in written if argument.kwarg_only),
        is_view=is_view,
        is_factory=is_factory,
        is_uninitialised=is_uninitialised,
        is_infrastructure=namespace in INFRASTRUCTURE,
        is_random=is_random,
        may_draw=is_random or namespace not in _TAGS_ITS_RANDOM_OPS,
        chance=arguments.index("dropout_p") if packet in _FLASH else -1,
        returns_tensor=returns_tensor,
        is_collective=namespace in _COLLECTIVES or _is_of_collectives(name),
        is_flat=_is_flat(schema),
        tensor_positions=tuple(
            position
            for position, argument in enumerate(schema.arguments)
            if types[position] in _ONE_TENSOR and not argument.kwarg_only
        ),
        view_of=_view_of(packet, schema) if is_view else -1,
        unsavable_reason=next((reason for holds, reason in reasons if holds), ""),
        savable_if=_savable_if(written) if returns_tensor and namespace not in INFRASTRUCTURE else "",
    )


_ONE_TENSOR = ("Tensor", "Optional[Tensor]")


def _written_arguments(packet: str, schema: Any) -> list[tuple[int, Any]]:
    hidden = HIDDEN_WRITES.get(packet, ())
    overstated = "q" if any(fnmatchcase(packet, glob) for glob in _REBINDS_Q) else ""
    written = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.name in hidden
        or (argument.alias_info is not None and argument.alias_info.is_write and argument.name != overstated)
    ]
    says_it_writes = packet.endswith("_") and not packet.endswith("__")  # `inductor.accumulate_grad_` marks nothing
    return written or ([(0, schema.arguments[0])] if says_it_writes and schema.arguments else [])


def _aliases(packet: str, op: Any, schema: Any) -> bool:
    # The tag marks composite ops that return an argument in some cases, such as dropout in eval mode.
    marked = any(argument.alias_info is not None and not argument.alias_info.is_write for argument in schema.arguments)
    return marked or packet in HIDDEN_ALIASES or (MAYBE_ALIASING is not None and MAYBE_ALIASING in op.tags)


def _view_of(packet: str, schema: Any) -> int:
    if packet == "aten._unsafe_view":
        return 0
    if packet in HIDDEN_ALIASES or packet == "aten.lift_fresh" or not packet.startswith("aten."):
        return -1  # `lift_fresh` returns its argument
    marked = [position for position, argument in enumerate(schema.arguments) if argument.alias_info is not None]
    results = [str(result.type) for result in schema.returns if result.alias_info is not None]
    return marked[0] if len(schema.returns) == len(marked) == 1 and results == ["Tensor"] else -1


def _is_flat(schema: Any) -> bool:
    types = [(str(argument.type), argument.kwarg_only) for argument in schema.arguments]
    return not any(
        (("Tensor" in name and (is_keyword or name not in _ONE_TENSOR)) or name in ("Any", "t") or "__torch__" in name)
        for name, is_keyword in types
    )


def _is_of_collectives(name: str) -> bool:
    return not any(mark in name for mark in BACKWARD_MARKS) and any(
        NamePattern(entry.name).matches(name) for entry in SAVE_SETS["collective"].entries
    )


def _savable_if(written: list[tuple[int, Any]]) -> str:
    """Return the condition under which an op that writes only optional arguments writes nothing; else ``""``."""
    marked = all(argument.alias_info is not None and argument.alias_info.is_write for _, argument in written)
    if not written or not marked or not all("Optional" in str(argument.type) for _, argument in written):
        return ""
    return "absent:" + ",".join(f"{'' if arg.kwarg_only else position}/{arg.name}" for position, arg in written)
