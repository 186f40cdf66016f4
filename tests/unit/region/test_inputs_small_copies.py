"""A small input without a gradient may be written to, or get other data, between forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "written to": lambda mask: mask.zero_(),
    "written to through NumPy": lambda mask: mask.numpy().fill(0),
    "other data": lambda mask: setattr(mask, "data", torch.zeros_like(mask)),
    "other data of another shape": lambda mask: setattr(mask, "data", torch.zeros(5)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_backward_reads_it_as_it_was(name: str, reentrant: bool) -> None:
    x = torch.arange(8.0).requires_grad_()
    mask = torch.arange(16.0)[1::2]
    expected = 2 * x.detach() * mask.clone() ** 2
    out = sac.checkpoint(lambda x, mask: (x * mask) ** 2, x, mask, use_reentrant=reentrant)
    CHANGES[name](mask)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, expected)
