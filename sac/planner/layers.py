"""Which choice each layer gets, so that a step stays within a budget in the least time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from sac.errors import PlanError, Problem
from sac.planner.layer_search import Row, Search


class BudgetTooSmallError(PlanError):
    """No choice keeps every row within the budget: ``least`` bytes do, and ``row`` is the number of that row."""

    def __init__(self, budget: int, least: int, row: int) -> None:
        super().__init__(Problem("budget", f"{budget} bytes", f"at least {least} bytes (row {row})"))
        self.budget, self.least, self.row = budget, least, row

    def __reduce__(self) -> Any:
        return type(self), (self.budget, self.least, self.row)


def peak(rows: Sequence[Row], held: Sequence[Sequence[int]], choice: Sequence[int]) -> tuple[int, int]:
    """Return the most bytes that are live at a time, and the number of the first row that has so many."""
    before = [0]
    for position, picked in enumerate(choice):
        before.append(before[-1] + held[position][picked])
    live = [row.base + before[row.upto] + (row.own[choice[row.upto]] if row.own else 0) for row in rows]
    most = max(live)
    return most, live.index(most)


def assign(
    rows: Sequence[Row], held: Sequence[Sequence[int]], seconds: Sequence[Sequence[float]], budget: int
) -> tuple[int, ...]:
    """Return the choice of each position, with the least total seconds of all that keep every row within ``budget``.

    ``held[p][c]`` are the bytes that position ``p`` leaves behind under choice ``c``, ``seconds[p][c]`` its time. A
    larger budget is never slower (but see the Note). Where positions are alike, those that hold more come later if the
    rows allow it. Needs scipy. Raises ``BudgetTooSmallError``. See Note [The search for an assignment].
    """
    least, row = peak(rows, held, _smallest(rows, held))
    if least > budget:
        raise BudgetTooSmallError(budget, least, row)
    return _ordered(Search(rows, held, seconds, budget).best(), rows, held, seconds, budget)


def assign_alike(
    rows: Sequence[Row],
    held: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    budget: int,
    kinds: Sequence[int],
) -> tuple[int, ...]:
    """Return what `assign` does, with one choice for all positions of a kind. ``kinds``: that of each position.

    Positions of a kind have equally many choices. All combinations are tried. Raises ``BudgetTooSmallError``.
    """
    order = sorted(set(kinds))
    counts = [len(held[kinds.index(kind)]) for kind in order]
    least: tuple[int, int] | None = None
    best: tuple[float, tuple[int, ...]] | None = None
    for combination in product(*map(range, counts)):
        by_kind = dict(zip(order, combination, strict=True))
        choice = tuple(by_kind[kind] for kind in kinds)
        time = math.fsum(times[picked] for times, picked in zip(seconds, choice, strict=True))
        if best is not None and time >= best[0]:
            continue
        most = peak(rows, held, choice)
        least = most if least is None else min(least, most)
        if most[0] <= budget:
            best = time, choice
    if best is None:
        raise BudgetTooSmallError(budget, *(least or (0, 0)))
    return best[1]


def _smallest(rows: Sequence[Row], held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the choice with the lowest peak. Whether a budget can be met is seen by leaving as little as possible."""
    low, high = 0, peak(rows, held, [0] * len(held))[0]
    found = (0,) * len(held)
    tops = _tops(rows, held)
    while low < high:
        middle = (low + high) // 2
        choice = _least_left(tops, held, middle)
        if choice is None:
            low = middle + 1
        else:
            found, high = choice, middle
    return found


def _tops(rows: Sequence[Row], held: Sequence[Sequence[int]]) -> list[tuple[float, tuple[float, ...]]]:
    """Return of each position, and of the end, the highest row whatever is chosen there, and the highest per choice.

    Both without what is left behind before; minus infinity where there is no row.
    """
    tops = []
    for position in range(len(held) + 1):
        here = [row for row in rows if row.upto == position]
        of_choice = [(row.base, row.own) for row in here if row.own is not None]
        whatever = max((row.base for row in here if row.own is None), default=-math.inf)
        count = len(held[position]) if position < len(held) else 0
        tops.append(
            (whatever, tuple(max((b + own[c] for b, own in of_choice), default=-math.inf) for c in range(count)))
        )
    return tops


def _least_left(
    tops: Sequence[tuple[float, tuple[float, ...]]], held: Sequence[Sequence[int]], budget: int
) -> tuple[int, ...] | None:
    """Return the choice that leaves the fewest bytes behind at each position, or None if the budget cannot be met.

    ``tops``: see `_tops`.
    """
    left, choice = 0, []
    for position, (whatever, of_choice) in enumerate(tops):
        if whatever + left > budget:
            return None
        if position == len(held):
            break
        fits = [(size, picked) for picked, size in enumerate(held[position]) if of_choice[picked] + left <= budget]
        if not fits:
            return None
        size, picked = min(fits)
        left += size
        choice.append(picked)
    return tuple(choice)


def _ordered(
    choice: tuple[int, ...],
    rows: Sequence[Row],
    held: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    budget: int,
) -> tuple[int, ...]:
    """Let positions that are alike hold more the later they come, if the budget allows it."""
    alike: dict[Any, list[int]] = {}
    for position in range(len(held)):
        alike.setdefault((tuple(held[position]), tuple(seconds[position])), []).append(position)
    ordered = list(choice)
    for (sizes, _), positions in alike.items():
        picks = sorted((choice[position] for position in positions), key=lambda picked: (sizes[picked], picked))
        for position, picked in zip(positions, picks, strict=True):
            ordered[position] = picked
    return tuple(ordered) if peak(rows, held, ordered)[0] <= budget else choice
