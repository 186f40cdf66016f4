"""Kernels as they are published, and a decoder block that uses them.

Each is an autograd Function whose kernel reads and writes memory without ops, as Triton kernels do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.blocks import Attention, GatedMLP, LlamaLikeBlock, RootMeanSquareNorm
from tests.support.replay_kernels import at


def fresh(like: Tensor, values: Any) -> Tensor:
    """Memory that `torch.empty` gives and a kernel fills."""
    out = torch.empty(like.shape)
    np.copyto(at(out), values)
    return out


class RMSNorm(torch.autograd.Function):
    """It saves the reciprocal of the root, and its backward writes over the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        scale = torch.empty(x.shape[:-1])
        np.copyto(at(scale), 1 / np.sqrt(np.square(at(x)).mean(-1) + np.float32(1e-6)))
        ctx.save_for_backward(x, weight, scale)
        return fresh(x, at(x) * at(scale)[..., None] * at(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        grad = grad.contiguous()
        g, n, s = at(grad), at(x) * at(scale)[..., None], at(scale)[..., None]
        of_weight = fresh(weight, (g * n).sum(tuple(range(x.dim() - 1))))
        inner = g * at(weight)
        np.copyto(g, s * (inner - n * (inner * n).mean(-1, keepdims=True)))
        return grad, of_weight


class Rotation(torch.autograd.Function):
    """Rotary embedding in place on the results of two projections; autograd is not told of the write."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return Rotation.turned(q, cos, sin, 1), Rotation.turned(k, cos, sin, 1)

    @staticmethod
    def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
        x = x.contiguous()
        values, c, s = at(x), at(cos), at(sin) * np.float32(sign)
        low, high = (half.copy() for half in np.split(values, 2, -1))
        np.copyto(values, np.concatenate([low * c - high * s, high * c + low * s], -1))
        return x

    @staticmethod
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return Rotation.turned(grad_q, cos, sin, -1), Rotation.turned(grad_k, cos, sin, -1), None, None


class SwiGLU(torch.autograd.Function):
    """Backward writes the gradients over what it has saved."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return fresh(gate, at(gate) / (1 + np.exp(-at(gate))) * at(up))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        a, b, g = at(gate).copy(), at(up).copy(), at(grad.contiguous())
        s = 1 / (1 + np.exp(-a))
        np.copyto(at(gate), g * b * s * (1 + a * (1 - s)))
        np.copyto(at(up), g * a * s)
        return gate, up


class FusedNorm(RootMeanSquareNorm):
    """The norm as one kernel."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return RMSNorm.apply(x_BTD, self.weight)


class FusedAttention(Attention):
    """Attention whose rotation writes over the results of the projections."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.size)
        q, k, v = (one(x_BTD).view(heads) for one in (self.q_proj, self.k_proj, self.v_proj))
        half = slice(self.size // 2)
        cos, sin = (table[: heads[1], None, half].contiguous() for table in (self.cos, self.sin))
        q, k, v = (one.transpose(1, 2) for one in (*Rotation.apply(q, k, cos, sin), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(x_BTD.shape))


class FusedMLP(GatedMLP):
    """Its activation and product as one kernel."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(SwiGLU.apply(self.gate_proj(x_BTD), self.up_proj(x_BTD)))


class FusedBlock(LlamaLikeBlock):
    """The decoder block with them."""

    def __init__(self, d: int = 32, heads: int = 4, hidden: int | None = None) -> None:
        super().__init__(d, heads, hidden)
        self.self_attn, self.mlp = FusedAttention(d, heads), FusedMLP(d, hidden or 2 * d)
        self.input_layernorm, self.post_attention_layernorm = FusedNorm(d), FusedNorm(d)
