"""State that a region changes is changed once: buffers, counters, generators; and errors leave nothing behind.

torch's plain checkpoint and its selective one change buffers and counters twice.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.support.blocks import (
    FULL,
    Stack,
    alternate,
    install,
    policy,
    save,
    selective,
    square,
    ways,
)
from tests.support.recording import Recorder
from tests.support.runs import note_run
from tests.support.training import assert_same, assert_same_training, built, train

VALUES = {
    "full": FULL,
    "nothing": selective(policy()),
    "matmuls": selective(policy(save("matmul"))),
    "every second op": selective(policy(alternate("*"))),
    "everything": selective(policy(default="save")),
}
WAYS = ways(VALUES)
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), WAYS)
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class BatchNormed(nn.Module):
    """Running statistics and `num_batches_tracked`, which the kernel changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.slow_norm = nn.BatchNorm1d(8, momentum=None)  # a cumulative average: it reads its own counter

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.first(x)).relu(), 0.3, self.training)
        return self.slow_norm(self.second(h)).tanh() * x


class Counting(nn.Module):
    """Buffers changed in place, as MoE load counters and FP8 maxima are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(4))
        self.register_buffer("load", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(F.dropout(x, 0.3, self.training))
        with torch.no_grad():
            self.calls += 1
            self.largest.copy_(self.largest.roll(1))
            self.largest[0] = h.abs().max()
            self.load.index_add_(0, h.argmax(-1), torch.ones(len(h), device=h.device))
        return h.sin() * (1 + self.calls) * x.cos()  # the count goes into the value


class Spectral(nn.Module):
    """Spectral norm runs a power iteration on its buffers each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.3, self.training).sin() * x


IN_PLACE = [BatchNormed, Counting, Spectral]


@ON_EACH_DEVICE
@ON_EACH_WAY
@pytest.mark.parametrize("block", IN_PLACE)
def test_buffers_changed_in_place_advance_once(
    block: Callable[[], nn.Module], name: str, entry: str, device: str
) -> None:
    assert_same_training(
        lambda: Stack(block(), block()), VALUES[name], entry=entry, device=device, make_input=square, steps=3
    )


@ON_EACH_WAY
def test_eval_after_training_uses_the_right_statistics(name: str, entry: str) -> None:
    def run(model: nn.Module) -> dict[str, Tensor]:
        seen = train(model, make_input=square, steps=2)
        model.eval()
        return seen | {"eval": model(*square()).detach()} | train(model, make_input=square, seed=4)

    def build() -> nn.Module:
        return Stack(BatchNormed(), BatchNormed())

    assert_same(run(built(build)), run(install(built(build), VALUES[name], entry)))


class Failing(nn.Module):
    """Draws random numbers, counts itself, and then fails on the runs that are listed."""

    def __init__(self, fails_on: set[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))
        self.fails_on = fails_on

    def forward(self, x: Tensor) -> Tensor:
        run = note_run(self)
        h = F.dropout(self.linear(x).sin(), 0.3)
        with torch.no_grad():
            self.count += 1
        if run in self.fails_on:
            raise KeyError("the user's own")
        return F.dropout(h.cos(), 0.3) * x


def nothing_is_left_behind() -> bool:
    return (
        _get_current_dispatch_mode() is None
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
    )


PYTHON_RUNS_AGAIN = pytest.mark.parametrize(
    ("name", "entry"), [way for way in WAYS if way[0] == "full" or way[1] == "apply, rerun"]
)


@PYTHON_RUNS_AGAIN
def test_error_in_recompute_leaves_generator_and_buffers_as_they_were(name: str, entry: str) -> None:
    model = install(built(lambda: Stack(Failing({2}))), VALUES[name], entry)
    torch.manual_seed(0)
    out = model(*square())
    before, count = torch.get_rng_state(), model.blocks[0].count.clone()
    with pytest.raises(KeyError, match="the user's own"):
        out.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model.blocks[0].count, count)
    assert nothing_is_left_behind()


@ON_EACH_WAY
def test_error_in_forward_leaves_everything_usable(name: str, entry: str) -> None:
    """The first call of a region kind is the one in which we learn: it may fail like any other."""
    model = install(built(lambda: Stack(Failing({1}))), VALUES[name], entry)
    recorder = Recorder()
    with recorder, pytest.raises(KeyError, match="the user's own"):
        model(*square())
    assert nothing_is_left_behind()
    model.blocks[0].count.zero_()
    assert_same(
        train(built(lambda: Stack(Failing(set()))), make_input=square, steps=2),
        train(model, make_input=square, steps=2),
    )
