"""Functions of autograd whose kernels write where no dispatcher looks: at raw pointers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.custom_ops import Tanh


def at(tensor: Tensor) -> Any:
    """The memory of a contiguous float tensor as an array. No op is run: `numpy()` and `data` would detach."""
    assert tensor.is_contiguous()
    assert tensor.dtype is torch.float32
    memory = (ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr())
    return np.ctypeslib.as_array(memory).reshape(tensor.shape)


class TanhInto(torch.autograd.Function):
    """A kernel writes into what `make` makes; `after` is run on that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, make: Callable[[Tensor], Tensor], after: Callable[[Tensor], Any] | None) -> Tensor:
        out = make(x)
        values = np.tanh(at(x))
        np.copyto(at(out), values)
        ctx.save_for_backward(torch.from_numpy(values))
        if after is not None:
            after(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out), None, None


def tanh_into(x: Tensor, make: Callable[[Tensor], Tensor], after: Callable[[Tensor], Any] | None = None) -> Tensor:
    """The hyperbolic tangent; `after` must add a constant or nothing."""
    out: Tensor = TanhInto.apply(x, make, after)  # type: ignore[no-untyped-call]
    return out


class TwiceInPlace(torch.autograd.Function):
    """A kernel doubles its argument in place. `says_so`: and autograd is told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, says_so: bool) -> Tensor:
        values = at(x)
        np.copyto(values, values * 2)
        if says_so:
            ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2, None


def twice_in_place(x: Tensor, *, says_so: bool = True) -> Tensor:
    """The argument, doubled."""
    out: Tensor = TwiceInPlace.apply(x, says_so)  # type: ignore[no-untyped-call]
    return out


class TanhInPlace(Tanh):
    """A kernel in place whose result backward reads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        values = at(x)
        np.copyto(values, np.tanh(values))
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x


class FromOutside(Tanh):
    """The result is a tensor that no op of torch has made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.from_numpy(np.tanh(x.detach().numpy()))
        ctx.save_for_backward(out)
        return out
