"""The best batch: which sizes are tried, what their plans hold and take, and every refusal."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sac
from sac.planner.plan_file import make_plan
from sac.planner.planning import plan
from sac.planner.prepare import prepare
from sac.planner.sizes import items_of, tried
from sac.planner.step_time import plain_step_seconds
from sac.tools.cli import main
from tests.unit.planner.plan_models import Stack
from tests.unit.planner.small_model import DIM, Model
from tests.unit.planner.truth import measured, put_on

MODELS = "tests.unit.planner.plan_models"


def rows(size: int) -> tuple[Tensor]:
    return (torch.ones(size, DIM),)


# Which sizes


def found(sizes: Sequence[int], fits: Callable[[int], bool], worth: Callable[[int], float]) -> tuple[list[int], int]:
    """The sizes that are tried, in order, and the best of them."""
    order: list[int] = []

    def run(size: int) -> int | None:
        order.append(size)
        return size if fits(size) else None

    results = tried(sizes, run, worth)
    assert list(results) == sorted(order)
    return order, max((one for one in results.values() if one is not None), key=worth, default=0)


def test_powers_of_two_then_the_gaps_next_to_the_best_and_up_to_the_largest_that_fits() -> None:
    order, best = found(range(1, 65), lambda size: size <= 44, lambda size: -abs(size - 21))
    assert order == [1, 2, 4, 8, 16, 32, 64, 12, 24, 48, 20, 28, 40, 18, 22, 44]
    assert best == 20


def test_a_size_that_does_not_fit_ends_the_powers_of_two() -> None:
    order, best = found(range(3, 1000), lambda size: size < 5, lambda size: size)
    assert (order, best) == ([3, 4, 8, 6, 5], 4)


@given(st.sets(st.integers(1, 300), min_size=1), st.integers(0, 300), st.integers(1, 300))
def test_only_given_sizes_are_tried_each_once_and_the_best_is_near(some: set[int], most: int, peak: int) -> None:
    sizes = sorted(some)
    order, best = found(sizes, lambda size: size <= most, lambda size: -abs(size - peak))
    assert {*order} <= some
    assert len(order) == len({*order}) <= 30
    if sizes[0] > most:
        assert best == 0
        return
    for low, high in pairwise(sorted(order)):
        if best in (low, high):
            assert high - low <= max(1, low // 8) or not [size for size in sizes if low < size < high]


def test_what_a_step_processes() -> None:
    assert items_of({"input_ids": torch.ones(3, 7, dtype=torch.int64), "labels": None}) == (21, "tokens")
    assert items_of((torch.ones(3, 7),)) == (3, "rows")
    assert items_of((torch.ones(3, 7, 2),)) == (21, "tokens")
    assert items_of((torch.ones(3, 2, 8, 8),)) == (3, "rows")
    assert items_of((None,)) == (1, "steps")


# Plans


def test_each_size_has_its_plan_and_the_policy_is_that_of_the_best() -> None:
    """The largest batch that needs no checkpointing is the best here: a step takes as long for few rows as for many."""
    model = Model()
    budget = make_plan(prepare(model, rows(24)), "100%").most
    policy = sac.plan(model, rows, budget, sizes=range(1, 65))
    figures = policy.figures
    assert figures is not None
    table = {int(cells[0]): cells for cells in figures.table.rows}
    assert {1, 2, 4, 8, 16, 32, 64} >= {size for size in table if not size & (size - 1)} >= {1, 2, 4, 8, 16, 32}
    assert [cells[-1].endswith(", best") for cells in table.values()].count(True) == 1
    assert table[figures.size or 0][-1].endswith(", best")
    assert policy == sac.plan(model, rows(figures.size or 0), budget)
    real = measured(model, rows(figures.size or 0), put_on(policy))
    assert real.peak <= budget
    rates = {size: float(cells[-2].replace(",", "")) for size, cells in table.items() if cells[-2]}
    assert rates[figures.size or 0] == max(rates.values())
    assert policy.table().splitlines()[2].split()[:3] == ["size", "peak", "kept"]


def test_the_time_of_a_step_is_that_of_all_its_ops_and_of_the_optimizer() -> None:
    model = Model()
    planner = prepare(model, rows(32))
    plain = plain_step_seconds(planner)
    forward = sum(sum(planner.times[group]) for group in planner.groups)
    assert 2 * forward < plain < 8 * forward
    with_adam = prepare(model, rows(32), optimizer="adam")
    more = plain_step_seconds(with_adam) - plain
    assert more == pytest.approx(2 * with_adam.step.extra / (with_adam.pricing.device.bytes_per_s * 0.85))
    assert plain_step_seconds(prepare(Model(), rows(256))) > plain


# Refusals


NOT_SIZES = "are not sizes to choose from\n    legal: ascending numbers, such as range(1, 65)"
A_SHARE = (
    'budget: "50%" is a share of a range of peaks, but each size has its own range\n    legal: bytes, such as "72GiB"'
)
NO_FUNCTION = (
    "inputs: with sizes, a tuple is not a function of a size\n"
    "    legal: a function that returns a tuple or a dict of arguments"
)
SAME = (
    "the inputs for 2 have the same shapes as those for 1\n    fix: let the inputs depend on it, or plan for one size"
)


@pytest.mark.parametrize(
    ("inputs", "budget", "sizes", "text"),
    [
        (rows, "1GiB", [4, 2], f"size: [4, 2] {NOT_SIZES}"),
        (rows, "1GiB", range(100), f"size: [0, 1, 2, 3, 4, 5, 6, 7] … {NOT_SIZES}"),
        (rows, "50%", [1], A_SHARE),
        (rows(4), "1GiB", [1], NO_FUNCTION),
        (lambda size: rows(4), "1GiB", [1, 2], f"size: {SAME}"),
    ],
)
def test_sizes_that_are_refused(inputs: Any, budget: str, sizes: Any, text: str) -> None:
    with pytest.raises(sac.SacError) as error:
        plan(Model(), inputs, budget, sizes=sizes)
    assert str(error.value) == text


def test_nothing_fits() -> None:
    with pytest.raises(sac.SacError, match="10 B is below the least peak of this model and these inputs"):
        plan(Stack(1), lambda size: (torch.ones(1, size, 16),), 10, sizes=[1, 2])


# The command


def arguments(*more: str) -> list[str]:
    return ["plan", "--model", f"{MODELS}:stack", "--budget", "300KiB", *more]


def test_the_command_prints_the_sizes_and_writes_the_best_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments("--seq", "8..256", "--out", "best.yaml")) == 0
    lines = capsys.readouterr().out.splitlines()
    best = next(line for line in lines if line.endswith(", best")).split()[0]
    assert lines[0] == f"{MODELS}:stack, best: argument 0 float32[4, {best}, 16]"
    assert lines[2] == f"budget 300.0 KiB; best seq: {best}"
    assert lines[3].split() == ["seq", "peak", "kept", "recomputed", "again", "step", "tokens/s"]
    assert any(line.endswith("does not fit: its least peak") for line in lines)
    assert any(line.startswith("tried: 8, ") for line in lines)
    assert lines[-1].startswith(f"policy: best.yaml; try it: sac compare --model {MODELS}:stack --seq {best} --batch 1")
    assert sac.load_policy("./best.yaml").plan is not None
    assert main(arguments("--seq", "8..256", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = [row for row in found["sizes"] if row["best"]]
    assert (str(row["seq"]), row["fits"], row["peak_bytes"]) == (best, True, found["plan"]["peak_bytes"])
    assert row["tokens_per_s"] == pytest.approx(4 * row["seq"] / row["step_s"])
    assert {row["fits"] for row in found["sizes"]} == {True, False}


BEST = "\n    fix: plan with the best --seq"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (("--seq", "1..8", "--batch", "1..8"), "--seq: it is a range, and so is --batch\n    fix: fix one of them"),
        (
            ("--seq", "1..8", "--picture", "x.svg"),
            f"--picture: it shows the plans for one size, and a range is given{BEST}",
        ),
        (
            ("--seq", "1..8", "--explain"),
            f"--explain: it explains the peak of one plan, and each size has its own{BEST}",
        ),
        (("--batch", "1..8", "--budget", "50%"), A_SHARE),
        (("--batch", "1..2", "--budget", "1GiB"), f"batch: {SAME}"),
    ],
)
def test_ranges_that_the_command_refuses(more: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(*more)) == 1
    assert capsys.readouterr().err.strip() == text


@pytest.mark.parametrize("text", ["8..1", "0..4", "a..b", "..4"])
def test_what_is_no_range(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments("--batch", text))
    assert f"argument --batch: '{text}' is not a range of sizes; legal: A..B, such as 1..64" in capsys.readouterr().err
