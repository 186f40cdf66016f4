"""Parts of a matrix in every layout, and a function that notes the layout in which its backward reads what it saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIDE = 24
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[:2],
    "rows in the middle": lambda h: h[3:5],
    "columns": lambda h: h[:, 2:5],
    "every third column": lambda h: h[:, ::3],
    "transposed": lambda h: h[:, 1:4].t(),
    "repeated": lambda h: h[1:2].expand(4, SIDE),
    "overlapping": lambda h: h[1].unfold(0, 4, 2),
    "conjugated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj(),
    "negated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj().imag,
    "one element": lambda h: h[1, 1],
}


class Reading(torch.autograd.Function):
    """Saves ``part``; backward appends shape, strides, address modulo 64 and lazy bits of what it reads to ``read``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, read: list[Any]) -> Tensor:
        ctx.save_for_backward(part)
        ctx.read = read
        return part * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (part,) = ctx.saved_tensors
        ctx.read.append((part.shape, part.stride(), part.data_ptr() % 64, part.is_conj(), part.is_neg()))
        return grad * part.conj(), None
