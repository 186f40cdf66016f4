"""A lazy conjugate or negative shares its storage with another value: the two are never taken for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import RegionError

COMPLEX = torch.complex64
PRODUCTS = {
    "schema": "sac/v1",
    "name": "p",
    "default": "recompute",
    "rules": [{"id": "m", "ops": "matmul", "do": "save"}],
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "auto": {"mode": "selective", "policy": PRODUCTS},
    "replay": {"mode": "selective", "policy": PRODUCTS, "engine": "replay"},
    "rerun": {"mode": "selective", "policy": PRODUCTS, "engine": "rerun"},
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda one: one,
    "conjugate": Tensor.conj,
    "negative": lambda one: one.conj().imag,
}


class Block(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(8, 1024, dtype=COMPLEX))
        self.small = nn.Parameter(torch.randn(8, 8, dtype=COMPLEX) / 3)
        self.other = nn.Parameter(torch.randn(8, 8, dtype=COMPLEX))
        self.body = body

    def forward(self, *args: Tensor) -> Tensor:
        return self.body(self, *args)


def trained(
    way: dict[str, Any] | None,
    body: Callable[..., Tensor],
    args: Callable[[Tensor], tuple[Tensor, ...]] = lambda base: (),
    between: Callable[[Tensor], object] = lambda base: None,
) -> list[Tensor]:
    """Train two blocks for three steps; return all gradients. ``between``: runs before each backward."""
    torch.manual_seed(0)
    model = nn.ModuleList([Block(body), Block(body)])
    if way:
        sac.apply(model, {**way, "blocks": ["*"]})
    found = []
    for _ in range(3):
        base, x = torch.randn(8, dtype=COMPLEX), torch.randn(8, 8, dtype=COMPLEX)
        model.zero_grad()
        for block in model:
            x = block(x, *args(base))
        between(base)
        x.abs().sum().backward()
        found += [one.grad for one in model.parameters() if one.grad is not None]
    return found


def both_views(self: Block, x: Tensor) -> Tensor:
    """A small part of a saved product is used as it is and conjugated: each is held without the rest."""
    part = (x @ self.wide)[:8, :8]
    return x + (part * self.small).sum() + (part.conj() * self.other).sum()


def both_signs(self: Block, x: Tensor) -> Tensor:
    """The same of the imaginary part, and of its negative."""
    part = (x @ self.wide)[:8, :8]
    return x + (part.imag * self.small.real).sum() + (part.conj().imag * self.other.real).sum()


def writes_after(self: Block, x: Tensor) -> Tensor:
    part = x @ self.small
    conjugate = part.conj()
    part.mul_(2)
    return (conjugate * self.other).tanh() + part


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", [both_views, both_signs, writes_after])
def test_a_value_and_its_conjugate(way: str, body: Callable[..., Tensor]) -> None:
    """Oracle: the model without sac, bit by bit."""
    for one, other in zip(trained(WAYS[way], body), trained(None, body), strict=True):
        assert torch.equal(torch.view_as_real(one), torch.view_as_real(other))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", VIEWS)
def test_an_argument_that_its_caller_changes_before_backward(way: str, view: str) -> None:
    """Nothing has saved ``shift``, so changing it is allowed: replay does not read it, and a rerun refuses it."""

    def shifted(self: Block, x: Tensor, shift: Tensor) -> Tensor:
        return (x @ self.small + shift).tanh() @ self.other

    def run(way: dict[str, Any] | None) -> list[Tensor]:
        return trained(way, shifted, lambda base: (VIEWS[view](base),), lambda base: base.add_(1))

    if way in RERUN:
        with pytest.raises(RegionError, match=r"its input 1 .* was changed in place after the forward"):
            run(WAYS[way])
        return
    for one, other in zip(run(WAYS[way]), run(None), strict=True):
        assert torch.equal(torch.view_as_real(one), torch.view_as_real(other))


RERUN = {
    "full": "0: saved tensor 0 (complex64[8, 8], of aten.mul.Tensor in the region itself) has other values in "
    "recomputation than in forward: the region does not repeat itself",
    "rerun": "0: call 0 of aten.mm.default in the region itself ran in forward with ",
}


@pytest.mark.parametrize("way", RERUN)
def test_a_recomputation_that_conjugates_is_refused(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputation saves the conjugate of what forward saved: it reads an environment variable, which sac leaves."""
    monkeypatch.delenv("CONJUGATES", raising=False)

    def branches(self: Block, x: Tensor) -> Tensor:
        value = x * 2
        return ((value.conj() if "CONJUGATES" in os.environ else value) @ self.small).abs().tanh() @ self.other.real

    model = nn.ModuleList([Block(branches)])
    sac.apply(model, {**WAYS[way], "blocks": ["*"], "verify": "always"})
    loss = model[0](torch.randn(8, 8, dtype=COMPLEX)).sum()
    monkeypatch.setenv("CONJUGATES", "1")
    with pytest.raises(RegionError) as raised:
        loss.backward()
    assert str(raised.value).startswith(RERUN[way])
