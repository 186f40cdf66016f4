"""Results of a reentrant region that lie in one memory: a write to one would change the other's value unseen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sac

Halves = Callable[[Tensor], tuple[Tensor, ...]]
IN_ONE_MEMORY: dict[str, Halves] = {
    "parts": lambda h: (h[0], h[1]),
    "the whole and a part": lambda h: (h, h[1]),
    "two views of one part": lambda h: (h[1].view(2, 2), h[1]),
}


def results(halves: Halves, weight: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    return halves((x @ weight).sin())


@pytest.mark.parametrize("halves", IN_ONE_MEMORY.values(), ids=IN_ONE_MEMORY)
def test_a_write_to_one_is_refused(halves: Halves) -> None:
    weight, x = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
    for result in sac.checkpoint(results, halves, weight, x, use_reentrant=True):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            result.mul_(2)


def test_a_write_to_one_of_its_own_is_as_without() -> None:
    weight, x = (torch.randn(4, 4, requires_grad=True) for _ in range(2))

    def gradient(call: Callable[..., tuple[Tensor, ...]], **options: bool) -> Tensor:
        x.grad = None
        first, second = call(lambda h: (h[0].clone(), h[1].clone()), weight, x, **options)
        first.mul_(2)
        (first.sum() + second.sum()).backward()
        assert x.grad is not None
        return x.grad

    plain = gradient(results)
    ours = gradient(lambda *given, **options: sac.checkpoint(results, *given, **options), use_reentrant=True)
    assert torch.equal(plain, ours)
