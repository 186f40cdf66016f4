"""Custom ops and custom autograd Functions of the kinds that real kernels come in.

None of the ops carries a tag: their authors rarely set one, so a random op must be known by what it does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


@torch.library.custom_op("sactest::noisy_scale", mutates_args=())
def noisy_scale(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout without rescaling, and its mask."""
    mask = (torch.rand_like(x) > p).to(x.dtype)
    return x * mask, mask


@noisy_scale.register_fake
def _(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _keep_mask(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _masked_grad(ctx: Any, grad: Tensor, grad_mask: Tensor | None) -> tuple[Tensor, None]:
    return grad * ctx.saved_tensors[0], None


noisy_scale.register_autograd(_masked_grad, setup_context=_keep_mask)


@torch.library.custom_op("sactest::noisy_attention", mutates_args=())
def noisy_attention(q: Tensor, k: Tensor, v: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Attention with dropout on its weights, and the dropped weights, which backward reads.

    It turns autocast off: torch 2.13 turns it off inside a custom op under any dispatch mode, and only there.
    """
    with torch.autocast(q.device.type, enabled=False):
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        weights = weights * (torch.rand_like(weights) > p)
        return weights @ v, weights


@noisy_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, p: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(v), q.new_empty(*q.shape[:-1], k.shape[-2])


def _keep_values(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[2], output[1])


def _attention_grad(ctx: Any, grad: Tensor, grad_weights: Tensor | None) -> tuple[Tensor | None, ...]:
    v, weights = ctx.saved_tensors
    inner = grad @ v.transpose(-1, -2) * weights
    return inner @ v, inner.transpose(-1, -2) @ v, weights.transpose(-1, -2) @ grad, None


noisy_attention.register_autograd(_attention_grad, setup_context=_keep_values)


@torch.library.custom_op("sactest::scale_by", mutates_args=())
def scale_by(x: Tensor, factor: float) -> Tensor:
    """A plain deterministic op."""
    return x * factor


@scale_by.register_fake
def _(x: Tensor, factor: float) -> Tensor:
    return torch.empty_like(x)


def _keep_factor(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.factor = inputs[1]


scale_by.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_keep_factor)


class Luck:
    """What ``lucky`` asks for."""

    left = True


@torch.library.custom_op("sactest::lucky", mutates_args=())
def lucky(x: Tensor) -> Tensor:
    """A copy, while luck is left: a kernel that may fail in recomputation, whoever calls it there."""
    if not Luck.left:
        raise ValueError("out of luck")
    return x.clone()


lucky.register_autograd(lambda ctx, grad: grad)


class Wobble:
    """The sign that `wobble` uses next: set behind the dispatcher's back, as a race in a kernel would."""

    sign = 1.0


@torch.library.custom_op("sactest::wobble", mutates_args=())
def wobble(x: Tensor) -> Tensor:
    """Its argument up to rounding, and each run rounds otherwise."""
    return x + Wobble.sign * 1e-6 * torch.arange(x.shape[-1], device=x.device)


@wobble.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


wobble.register_autograd(lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("sactest::fill_tanh", mutates_args={"out"})
def fill_tanh(x: Tensor, out: Tensor) -> None:
    """Out-variant in the style of a Triton wrapper: writes into `out`, returns nothing."""
    out.copy_(x.tanh())


def numpy_of(x: Tensor) -> np.ndarray[Any, Any]:
    """The values as an array: the tensor's memory itself if it is of float32 and on the CPU."""
    return x.detach().float().cpu().numpy()


def write_unseen(buffer: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Write behind the dispatcher's back where the device allows it, as a raw kernel does."""
    if buffer.device.type == "cpu" and buffer.dtype is torch.float32:
        np.copyto(buffer.detach().numpy(), values)
    else:
        buffer.copy_(torch.from_numpy(np.ascontiguousarray(values)))


class Tanh(torch.autograd.Function):
    """The derivative, from the result that a subclass saves in its forward."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out)


class TanhByOutVariant(Tanh):
    """An `empty_like` buffer that an out-variant op fills, kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops.sactest.fill_tanh(x, out)
        ctx.save_for_backward(out)
        return out


class TanhByRawKernel(Tanh):
    """A raw kernel writes into an `empty_like` buffer: the dispatcher sees only the allocation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        write_unseen(out, np.tanh(numpy_of(x)))
        ctx.save_for_backward(out)
        return out


class SquareByAccumulation(torch.autograd.Function):
    """A raw kernel adds into a `zeros_like` buffer: run on a kept buffer it would count twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for _ in range(2):
            write_unseen(total, numpy_of(total) + 0.5 * numpy_of(x))
        ctx.save_for_backward(total)
        return total * total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (total,) = ctx.saved_tensors
        return 2 * total * grad


class SineReadTwice(torch.autograd.Function):
    """Backward reads `ctx.saved_tensors` twice, as many published Functions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.sin()
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        out = ctx.saved_tensors[1]
        return grad * x.cos() + 0 * out
