"""Saved tensors that are read outside of a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sac


class Exponentials(TorchDispatchMode):
    """Counts the exponentials that run."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.exp.default
        return func(*args, **(kwargs or {}))


def function(h: Tensor) -> Tensor:
    return h.exp().sin()


def test_a_value_that_is_read_outside_of_a_backward_is_released() -> None:
    for _ in range(2):  # the second call needs no recorder
        x = torch.randn(3, requires_grad=True)
        sine: Any = sac.checkpoint(function, x).grad_fn
        exponential = sine.next_functions[0][0]
        expected = x.detach().exp()
        with Exponentials() as seen:
            assert torch.equal(sine._saved_self, expected)
            assert torch.equal(exponential._saved_result, expected)
            assert seen.count == 1  # one recomputation has filled both
            assert torch.equal(exponential._saved_result, expected)
            assert seen.count == 2
