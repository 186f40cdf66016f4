"""Run ops on CPU tensors as a GPU would run them, to plan for a GPU that is not present."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sac.errors import PlanError, Problem
from sac.torch_private import FakeTensor, scoped_library

# Note [Lowering]
#
# Some functions of torch run other ops on a GPU than on the CPU: RMS norm and dropout are one op each on a GPU, and
# attention is a kernel chosen by sizes, dtype and device. They save other tensors for backward, so a plan for a GPU has
# to see them. So this module makes torch call the GPU's ops for CPU tensors without data, which need shapes only. It
# registers them at autograd's dispatch key, above the level where modes intercept ops: backward and recomputation see
# them too, where a TorchFunctionMode is inactive.
#
# This changes torch for all threads while the plan is made; a fused norm with data, of another thread, raises.
# Attention follows torch 2.11 to 2.13 (`sdp_utils.cpp`) by one rule per kernel; flags that a model sets
# (`torch.nn.attention.sdpa_kernel`) are respected. Layer norm, softmax, losses and products are the same ops on both.

_HALF = (torch.float16, torch.bfloat16)
_CUDNN_HEADS = {"h100": 256, "h200": 256, "b200": 128}  # devices that prefer cuDNN's attention, up to this head size
_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")


@contextmanager
def lowered_to(device: str) -> Iterator[None]:
    """Run ops on CPU tensors without data as this one of ``DEVICES`` would, in every thread; see Note [Lowering]."""
    kernels: list[tuple[str, str, Callable[..., Any]]] = [
        ("_fused_rms_norm", "CPU", _rms_norm),
        ("_fused_rms_norm_backward", "CPU", _rms_norm_backward),
        ("dropout", "AutogradCPU", _dropout),
        ("scaled_dot_product_attention", "AutogradCPU", partial(_attention, device)),
        *((op, "AutogradCPU", partial(_refuse_recurrent, op.partition(".")[0], device)) for op in _RECURRENT),
    ]
    with scoped_library("aten", "IMPL") as library:
        for op, key, kernel in kernels if device != "cpu" else ():
            library.impl(op, kernel, key)
        yield


def _refuse_recurrent(op: str, device: str, *_: Any) -> Any:
    found = f"{device} runs it in one kernel, and how many bytes that keeps for backward is not known"
    fix = "give sac.apply a `budget` on that device, or use mode: full, or a policy by hand"
    raise PlanError(Problem(f"aten.{op}", found, fix=fix))


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result, and 1 / the root mean square of each row: [..., 1 per normalized dimension], in float32."""
    if not isinstance(x, FakeTensor):
        raise PlanError(Problem("sac.plan", "another thread runs a model while a plan is made for a device not here"))
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32 if x.dtype in _HALF else x.dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    of_weight = torch.empty_like(weight) if wanted[1] and weight is not None else None
    return torch.empty_like(x) if wanted[0] else None, of_weight


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    if not train or p == 0 or not x.numel():
        return x
    return torch.ops.aten.native_dropout.default(x, p, train)[0]


def _attention(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Run attention by the kernel that ``device`` takes. Tensors are [batch, heads, length, head]."""
    heads, dtype, flags = (query.shape[-1], value.shape[-1]), query.dtype, torch.backends.cuda
    alike = query.shape[:2] == key.shape[:2] == value.shape[:2]
    fits = query.dim() == key.dim() == value.dim() == 4 and (alike or enable_gqa)
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    mask = attn_mask
    if mask is not None and mask.dtype is torch.bool:  # the form that is added to the scores
        mask = torch.where(mask, torch.zeros((), dtype=dtype), torch.full((), float("-inf"), dtype=dtype))
    is_wanted = flags.cudnn_sdp_enabled() and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
    most = _CUDNN_HEADS.get(device, 0) if is_wanted else 0
    is_const = mask is None or not mask.requires_grad
    if fits and dtype in _HALF and is_const and all(size <= most and size % 8 == 0 for size in heads):
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default
        return cudnn(query, key, value, mask, learns, dropout_p, is_causal, False, scale=scale)[0]
    is_square = not is_causal or query.shape[-2] == key.shape[-2]
    if fits and dtype in _HALF and mask is None and flags.flash_sdp_enabled() and is_square and max(heads) <= 256:
        scale = heads[0] ** -0.5 if scale is None else scale
        padded = [pad(x, (0, -heads[0] % 8)) if heads[0] % 8 else x for x in (query, key, value)]
        flash = torch.ops.aten._scaled_dot_product_flash_attention.default
        out = flash(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., : heads[0]] if heads[0] % 8 else out
    aligned = 8 if dtype in _HALF else 4
    is_known = dtype in (*_HALF, torch.float32) and all(size % aligned == 0 for size in heads)
    if fits and alike and is_known and flags.mem_efficient_sdp_enabled():
        if mask is not None:
            length = mask.shape[-1]  # rows of a mask are aligned
            mask = pad(mask, (0, -length % 16))[..., :length] if length % 16 else mask
            mask = mask.expand(*query.shape[:3], length)
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
        return efficient(query, key, value, mask, learns, dropout_p, is_causal, scale=scale)[0]
    math = torch.ops.aten._scaled_dot_product_attention_math.default
    return math(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]
