"""What is alive at a peak: the rows sum to the peak to the byte, and say of what it is made, by which rule, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac.planner.peak import (
    ACTIVATIONS,
    BLOCK_INPUT,
    BUFFERS,
    GATHERED,
    GRADIENTS,
    HEAD,
    HELD,
    NO_CHECKPOINTING,
    OPTIMIZER,
    PARAMETERS,
    RECOMPUTED_ACTIVATIONS,
    REMEDIES,
    TEMPORARIES,
    UNSEEN,
    AliveRow,
    Curve,
    CurvePoint,
    PeakBreakdown,
    with_more,
)
from sac.planner.plan_file import explained, make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.sharding import fake_ranks, fsdp_over
from sac.tools.comparison import Training, compare
from tests.cli.test_cli_compare import build
from tests.unit.planner.small_model import DIM, INPUTS, Model
from tests.unit.planner.truth import MODELS, model_named

F32 = 4
ROWS = len(INPUTS[0])


def everywhere(planner: Planner, number: int) -> tuple[int, ...]:
    return planner.everywhere(lambda group: number % len(planner.choices[group]))


def mixed(planner: Planner) -> tuple[int, ...]:
    return tuple(index % len(planner.choices[group]) for index, group in enumerate(planner.groups))


def broken_down(planner: Planner, choice: tuple[int, ...]) -> PeakBreakdown:
    """Return the breakdown of a choice whose rows have the sum that they should have."""
    found = planner.explain(choice, "it")
    assert sums_of(found) == [measured_peak(planner, choice)] * 4
    return found


def measured_peak(planner: Planner, choice: tuple[int, ...]) -> int:
    """Return the peak of a step that is run with the choice."""
    planner.run(choice)
    return planner.point("it", choice).peak


def sums_of(found: PeakBreakdown) -> list[int]:
    """Return what should be the peak: what it says, and the sums of its rows, its categories and its curve there."""
    curve = found.curve
    at_peak = {name: sizes[curve.points.index(curve.peak)] for name, sizes in curve.by_category().items()}
    assert curve.peak.moment == found.moment
    assert {name: size for name, size in at_peak.items() if size} == found.by_category()
    assert found.before_bytes == sum(curve.peak.alive.get(row, (0, 0))[0] for row in curve.before)
    return [found.peak_bytes, sum(row.bytes for row in found.rows), sum(found.by_category().values()), curve.peak.bytes]


# -- The sum


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        pytest.param("replay", {}, id="replay"),
        pytest.param("rerun", {"optimizer": "adam"}, id="rerun", marks=pytest.mark.slow),
    ],
)
def test_rows_sum_to_the_peak_of_every_choice(engine: str, more: dict[str, Any]) -> None:
    planner = prepare(Model(), INPUTS, engine=engine, **more)
    for choice in (everywhere(planner, 0), everywhere(planner, -1), mixed(planner)):
        assert sums_of(planner.explain(choice, "it")) == [measured_peak(planner, choice)] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_rows_sum_to_the_peak_of_every_family(name: str) -> None:
    planner = prepare(*model_named(name, 3))
    for choice in (everywhere(planner, 0), everywhere(planner, -1), mixed(planner)):
        assert sums_of(planner.explain(choice, "it")) == [measured_peak(planner, choice)] * 4


@pytest.mark.slow
def test_rows_sum_to_the_peak_of_a_sharded_rank() -> None:
    with fake_ranks(4):
        planner = prepare(Model(), INPUTS, parallelize=fsdp_over(4))
        found = broken_down(planner, everywhere(planner, 0)).by_category()
    assert found[GATHERED] > 0
    assert found[PARAMETERS] < sum(p.numel() for p in Model().parameters()) * F32


def test_an_explanation_changes_no_later_step() -> None:
    planner = prepare(Model(), INPUTS)
    choice = mixed(planner)
    record = planner.run(choice)
    planner.explain(choice, "it")
    planner.records.clear()
    assert planner.run(choice) == record


@pytest.mark.slow
def test_rows_sum_to_the_peaks_that_the_profiler_has_measured() -> None:
    rows = compare(build, ["none", "full", "selective"], Training(steps=2, optimizer="adamw"), explains=True).rows
    for row in rows:
        found = row.explained
        assert found is not None
        assert found.peak_bytes - found.before_bytes == row.peak_bytes
        assert 0 <= found.by_category().get(UNSEEN, 0) < 0.05 * found.peak_bytes, "the workspace of kernels"
        assert sum(one.bytes for one in found.rows) == found.peak_bytes
    parameters = sum(parameter.numel() for parameter in build().model.parameters()) * F32
    for row in rows:
        assert row.explained is not None
        found_by = row.explained.by_category()
        assert (found_by[PARAMETERS], found_by[GRADIENTS]) == (parameters, parameters)
        assert 2 * parameters < found_by[OPTIMIZER] < 2.1 * parameters, "two states, and the counters of steps"


# -- The categories


class Head(nn.Module):
    """Two blocks of one linear and a tanh each, and logits that are larger than everything else."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(DIM, classes, bias=False)
        self.head.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.cross_entropy(self.head(x), torch.zeros(len(x), dtype=torch.long))


def test_a_peak_of_logits_is_known_by_hand() -> None:
    classes = 4096
    planner = prepare(Head(classes), INPUTS)
    found = broken_down(planner, everywhere(planner, -1))
    hidden, logits, head = ROWS * DIM * F32, ROWS * classes * F32, DIM * classes * F32
    by = found.by_category()
    assert by[PARAMETERS] == 2 * DIM * DIM * F32 + head
    assert by[BUFFERS] == hidden, "the input"
    assert by[ACTIVATIONS] == 2 * hidden, "both results of tanh: what autograd saves"
    assert GRADIENTS not in by, "the backward of the blocks has not begun"
    in_head = {(row.where, row.op): row.bytes for row in found.rows if row.category == HEAD}
    assert in_head["(model)", "aten._log_softmax.default"] == logits
    assert in_head["(model)", "aten._log_softmax_backward_data.default"] == logits
    assert found.moment == "in the backward of the model (_log_softmax_backward_data)"
    assert found.remedies()[0] == f"{HEAD}, 1.5 MiB: {REMEDIES[HEAD]}"
    assert found.curve.peak.x > 1


def test_activations_say_what_keeps_them_and_whether_that_is_a_choice() -> None:
    planner = prepare(Model(), INPUTS)
    none = broken_down(planner, everywhere(planner, -1))
    why = {row.kept_by: row.is_choice for row in none.rows if row.category == ACTIVATIONS}
    assert why == {BLOCK_INPUT: False, NO_CHECKPOINTING: True}
    full = broken_down(planner, everywhere(planner, 0))
    assert {row.kept_by for row in full.rows if row.category == ACTIVATIONS} <= {BLOCK_INPUT, HELD}
    assert full.choice_bytes == 0 < none.choice_bytes
    assert full.by_category()[RECOMPUTED_ACTIVATIONS] > 0
    assert {row.category for row in none.rows} >= {GRADIENTS, TEMPORARIES, PARAMETERS}


def test_a_saved_result_names_its_rule_module_and_op() -> None:
    planner = prepare(Model(), INPUTS)
    (choices,) = planner.choices
    found = broken_down(planner, everywhere(planner, len(choices) - 2))
    kept = [row for row in found.rows if row.kept_by.startswith("rule ")]
    assert kept
    assert all(row.is_choice and row.where.startswith("blocks.") and row.op for row in kept)
    assert found.choice_bytes == sum(row.bytes for row in kept)


def test_the_state_of_an_optimizer_is_a_row() -> None:
    planner = prepare(Model(), INPUTS, optimizer="adam")
    found = broken_down(planner, everywhere(planner, 0))
    trained = sum(parameter.numel() for parameter in Model().parameters()) * F32
    assert [row.bytes for row in found.rows if row.category == OPTIMIZER] == [2 * trained]


def test_the_plan_is_explained_with_the_least_peak() -> None:
    planner = prepare(Model(), INPUTS)
    made = explained(planner, make_plan(planner, "60%"))
    plan, least = made.explained
    assert (plan.label, plan.peak_bytes) == ("plan", made.point.peak)
    assert least.label == "least"
    assert least.peak_bytes <= made.least
    smallest = explained(planner, make_plan(planner, least.peak_bytes))
    assert [one.label for one in smallest.explained] == ["plan"], "it is the least"


def test_more_rows_raise_peak_and_curve() -> None:
    weight = AliveRow(PARAMETERS, "w", "", "", 1, 7)
    curve = Curve((weight,), (CurvePoint(0.0, "first", {0: (5, 1)}), CurvePoint(1.0, "then", {0: (7, 1)})))
    before = PeakBreakdown("x", "then", 7, 5, (weight,), curve)
    after = with_more(before, [AliveRow(OPTIMIZER, "(model)", "", "", 1, 10), AliveRow(GATHERED, "", "", "", 0, 0)])
    assert (after.peak_bytes, after.before_bytes) == (17, 15)
    assert [row.category for row in after.rows] == [OPTIMIZER, PARAMETERS]
    assert after.curve.by_category() == {PARAMETERS: [5, 7], OPTIMIZER: [10, 10]}
    assert (after.curve.peak.moment, after.curve.before) == ("then", {1})
    assert with_more(before, after.rows[:1], are_before=False).before_bytes == 5
