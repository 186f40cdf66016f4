"""A model put into evaluation, or into training, between forward and backward: recomputation does not see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from tests.support.blocks import Stack, square
from tests.support.runs import note_run, runs_of
from tests.support.stateful import ON_EACH_WAY, Way, as_it_is
from tests.support.training import assert_same, built, train

Switch = Callable[[nn.Module], object]


class Block(nn.Module):
    """Reads the flags of a module with statistics, of one that holds nothing, and its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm(self.first(x)).relu())
        return F.dropout(self.second(h).sin(), 0.3, self.training).square()


def dropout_off(model: nn.Module) -> None:
    for block in model.blocks:
        block.dropout.eval()


SWITCHES = {"eval": nn.Module.eval, "train": nn.Module.train, "one part": dropout_off}
ON_EACH_SWITCH = pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES.keys())


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def trained(
    way: Way, switch: Switch, build: Callable[[], Stack] = lambda: Stack(Block(), Block())
) -> dict[str, Tensor]:
    """Train three steps, each of which begins with other flags than its backward has."""
    model = way(built(build))

    def switched(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor | None]:
        switch(model)
        before = flags(model)
        loss.backward()
        assert flags(model) == before
        return []

    @contextmanager
    def other_flags() -> Iterator[None]:
        model.train(switch is not nn.Module.train)
        yield

    return train(model, steps=3, make_input=square, backward=switched, around_forward=other_flags)


@ON_EACH_SWITCH
@ON_EACH_WAY
def test_recomputation_has_the_flags_of_forward(way: Way, switch: Switch) -> None:
    assert_same(trained(as_it_is, switch), trained(way, switch))


@ON_EACH_WAY
def test_a_scripted_part(way: Way) -> None:
    def build() -> Stack:
        block = Block()
        block.dropout = torch.jit.script(block.dropout)
        return Stack(block)

    assert_same(trained(as_it_is, nn.Module.eval, build), trained(way, nn.Module.eval, build))


def test_flags_are_put_back_when_recomputation_raises() -> None:
    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            note_run(self)
            if runs_of(self) > 1:
                raise ValueError("no more")
            return super().forward(x)

    block = Failing()
    loss = sac.checkpoint(block, torch.randn(8, 8)).sum()
    block.eval()
    with pytest.raises(ValueError, match="no more"):
        loss.backward()
    assert flags(block) == [False] * 5


@ON_EACH_WAY
def test_a_flag_that_the_region_sets_itself(way: Way) -> None:
    """As a frozen part does that puts itself into evaluation in every forward."""

    class Freezing(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.norm.eval()
            return out

    def program(put: Way) -> dict[str, Tensor]:
        model = put(built(lambda: Stack(Freezing(), Freezing())))
        seen = train(model, steps=2, make_input=square)
        assert [block.norm.training for block in model.blocks] == [False, False]
        return seen

    assert_same(program(as_it_is), program(way))
