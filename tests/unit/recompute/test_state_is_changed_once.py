"""State that a region changes is changed once: buffers, counters, generators; and errors leave nothing behind.

torch's plain checkpoint and its selective one change buffers and counters twice. Batch norm is in the catalogue.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.support.oracle import assert_exact, built_model, on_every_way
from tests.support.programs import WIDTH, Block, Program
from tests.support.runs import note_run
from tests.support.training import assert_same, train
from tests.support.ways import NONE, WAYS


class Counting(nn.Module):
    """Buffers changed in place, as MoE load counters and FP8 maxima are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(4))
        self.register_buffer("load", torch.zeros(WIDTH), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls += 1
            self.largest.copy_(self.largest.roll(1))
            self.largest[0] = h.abs().max()
            self.load.index_add_(0, h.argmax(-1), torch.ones(len(h)))
        return h.sin() * (1 + self.calls)  # the count goes into the value


def counters(block: Block, x: Tensor) -> Tensor:
    return block.counting(F.dropout(block.up(x), 0.3)) * x.cos()


def power_iteration(block: Block, x: Tensor) -> Tensor:
    """Spectral norm runs it on its buffers in each forward."""
    return F.dropout(block.spectral(x), 0.3).sin() * x


CHILDREN = {
    "counting": Counting,
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
}


@on_every_way([Program(body.__name__, body, children=CHILDREN) for body in (counters, power_iteration)])
def test_buffers_changed_in_place_advance_once(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


class Failing(nn.Module):
    """Draws random numbers, counts itself, and then fails in the run of this number."""

    def __init__(self, fails_in: int = 0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.fails_in = fails_in

    def forward(self, x: Tensor) -> Tensor:
        run = note_run(self)
        h = F.dropout(self.up(x).sin(), 0.3)
        with torch.no_grad():
            self.count += 1
        if run == self.fails_in:
            raise KeyError("the user's own")
        return F.dropout(h.cos(), 0.3) * x


def nothing_is_left_behind() -> bool:
    return (
        _get_current_dispatch_mode() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


def square(device: str) -> tuple[Tensor, ...]:
    return (torch.randn(WIDTH, WIDTH),)


@pytest.mark.parametrize("way", ["full", "served rerun", "checkpoint", "reentrant"])
def test_error_in_recompute_leaves_generator_and_buffers_as_they_were(way: str) -> None:
    model = built_model(Program("fails", counters, block=lambda: Failing(2)), WAYS[way], blocks=1)
    out = model(*square("cpu"))
    before, count = torch.get_rng_state(), model.blocks[0].count.clone()
    with pytest.raises(KeyError, match="the user's own"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.blocks[0].count, count)
    assert nothing_is_left_behind()


@pytest.mark.parametrize("way", WAYS)
def test_error_in_forward_leaves_everything_usable(way: str) -> None:
    """The first call of a region kind is the one in which we learn: it may fail like any other."""
    model = built_model(Program("fails", counters, block=lambda: Failing(1)), WAYS[way], blocks=1)
    with pytest.raises(KeyError, match="the user's own"):
        model(*square("cpu"))
    assert nothing_is_left_behind()
    model.blocks[0].count.zero_()
    plain = built_model(Program("works", counters, block=Failing), NONE, blocks=1)
    assert_same(train(plain, make_input=square, steps=2), train(model, make_input=square, steps=2))
