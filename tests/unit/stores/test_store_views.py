"""Inputs that share memory, or begin in the middle of it, kept elsewhere: values, labels and bits come back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from sac.full import FullConfig

VIEWS: dict[str, Callable[[Tensor], tuple[Tensor, ...]]] = {
    "a part": lambda h: (h[1:],),
    "the same twice": lambda h: (h, h),
    "one and a part of it": lambda h: (h, h[1:]),
    "a part and the whole": lambda h: (h[1:], h),
    "two parts": lambda h: (h[:2], h[2:]),
    "two views": lambda h: (h.t().contiguous().t(), h.view(2, 10)[1].view(2, 5)),
    "windows": lambda h: (h.view(20).unfold(0, 5, 3), h),
    "every second": lambda h: (h[::2], h[:, ::2].repeat(1, 2)[:, 1:]),
}


class Block(nn.Module):
    """Reads two inputs that may be one, or parts of each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        out = self.inner(self.inner(a[:, :5].relu())).sigmoid() * self.inner(a.contiguous())
        if b is None:
            return out
        rows = min(len(a), len(b))
        return out[:rows] * self.inner(b[:rows].relu()) + b[:rows].exp()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block()])

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.blocks[0](*inputs)


def gradients(model: Model, call: Callable[..., Tensor], name: str) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(4, 5, requires_grad=True)
    model.zero_grad()
    out = call(*VIEWS[name](x * 2))
    out.square().sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("keep", ["first", "all"])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_function(reentrant, name, keep):
    model = Model()
    config = FullConfig(store="host", keep=keep)
    expected = gradients(model, model, name)
    for _ in range(3):
        ours = gradients(
            model, lambda *views: sac.checkpoint(model, *views, use_reentrant=reentrant, config=config), name
        )
        assert all(map(torch.equal, expected, ours))


def test_a_first_write_to_memory_that_two_inputs_share():
    """Copies of the two would not show it; the next call knows that the region writes."""
    model, writes = Model(), torch.zeros(1, dtype=torch.bool)

    def function(a: Tensor, b: Tensor) -> Tensor:
        out = model(a + 1)
        if writes.tolist()[0]:  # which no op shows
            a.mul_(2)
        return out * b.exp().sum()

    def of(call: Callable[..., Tensor]) -> list[Tensor]:
        x = torch.ones(4, 5, requires_grad=True)
        h = x * 0.5
        model.zero_grad()
        call(function, h, h[1:]).square().sum().backward()
        return [x.grad, *(parameter.grad.clone() for parameter in model.parameters())]

    def plainly(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return function(*args)

    run = partial(sac.checkpoint, config=FullConfig(store="host", keep="all"))
    for _ in range(3):
        assert all(map(torch.equal, of(plainly), of(run)))
    writes.fill_(True)
    with pytest.warns(SacWarning) as said:
        assert all(map(torch.equal, of(plainly), of(run)))
    assert [str(one.message) for one in said] == [
        "test_a_first_write_to_memory_that_two_inputs_share.<locals>.function: this call changed an input "
        "(float32[4, 5]) in place, which no earlier call did\n"
        "    fix: none is needed: the activations of this call are kept until its backward instead of being "
        "recomputed, and later calls of the region keep a copy of what they write to"
    ]
    for _ in range(2):
        assert all(map(torch.equal, of(plainly), of(run)))
