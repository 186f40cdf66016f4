"""An error that the user's forward raises, in forward or in recomputation, leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.support.oracle import built_model
from tests.support.programs import WIDTH, Block, Program
from tests.support.runs import note_run
from tests.support.training import assert_same, train
from tests.support.ways import NONE, WAYS


def own_forward(block: Block, x: Tensor) -> Tensor:
    raise AssertionError


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
    model = built_model(Program("fails", own_forward, block=lambda: Failing(2)), WAYS[way], blocks=1)
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
    model = built_model(Program("fails", own_forward, block=lambda: Failing(1)), WAYS[way], blocks=1)
    with pytest.raises(KeyError, match="the user's own"):
        model(*square("cpu"))
    assert nothing_is_left_behind()
    model.blocks[0].count.zero_()
    plain = built_model(Program("works", own_forward, block=Failing), NONE, blocks=1)
    assert_same(train(plain, make_input=square, steps=2), train(model, make_input=square, steps=2))
