"""The measuring itself: what `outcome` says of one linear map, what is a difference, what a reason not to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sac
from tests.stacks.composition import Outcome, differences, train
from tests.stacks.matrix import CLOSE, DIFFER, EQUAL, Line, compared, line_of
from tests.stacks.registry import EVERY_MODE, MODES, STACKS, Stack, stack_named

WIDTH = 64


def measured(value: Any, scale: float = 1.0) -> Outcome:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3)))
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    return train(sac.apply(model, value), lambda model: (model(x) * scale).sum())


def test_flops_of_a_layer_are_three_products_and_of_a_recomputed_one_four() -> None:
    everything = {"mode": "selective", "policy": {"schema": "sac/v1", "name": "all", "default": "save", "rules": []}}
    none, full, kept = measured("none"), measured("full"), measured(everything)
    layers = 3 * 2 * WIDTH**3
    assert (none.flops, full.flops, kept.flops) == (3 * layers, 4 * layers, 3 * layers)
    assert full.kept_bytes < none.kept_bytes


def test_a_difference_is_told() -> None:
    assert differences(measured("full"), measured("none")) == []
    told = differences(measured("none", 2.0), measured("none"))
    assert {"losses", "step 1 0.0.weight"} <= set(told)
    changed = replace(measured("none"), state={**measured("none").state, "random state": torch.get_rng_state() + 1})
    assert differences(changed, measured("none")) == ["random state"]


def made(value: float, flops: int = 100, kept: int = 10, sent: int = 4) -> Outcome:
    return Outcome([float(value)], {"weight": torch.tensor([1.0, value])}, flops, kept, {"gloo:all_reduce": sent})


def test_cells_of_the_matrix() -> None:
    """Ratios are over all processes; one bit on one is a difference, and so is a gradient that is not there."""
    cell = compared("full", [made(1, 120, 2), made(1, 140, 3)], [made(1), made(1)], rounded=False)
    assert (cell.gradients, cell.flops, cell.kept, cell.sent) == (EQUAL, 1.3, 0.25, 1.0)
    near, far, lost = made(1 + 2e-7), made(1.1), replace(made(1), gradients={"other": torch.ones(2)})
    for rounded, other, verdict in (
        (False, near, DIFFER),
        (True, near, CLOSE),
        (True, far, DIFFER),
        (True, lost, DIFFER),
    ):
        assert compared("full", [made(1), other], [made(1), made(1)], rounded=rounded).gradients == verdict
    for ours, idle in ((made(1), True), (made(1, flops=101), False), (made(1, kept=9), False)):
        assert Line("plain", 1, (compared("full", [ours], [made(1)], rounded=False),)).failed == idle


def absent(mode: Any) -> Outcome:
    import a_package_that_nobody_has  # noqa: F401

    raise AssertionError


def skipped(mode: Any) -> Outcome:
    pytest.skip("no such kernel on CPU")


def broken(mode: Any) -> Outcome:
    raise ValueError("the first line\nwhat it comes to")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("absent", "the package a_package_that_nobody_has is not installed"),
        ("skipped", "no such kernel on CPU"),
        ("broken", ""),
    ],
)
def test_a_stack_that_cannot_run_keeps_its_row_and_says_why(name: str, missing: str, world: int) -> None:
    line = line_of(Stack(name, f"test_matrix:{name}", world))
    error = "" if missing else "what it comes to"
    assert [(cell.mode, cell.missing, cell.error) for cell in line.cells] == [
        ("full", missing, error),
        ("selective", missing, error),
    ]
    assert line.failed == bool(error)


def test_names_are_said_once_and_modes_exist() -> None:
    assert len({stack.name.lower() for stack in STACKS}) == len(STACKS)
    assert all(set(stack.modes) <= set(EVERY_MODE) <= set(MODES) for stack in STACKS)


@pytest.mark.parametrize("name", ["plain", "FSDP2", "HF Trainer", "Accelerate", "PEFT LoRA", "TRL SFT"])
def test_a_row_of_the_matrix(name: str) -> None:
    line = line_of(stack_named(name))
    assert not line.failed, line
    assert all(cell.gradients == EQUAL or cell.missing for cell in line.cells)
