"""The best batch or sequence length: a plan for each of some sizes, and the one with the most throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor

from sac.errors import PlanError, Problem
from sac.planner.budget import read_budget
from sac.planner.plan_file import NEEDS_NONE, Plan, TooSmallError
from sac.planner.planner import Progress
from sac.policy.read import bytes_text
from sac.tables import Table, flops_text, seconds_text

# -- Which sizes are tried

T = TypeVar("T")
RESOLUTION = 8  # gaps of at most this part of a size are not searched


def tried(sizes: Sequence[int], run: Callable[[int], T | None], worth: Callable[[T], float]) -> dict[int, T | None]:
    """Run some of ``sizes`` (ascending), and return what ``run`` returned for each: None for a size that does not fit.

    The first, the powers of two and the last are run, up to the first that does not fit. Then the gaps next to the best
    and above the largest that fits are halved, until they are at most an eighth of their lower end. ``worth`` is the
    throughput of a result. Throughput is taken to have one maximum, and larger sizes to need more memory.
    """
    found: dict[int, T | None] = {}
    for size in sizes:
        if size in (sizes[0], sizes[-1]) or not size & (size - 1):
            found[size] = run(size)
            if found[size] is None:
                break
    while fitting := {size: one for size, one in found.items() if one is not None}:
        best = max(fitting, key=lambda size: worth(fitting[size]))
        gaps = [(low, high) for low, high in pairwise(sorted(found)) if best in (low, high) or low == max(fitting)]
        middles = [_middle(sizes, low, high) for low, high in gaps if high - low > max(1, low // RESOLUTION)]
        if not any(middles):
            break
        for middle in filter(None, middles):
            found[middle] = run(middle)
    return dict(sorted(found.items()))


def _middle(sizes: Sequence[int], low: int, high: int) -> int | None:
    """Return the one of ``sizes`` strictly between ``low`` and ``high`` that is nearest to their middle."""
    between = [size for size in sizes if low < size < high]
    return min(between, key=lambda size: abs(2 * size - low - high), default=None)


# -- A plan per size


@dataclass(frozen=True, slots=True)
class SizedPlan:
    """The plan for one size. ``plan`` is None if nothing fits; ``peak`` is then the least.

    ``items``: the tokens of a step if its inputs are tokens, otherwise its rows; ``unit`` says which.
    """

    size: int
    plan: Plan | None
    peak: int
    items: int
    unit: str

    @property
    def per_second(self) -> float:
        """The predicted items per second, of a step with its optimizer."""
        return self.items / self.plan.step_s if self.plan is not None and self.plan.step_s else 0.0


@dataclass(frozen=True, slots=True)
class PlannedSizes:
    """The plans for the tried ones of the sizes that ``name`` says (batch, seq), ascending."""

    name: str
    rows: tuple[SizedPlan, ...]

    @property
    def best(self) -> SizedPlan:
        """The row with the most items per second; the smaller size if two are equal."""
        return max(self.rows, key=lambda row: row.per_second)

    @property
    def best_plan(self) -> Plan:
        """The plan of the best row."""
        assert self.best.plan is not None
        return self.best.plan


def plan_sizes(
    name: str,
    sizes: Sequence[int],
    plan_of: Callable[[int, Progress], tuple[Plan, Any]],
    budget: Any,
    progress: Progress,
) -> PlannedSizes:
    """Return the plans for some of ``sizes``; see ``tried``. ``plan_of`` returns the plan for a size, and its inputs.

    Raises ``PlanError`` if ``sizes`` are not ascending numbers from 1 on, if ``budget`` is a share, if not even the
    first size fits, or for what ``plan_of`` raises.
    """
    refuse_sizes(name, sizes)
    refuse_share(budget)
    refused: list[TooSmallError] = []
    shapes: dict[str, int] = {}

    def run(size: int) -> SizedPlan | None:
        try:
            made, inputs = plan_of(size, lambda done, total, label: progress(done, total, f"{name} {size}: {label}"))
        except TooSmallError as error:
            refused.append(error)
            least[size] = error.least
            return None
        shape = str([[*one.shape] for one in _tensors(inputs)])
        if shapes.setdefault(shape, size) != size:
            found = f"the inputs for {size} have the same shapes as those for {shapes[shape]}"
            raise PlanError(Problem(name, found, fix="let the inputs depend on it, or plan for one size"))
        return SizedPlan(size, made, made.point.peak, *items_of(inputs))

    least: dict[int, int] = {}
    found = tried(sizes, run, lambda row: row.per_second)
    if not any(found.values()):
        raise refused[0]
    rows = (row or SizedPlan(size, None, least[size], 0, "") for size, row in found.items())
    return PlannedSizes(name, tuple(rows))


def refuse_sizes(name: str, sizes: Sequence[int]) -> None:
    """Raise ``PlanError`` unless ``sizes`` are ascending numbers from 1 on."""
    if not len(sizes) or sizes[0] < 1 or any(high <= low for low, high in pairwise(sizes)):
        shown = f"{[*sizes[:8]]}{' …' if len(sizes) > 8 else ''}"
        raise PlanError(
            Problem(name, f"{shown} are not sizes to choose from", "ascending numbers, such as range(1, 65)")
        )


def refuse_share(budget: Any) -> None:
    """Raise ``PlanError`` if ``budget`` is a share of the range of peaks, which is another for each size."""
    if read_budget(budget).bytes is None:
        found = f'"{budget}" is a share of a range of peaks, but each size has its own range'
        raise PlanError(Problem("budget", found, 'bytes, such as "72GiB"'))


def items_of(inputs: Any) -> tuple[int, str]:
    """Return how many tokens, or else rows, a step with these inputs processes.

    Tokens are numbers [rows, tokens], or their embeddings [rows, tokens, width].
    """
    first = next(iter(_tensors(inputs)), None)
    if first is None or not first.dim():
        return 1, "steps"
    if first.dim() == (3 if first.is_floating_point() else 2):
        return len(first) * first.shape[1], "tokens"
    return len(first), "rows"


def _tensors(inputs: Any) -> list[Tensor]:
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [one for one in values if isinstance(one, Tensor)]


# -- The plans as a table

_MEANING = (
    "step: predicted time of forward, backward, recomputation and optimizer; again: of it recomputation, and "
    "checkpointing itself",
)


def table_of_sizes(found: PlannedSizes) -> Table:
    """Return a row for each tried size; the best is marked."""
    best, unit = found.best, f"{found.best.unit}/s"
    columns = (found.name, "peak", "kept", "recomputed", "again", "step", unit, "")
    return Table(columns, tuple(_cells(row, is_best=row is best) for row in found.rows), right=columns[:-1])


def notes_of_sizes(found: PlannedSizes) -> tuple[str, ...]:
    """Return the lines below the table."""
    sizes = ", ".join(str(row.size) for row in found.rows)
    notes = dict.fromkeys(note for row in found.rows if row.plan is not None for note in row.plan.notes)
    return (f"tried: {sizes}", *_MEANING, *(f"note: {note}" for note in notes if note != NEEDS_NONE))


def _cells(row: SizedPlan, *, is_best: bool) -> tuple[str, ...]:
    if row.plan is None:
        return str(row.size), bytes_text(row.peak), "", "", "", "", "", "does not fit: its least peak"
    point, step = row.plan.point, row.plan.step_s
    assert step is not None
    what = "no checkpointing" if NEEDS_NONE in row.plan.notes else "plan"
    return (
        str(row.size), bytes_text(point.peak), bytes_text(point.kept), flops_text(point.flops),
        seconds_text(point.seconds), seconds_text(step), f"{row.per_second:,.0f}", f"{what}, best" if is_best else what,
    )  # fmt: skip
