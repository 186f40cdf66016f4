"""A budget where inputs differ in size: a plan covers what is no larger, and larger ones are planned for anew."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from sac.memory_timeline import measure_memory
from tests.unit.planner.small_training import VOCABULARY, built, bytes_of, controller_of, within

Size = tuple[int, int]  # rows, tokens
SMALL, WIDE, TALL, LARGE = (2, 64), (4, 64), (16, 8), (8, 64)


def loss_of(model: nn.Module, size: Size) -> Tensor:
    rows, tokens = size
    x = torch.arange(rows * tokens).reshape(size) * 7 % VOCABULARY
    return nn.functional.cross_entropy(model(x).flatten(0, 1), x.roll(1, 1).flatten())


class Loop:
    """A training of steps of micro-batches, each with its own backward or, ``at_once``, one for their sum."""

    def __init__(self, value: Any, *, at_once: bool = False) -> None:
        self.model, self.at_once = built(), at_once
        if value is not None:
            sac.apply(self.model, value)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def run(self, sizes: Sequence[Size]) -> None:
        if self.at_once:
            torch.stack([loss_of(self.model, size) for size in sizes]).sum().backward()
        for size in sizes if not self.at_once else ():
            loss_of(self.model, size).backward()

    def step(self, *sizes: Size) -> None:
        self.run(sizes)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def peak(self, *sizes: Size) -> int:
        there = bytes_of(self.model, self.optimizer)
        return there + measure_memory(lambda: self.run(sizes)).peak_bytes

    @property
    def used(self) -> str:
        return controller_of(self.model).used


@functools.cache
def ends(*sizes: Size, at_once: bool = False) -> tuple[int, int]:
    """The peak of such a step under full recomputation, and without checkpointing."""
    found = []
    for value in ("full", None):
        loop = Loop(value, at_once=at_once)
        loop.step(*sizes)
        found.append(loop.peak(*sizes))
    return found[0], found[1]


@pytest.mark.parametrize(("part", "at_once"), [(0.3, False), (0.7, False), (0.3, True)])
def test_micro_batches_of_different_sizes(part: float, at_once: bool) -> None:
    """The small ones first, as a correction would be misled by what these leave behind."""
    sizes = ((1, 64), LARGE)
    low, high = ends(*sizes, at_once=at_once)
    budget = int(low + part * (high - low))
    loop = Loop(within(budget), at_once=at_once)
    for _ in range(6):
        loop.step(*sizes)
    assert loop.used == "planned"
    assert low < loop.peak(*sizes) <= budget


def test_a_larger_micro_batch_within_a_step_is_planned_for_in_the_next() -> None:
    low, high = ends(SMALL, LARGE, at_once=True)
    budget = (low + high) // 2
    loop = Loop(within(budget), at_once=True)
    for _ in range(3):
        loop.step(SMALL, SMALL)
    for _ in range(5):
        loop.step(SMALL, LARGE)
    assert low < loop.peak(SMALL, LARGE) <= budget
    assert loop.used == "planned"


def test_blocks_that_were_not_called_at_first_are_recomputed_in_full() -> None:
    low, high = ends(LARGE)
    loop = Loop(within("1GiB"))
    body = loop.model.body
    body.forward = body.blocks[0].__call__
    for _ in range(3):
        loop.step(LARGE)
    del body.forward
    assert low < loop.peak(LARGE) < (low + high) / 2


def test_a_size_that_the_other_does_not_cover_leaves_the_plan_alone() -> None:
    loop = Loop(within("1GiB"))
    for _ in range(3):
        loop.step(WIDE)
        assert loop.used in ("full", "planned")
    for _ in range(3):
        loop.step(TALL)
        assert loop.used == "full"
        loop.step(WIDE)
        assert loop.used == "planned"


@pytest.mark.parametrize(
    ("when", "copied"),
    [("in the observed step", copy.deepcopy), ("after it", lambda model: pickle.loads(pickle.dumps(model)))],
)
def test_copies_that_are_made_while_a_plan_is_made_or_waits(copied: Any, when: str) -> None:
    low, high = ends(LARGE)
    budget = (low + high) // 2
    loop = Loop(within(budget))
    for _ in range(3):
        loop.step(WIDE)
    loop.run([LARGE])
    if when == "after it":
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        loop.step(WIDE)  # the plan for large inputs is made, and begins with this pass
    other = Loop(None)
    other.model = copied(loop.model)
    sac.remove(loop.model)  # it may still be observing
    other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-3)
    other.optimizer.zero_grad()
    for size in (WIDE, LARGE, WIDE):
        other.step(size)
    assert other.used == "planned"
    for size in (WIDE, LARGE):
        assert other.peak(size) <= budget
        other.optimizer.zero_grad()


def test_larger_inputs_run_under_full_recomputation_where_nothing_can_be_observed() -> None:
    """As here, while another profiler measures; the report says so."""
    loop, low = Loop(within("1GiB")), ends(LARGE)[0]
    for _ in range(3):
        loop.step(WIDE)
    assert loop.peak(LARGE) == low
    assert loop.used == "full"
    assert "larger than it was made for run under full recomputation" in str(sac.report(loop.model)).replace("\n", " ")


def test_larger_inputs_are_planned_for_anew(capsys: pytest.CaptureFixture[str]) -> None:
    low, high = ends(LARGE)
    budget = (low + high) // 2
    loop, plain = Loop(within(budget)), Loop(None)
    for size in (WIDE, WIDE, WIDE, LARGE, WIDE, LARGE):
        loop.step(size)
        plain.step(size)
    assert all(map(torch.equal, loop.model.parameters(), plain.model.parameters()))
    assert "sac: a step with larger inputs observed, planning" in capsys.readouterr().err
    assert low < loop.peak(LARGE) <= budget


def test_larger_inputs_that_do_not_fit_are_told_and_do_not_end_the_training() -> None:
    loop = Loop(within(ends(WIDE)[0] + 1000))
    for size in (WIDE, WIDE, LARGE):
        loop.step(size)
    with pytest.warns(SacWarning, match=r"below the least peak of a step(?s:.*)until then: inputs larger than it was"):
        loop.step(WIDE)
    loop.step(LARGE)
    assert loop.used == "full"
