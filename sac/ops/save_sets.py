"""Named sets of ops such as `attention` and `matmul`, and conditions on calls of some of these ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

# -- Conditions: predicates over one call, for ops of which a save-set contains only some calls

Condition = Callable[[tuple[Any, ...], Mapping[str, Any], Any], bool]  # (args, kwargs, out)


def device_to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Return whether the call copies a tensor from an accelerator to the host; ``out`` may be None before the call."""
    source = args[0] if args else kwargs.get("self")
    if not isinstance(source, torch.Tensor) or source.device.type in ("cpu", "meta"):
        return False
    target = out.device if isinstance(out, torch.Tensor) else kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu"


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], argument: str) -> Any:
    position, _, name = argument.partition("/")
    return args[int(position)] if position and int(position) < len(args) else kwargs.get(name)


@cache
def condition_of(name: str) -> Condition:
    """Return the condition of this name: ``device_to_host``, or ``absent:3/out,4/mask``.

    ``absent``: each of these arguments, at this position or under this keyword, is missing or None.
    """
    if name == "device_to_host":
        return device_to_host
    arguments = name.removeprefix("absent:").split(",")
    return lambda args, kwargs, out: all(_argument(args, kwargs, argument) is None for argument in arguments)


# -- The save-sets: ``attention``, ``matmul``, ``collective``, …

# An entry names a packet (``aten.mm``), an overload, a higher-order op or a glob. Ops that this build of torch lacks
# are skipped, and so are overloads that cannot be saved. A glob of a set never matches a backward op
# (``BACKWARD_MARKS``).

BACKWARD_MARKS = ("bwd", "backward", "_grad")


@dataclass(frozen=True, slots=True)
class SetEntry:
    """One name of a save-set; ``condition`` (see ``condition_of``) limits it to some calls of the op."""

    name: str
    condition: str = ""


@dataclass(frozen=True, slots=True)
class SaveSet:
    """A named set of ops.

    ``functions``: autograd Functions that do the same in a kernel of their own, by the bare or qualified name of their
    class, with globs.
    """

    entries: tuple[SetEntry, ...]
    functions: tuple[str, ...] = ()


_CONDITIONS = dict.fromkeys(("aten._to_copy", "prims.device_put"), "device_to_host")


def _set(names: str, functions: str = "") -> SaveSet:
    """Return a set of ops and Functions; the name of an op without a namespace is one of aten."""
    full = (name if "." in name else f"aten.{name}" for name in names.split())
    return SaveSet(tuple(SetEntry(name, _CONDITIONS.get(name, "")) for name in full), tuple(functions.split()))


# Note [Saving a collective]
# The saved tensor is the result of the collective, not of `wait_tensor`. `wait_tensor` returns its argument, so it
# counts as a view and runs again in recomputation. There it costs nothing, because the result has been waited for (or,
# if nothing used it in forward, its work is still registered under the same storage). Until the wait, the values are
# incomplete: the engine keeps the tensor itself and must not copy it. Checked by
# tests/unit/ops/test_save_sets.py.

SAVE_SETS: Mapping[str, SaveSet] = {
    # Outputs of fused attention kernels: dear to run again, small to keep (no scores are stored). The math path of
    # scaled_dot_product_attention is not an op: it dispatches matmuls, a softmax and perhaps a dropout.
    "attention": _set(
        """_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math_for_mps
        _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward
        _triton_scaled_dot_attention scaled_dot_product_attention
        higher_order.flex_attention torch_attn._varlen_attn
        *flash_attn*.*fwd* *flash_attn*.*forward* _vllm_fa*.*fwd* xformers*.*fwd* xformers*.*forward*
        mslk*.*flash*fwd* sageattention*.*attn* aiter.*mha*fwd* npu.npu_fusion_attention*""",
        "*FlashAttn*Func FusedAttnFunc* AttnFuncWithCP* xformers.ops.fmha.*",
    ),
    # Matrix products in full precision, and linear layers: most of the FLOPs of a block.
    "matmul": _set(
        """mm addmm bmm baddbmm addbmm mv addmv linear matmul _addmm_activation mkldnn_linear _foreach_mm
        _sparse_semi_structured_mm _sparse_semi_structured_addmm _sparse_semi_structured_linear _cslt_sparse_mm
        mkldnn._linear_pointwise mkl._mkl_linear
        symm_mem.fused_all_gather_matmul symm_mem.fused_matmul_reduce_scatter""",
        """LinearWithGradAccumulationAndAsyncCommunication LinearWithFrozenWeight
        transformer_engine.*._Linear transformer_engine.*._LayerNormLinear transformer_engine.*._LayerNormMLP""",
    ),
    # Grouped matrix products: the experts of a mixture-of-experts layer.
    "grouped_matmul": _set(
        """_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2
        transformers.grouped_mm_fallback torchao*.*grouped_mm* fbgemm*.*grouped* mslk*.*grouped*
        megablocks*.*gmm* grouped_gemm*.*gmm*""",
        "transformer_engine.*._GroupedLinear grouped_gemm.*.GroupedGemm megablocks.*.GroupedGemm",
    ),
    # Matrix products on scaled or quantised operands: fp8, mx formats, int8, int4.
    "low_precision_matmul": _set(
        """_scaled_mm _scaled_mm_v2 _int_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu
        _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _dyn_quant_matmul_4bit _mixed_dtypes_linear
        symm_mem.fused_all_gather_scaled_matmul symm_mem.fused_scaled_matmul_reduce_scatter
        onednn.qlinear_pointwise torchao*.*scaled_mm* torchao*.*_matmul* fbgemm*.f8* fbgemm*.i8* fbgemm*.bf16i4*
        mslk*.f8* mslk*.f4* mslk*.i8* mslk*.bf16i4* bitsandbytes.gemm_4bit
        bitsandbytes.int8_scaled_mm bitsandbytes.int8_mixed_scaled_mm bitsandbytes.int8_linear_matmul""",
        "bitsandbytes.*.MatMul* torchao.*.matmul_with_hp_or_float8_args",
    ),
    # Convolutions of every backend.
    "convolution": _set(
        """convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu
        cudnn_convolution_add_relu cudnn_convolution_transpose miopen_convolution miopen_convolution_relu
        miopen_convolution_add_relu miopen_convolution_transpose miopen_depthwise_convolution mkldnn_convolution
        _slow_conv2d_forward slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d
        slow_conv_transpose3d thnn_conv2d _conv_depthwise2d conv_depthwise3d conv_tbc _mps_convolution
        _mps_convolution_transpose _nnpack_spatial_convolution
        mkldnn._convolution_pointwise mkldnn._convolution_transpose_pointwise *causal_conv1d*.*fwd*"""
    ),
    # Results of collectives: keeping them spares the network in backward. See Note [Saving a collective].
    "collective": _set(
        """_c10d_functional.all_reduce _c10d_functional.all_reduce_coalesced
        _c10d_functional.all_gather_into_tensor _c10d_functional.all_gather_into_tensor_coalesced
        _c10d_functional.reduce_scatter_tensor _c10d_functional.reduce_scatter_tensor_coalesced
        _c10d_functional.all_to_all_single _c10d_functional.broadcast
        _c10d_functional_autograd.all_gather_into_tensor _c10d_functional_autograd.reduce_scatter_tensor
        _c10d_functional_autograd.all_to_all_single
        _dtensor.shard_dim_alltoall symm_mem.one_shot_all_reduce symm_mem.one_shot_all_reduce_copy
        symm_mem.multimem_one_shot_all_reduce deepep*.* deep_ep*.* hybridep*.* hybrid_ep*.*""",
        """_ReduceFromModelParallelRegion _GatherFromModelParallelRegion _GatherFromSequenceParallelRegion
        _ReduceScatterToSequenceParallelRegion _AllGatherFromTensorParallelRegion _ReduceScatterToTensorParallelRegion
        _AllToAll _SeqAllToAll FusedDispatch FusedCombine HybridEPDispatch HybridEPCombine deep_ep.*
        torch.distributed.nn.functional._*""",
    ),
    # Saved in every mode: ops whose results may differ between two runs of a router, because of ties or the last bit of
    # its scores, and ops that no generator state can rewind: cuDNN and MIOpen draw the dropout of their RNNs from their
    # own state. All-to-alls carry the routed tokens, including all-to-alls with even splits: if only some ranks have
    # uneven splits, a decision by sizes would make some ranks send again and others not, and the former would wait
    # forever. Not included: `max.dim`, which low-precision recipes use on every row for their scales.
    "nondeterministic": _set(
        """topk sort kthvalue mode aten.median.dim aten.nanmedian.dim argmax argmin multinomial histc bincount nonzero
        nonzero_static _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive _cudnn_rnn miopen_rnn
        _c10d_functional.all_to_all_single _c10d_functional_autograd.all_to_all_single
        deepep*.*dispatch* deep_ep*.*dispatch* hybridep*.*dispatch* hybrid_ep*.*dispatch*""",
        "FusedDispatch HybridEPDispatch deep_ep.*Dispatch*",
    ),
    # Copies from an accelerator to the host, each of which stops the host until the device has caught up.
    "device_to_host": _set("_to_copy prims.device_put"),
    # Draws from a random generator: keeping them spares the draw; the generator is put where it would have been.
    "random": _set(
        """bernoulli binomial cauchy exponential geometric log_normal multinomial native_dropout _fused_dropout normal
        normal_functional poisson rand rand_like randint randint_like randn randn_like random randperm
        rrelu_with_noise_functional _sample_dirichlet _standard_gamma uniform
        prims.normal prims.uniform rngprims.philox_rand"""
    ),
    # Reductions to the largest magnitude, from which low-precision recipes compute their scales.
    "scaling": _set(
        "amax amin aminmax aten.max.default aten.min.default torchao*.*amax* torchao*.*_scale torchao*.*_scales"
    ),
    # A compiled region inside the block, seen from outside as one op.
    "compiled": _set("higher_order.inductor_compiled_code higher_order.invoke_subgraph"),
}
