"""Run ops on CPU tensors as a GPU would run them, to plan for a GPU that is not present."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sac.errors import PlanError, Problem
from sac.planner.devices import device_named
from sac.torch_private import scoped_library

# Note [Lowering]
#
# Some functions of torch run other ops on a GPU than on the CPU: RMS norm and dropout are one op each on a GPU, and
# attention is a kernel chosen by sizes, dtype and device. These ops save other tensors for backward than the CPU's ops,
# so a plan for a GPU has to see them. Tensors without data need no kernels, only shapes. So this module makes torch
# call the GPU's ops for CPU tensors. It registers them at autograd's dispatch key, above the level where modes
# intercept ops, so everything that runs later, including backward and recomputation, sees the same ops. (A
# TorchFunctionMode is inactive in backward.)
#
# This changes torch for the whole process, so it happens in a separate process (planning.py), which the caller never
# sees. The choice of attention follows torch 2.11 to 2.13 (`sdp_utils.cpp`). Flags that the model sets
# (`torch.nn.attention.sdpa_kernel`) are respected, an order that it sets is not. Layer norm, softmax, losses and
# products are the same ops on both devices.

_HALF = (torch.float16, torch.bfloat16)
_CUDNN_HEADS = {"h100": 256, "h200": 256, "b200": 128}  # devices that prefer cuDNN's attention, up to this head size
_NEEDED = {
    "_fused_rms_norm": "RMS norm",
    "_fused_rms_norm_backward": "RMS norm",
    "native_dropout": "dropout",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
}


_RECURRENT = ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input")


def not_lowered() -> tuple[str, ...]:
    """Return notes on functions that still run as on the CPU because this torch lacks the GPU's op."""
    return tuple(
        f"this torch ({torch.__version__}) has no aten::{op}: {what} is planned as the CPU runs it"
        for op, what in _NEEDED.items()
        if not hasattr(torch.ops.aten, op)
    )


@contextmanager
def lowered_to(device_name: str) -> Iterator[None]:
    """Run ops on CPU tensors without data as ``device_name`` would; see Note [Lowering].

    Use it only in a separate process, since it changes torch for every thread. Raises ``PlanError`` for an unknown
    device.
    """
    device = device_named(device_name).name
    lacking = {what for op, what in _NEEDED.items() if not hasattr(torch.ops.aten, op)}
    kernels: list[tuple[str, str, str, Callable[..., Any]]] = [
        ("RMS norm", "_fused_rms_norm", "CPU", _rms_norm),
        ("RMS norm", "_fused_rms_norm_backward", "CPU", _rms_norm_backward),
        ("dropout", "dropout", "AutogradCPU", _dropout),
        ("attention", "scaled_dot_product_attention", "AutogradCPU", partial(_attention, device)),
    ]
    with scoped_library("aten") as library:
        for what, op, key, kernel in kernels:
            if device != "cpu" and what not in lacking:
                library.impl(op, kernel, key)
        for op in _RECURRENT if device != "cpu" else ():
            library.impl(op, partial(_refuse_recurrent, op.partition(".")[0], device), "AutogradCPU")
        yield


def _refuse_recurrent(op: str, device: str, *_: Any) -> Any:
    found = (
        f"{device} runs it in one kernel of cuDNN or MIOpen, and how many bytes that keeps for backward is not known"
    )
    fix = "plan where it runs: --real --device cuda, use mode: full, or a policy by hand"
    raise PlanError(Problem(f"aten.{op}", found, fix=fix))


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result, and 1 / the root mean square of each row: [..., 1 per normalized dimension], in float32."""
    rows = [*x.shape[: x.dim() - len(shape)], *(1 for _ in shape)]
    return torch.empty_like(x), x.new_empty(rows, dtype=torch.float32 if x.dtype in _HALF else x.dtype)


def _rms_norm_backward(
    grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    of_weight = torch.empty_like(weight) if wanted[1] and weight is not None else None
    return torch.empty_like(x) if wanted[0] else None, of_weight


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if train and 0 < p < 1 and x.numel():
        out: Tensor = torch.ops.aten.native_dropout.default(x, p, train)[0]
        return out
    if not train or p == 0 or not x.numel():
        return x
    return x * torch.zeros((), dtype=x.dtype)  # everything is dropped


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention. Tensors are [batch, heads, length, head]; key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def heads(self) -> tuple[int, int]:
        """The head sizes of query and value."""
        return self.query.shape[-1], self.value.shape[-1]

    @property
    def is_alike(self) -> bool:
        """Whether query, key and value have the same batch size and number of heads."""
        return self.query.shape[:2] == self.key.shape[:2] == self.value.shape[:2]


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
) -> Tensor:
    call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if query.dim() == key.dim() == value.dim() == 4 and (call.is_alike or enable_gqa):
        if _cudnn_takes(call, device):
            return _by_cudnn(call)
        if _flash_takes(call):
            return _by_flash(call)
        if _efficient_takes(call):
            return _by_efficient(call)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math.default(
        query, key, value, _added(call), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _cudnn_takes(call: _Call, device: str) -> bool:
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    if device not in _CUDNN_HEADS or deprioritized or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    fits = all(size <= _CUDNN_HEADS[device] and size % 8 == 0 for size in call.heads)
    learns_mask = call.mask is not None and call.mask.requires_grad
    return call.query.dtype in _HALF and fits and not strict and not learns_mask


def _flash_takes(call: _Call) -> bool:
    if call.mask is not None or call.query.dtype not in _HALF or not torch.backends.cuda.flash_sdp_enabled():
        return False
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    return call.heads[0] == call.heads[1] <= 256


def _efficient_takes(call: _Call) -> bool:
    if call.query.dtype not in (*_HALF, torch.float32) or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return False
    if not call.is_alike:
        return False
    aligned = 8 if call.query.dtype in _HALF else 4
    return all(size % aligned == 0 for size in call.heads)


def _added(call: _Call) -> Tensor | None:
    """Return the mask in the form that is added to the scores."""
    if call.mask is None or call.mask.dtype is not torch.bool:
        return call.mask
    none = torch.zeros((), dtype=call.query.dtype)
    return torch.where(call.mask, none, torch.full((), float("-inf"), dtype=call.query.dtype))


def _by_cudnn(call: _Call) -> Tensor:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    out: Tensor = op(
        call.query, call.key, call.value, _added(call), _needs_gradient(call), call.dropout, call.is_causal, False,
        scale=call.scale,
    )[0]  # fmt: skip
    return out


def _by_flash(call: _Call) -> Tensor:
    size = call.heads[0]
    scale = size**-0.5 if call.scale is None else call.scale
    padding = -size % 8
    padded = [torch.nn.functional.pad(x, (0, padding)) if padding else x for x in (call.query, call.key, call.value)]
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    out: Tensor = op(*padded, call.dropout, call.is_causal, False, scale=scale)[0]
    return out[..., :size] if padding else out


def _by_efficient(call: _Call) -> Tensor:
    bias = _added(call)
    if bias is not None:
        length = bias.shape[-1]
        if length % 16:  # rows of a mask are aligned
            bias = torch.nn.functional.pad(bias, (0, -length % 16))[..., :length]
        bias = bias.expand(*call.query.shape[:3], length)
    op = torch.ops.aten._scaled_dot_product_efficient_attention.default
    out: Tensor = op(
        call.query, call.key, call.value, bias, _needs_gradient(call), call.dropout, call.is_causal, scale=call.scale
    )[0]
    return out


def _needs_gradient(call: _Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in (call.query, call.key, call.value))
