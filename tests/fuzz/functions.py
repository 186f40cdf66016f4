"""Instructions of random programs that are autograd Functions, as published kernels are, or units.

Their kernels write to memory where no dispatcher looks, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import sac
from tests.support.custom_ops import TanhByRawKernel, numpy_of, write_unseen


def filled(like: Tensor, values: np.ndarray[Any, Any]) -> Tensor:
    """Memory that no op is seen to fill."""
    out = torch.empty(values.shape, device=like.device)
    write_unseen(out, values)
    return out


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5


class DirtyKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        write_unseen(x, numpy_of(x) * 0.5)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 0.5 + 0 * ctx.saved_tensors[0]


class Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad


class Scratch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scratch: Tensor) -> Tensor:
        write_unseen(scratch, np.cos(numpy_of(x)))
        ctx.save_for_backward(scratch)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None


class Counted(torch.autograd.Function):
    """In two methods, with a number among its results, and one result that is not used."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, int, Tensor]:
        return filled(x, numpy_of(x) ** 2), x.dim(), x * 3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _number: None, other: Tensor | None) -> Any:
        return 2 * grad * ctx.saved_tensors[0] + (0 if other is None else 3 * other)


class Differentiated(torch.autograd.Function):
    """Takes a gradient in its forward, as fused losses do, and calls another Function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            out = TanhByRawKernel.apply(leaf).sin()
            (gradient,) = torch.autograd.grad(out.sum(), leaf)
        ctx.save_for_backward(gradient)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) > 0.3
        ctx.save_for_backward(mask)
        return filled(x, numpy_of(x) * numpy_of(mask))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Dispatch(torch.autograd.Function):
    """Leaves the order of rows in a dict, for the call that undoes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: dict[str, Any]) -> Tensor:
        ctx.order = handle["order"] = np.argsort(numpy_of(x)[:, 0], kind="stable")
        return filled(x, numpy_of(x)[ctx.order])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return filled(grad, numpy_of(grad)[np.argsort(ctx.order)]), None


class Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: dict[str, Any]) -> Tensor:
        ctx.order = handle["order"]
        return filled(x, numpy_of(x)[np.argsort(ctx.order)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return filled(grad, numpy_of(grad)[ctx.order]), None


def dispatched(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    handle: dict[str, Any] = {}
    return Combine.apply(Dispatch.apply(x, handle) @ block.weights[0], handle)


def gated(block: Any, at: int, knob: int, x: Tensor) -> Tensor:
    gate = sac.unit("gate", lambda y, scale: TanhByRawKernel.apply(y @ block.weights[1]) * scale)
    return gate(x, scale=x.cos())


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "dirty": lambda block, at, knob, x: Dirty.apply(x * 2),
    "dirty kernel": lambda block, at, knob, x: DirtyKernel.apply(x * 2),
    "alias": lambda block, at, knob, x: Alias.apply(x),
    "alias of a result": lambda block, at, knob, x: Alias.apply(x * 2).mul(0.5),
    "scratch": lambda block, at, knob, x: Scratch.apply(x, torch.empty(x.shape, device=x.device)),
    "counted": lambda block, at, knob, x: Counted.apply(x.tanh())[0],
    "differentiated": lambda block, at, knob, x: Differentiated.apply(x),
    "masked": lambda block, at, knob, x: Masked.apply(x),
    "dispatched": dispatched,
    "gated unit": gated,
    "writing unit": lambda block, at, knob, x: sac.unit("written", lambda y: y.mul_(0.5).sin())(x * 2),
}
