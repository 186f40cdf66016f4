"""The matrix of stacks: what is a difference, and what is a reason not to run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.stacks.composition import Outcome
from tests.stacks.matrix import CLOSE, DIFFER, EQUAL, Line, compared, line_of, missing_in
from tests.stacks.registry import EVERY_MODE, MODES, STACKS, Stack, stack_named
from tests.support.ranks import RankError, run_ranks


def made(value: float, flops: int = 100, kept: int = 10, sent: int = 4) -> Outcome:
    collectives = {"gloo:all_reduce": sent} if sent else {}
    return Outcome([float(value)], {"weight": torch.tensor([1.0, value])}, flops, kept, collectives)


def test_ratios_are_over_all_processes():
    cell = compared("full", [made(1, 120, 2), made(1, 140, 3)], [made(1), made(1)], rounded=False)
    assert (cell.gradients, cell.flops, cell.kept, cell.sent) == (EQUAL, 1.3, 0.25, 1.0)


def test_one_bit_on_one_process_is_a_difference():
    near = 1 + 2e-7
    cell = compared("full", [made(1), made(near)], [made(1), made(1)], rounded=False)
    assert cell.gradients == DIFFER
    assert cell.different == ("losses", "weight")
    assert compared("full", [made(1), made(near)], [made(1), made(1)], rounded=True).gradients == CLOSE
    assert compared("full", [made(1), made(1.1)], [made(1), made(1)], rounded=True).gradients == DIFFER


def test_a_gradient_that_is_not_there_is_a_difference_up_to_rounding_too():
    lost = replace(made(1), gradients={"other": torch.ones(2)})
    assert compared("full", [lost], [made(1)], rounded=True).different == ("other", "weight")


def test_a_mode_that_does_nothing_fails():
    cell = compared("full", [made(1)], [made(1)], rounded=False)
    assert cell.idle
    assert Line("plain", 1, (cell,)).failed
    for working in (made(1, flops=101), made(1, kept=9)):
        assert not Line("plain", 1, (compared("full", [working], [made(1)], rounded=False),)).failed


def absent(mode: Any) -> Outcome:
    import a_package_that_nobody_has  # noqa: F401

    raise AssertionError


def skipped(mode: Any) -> Outcome:
    pytest.skip("no such kernel on CPU")


def broken(mode: Any) -> Outcome:
    raise ValueError("the first line\nwhat it comes to")


REASON = "the package a_package_that_nobody_has is not installed"


@pytest.mark.parametrize(
    ("name", "missing", "error"),
    [("absent", REASON, ""), ("skipped", "no such kernel on CPU", ""), ("broken", "", "what it comes to")],
)
def test_a_stack_that_cannot_run_keeps_its_row_and_says_why(name, missing, error):
    line = line_of(Stack(name, f"test_matrix:{name}"))
    assert [(cell.mode, cell.missing, cell.error) for cell in line.cells] == [
        ("full", missing, error),
        ("selective", missing, error),
    ]
    assert line.failed == bool(error)


@pytest.mark.parametrize(("function", "reason"), [(absent, REASON), (skipped, "no such kernel on CPU")])
def test_reasons_come_out_of_other_processes(function: Callable[..., Any], reason: str):
    with pytest.raises(RankError) as error:
        run_ranks(2, function, "full")
    assert missing_in(error.value) == reason


def test_what_else_a_process_raises_is_no_reason():
    assert missing_in(RankError("rank 0: Traceback\nValueError: No module named 'sac'")) == ""


def test_names_are_said_once_and_modes_exist():
    names = [stack.name for stack in STACKS]
    assert len({name.lower() for name in names}) == len(names)
    for stack in STACKS:
        assert set(stack.modes) <= set(EVERY_MODE) <= set(MODES)


@pytest.mark.parametrize("name", ["plain", "FSDP2"])
def test_a_row_of_the_matrix(name):
    line = line_of(stack_named(name))
    assert not line.failed
    full, selective = (next(cell for cell in line.cells if cell.mode == mode) for mode in ("full", "selective"))
    assert full.gradients == selective.gradients == EQUAL
    assert 1 < selective.flops < full.flops < 4 / 3
    assert full.kept < selective.kept < 1
    assert (full.sent is None) == (name == "plain")
