"""Assign a choice to each layer: exact search under a budget in bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sac.errors import PlanError, Problem
from sac.extras import import_extra

# -- The search over partial assignments

TICKS = 2**50  # the longest total time of all positions, as an integer for exact comparison
FIRST_OPEN = 1_000  # partial assignments that the first pass follows
MOST_OPEN = 10_000  # partial assignments that are followed at once

# Note [The search for an assignment]
#
# Positions are decided in forward order. Only two numbers of a partial assignment matter for the remaining positions:
# the bytes that it leaves behind, and its seconds. A partial assignment is dropped in three cases: another one leaves
# no more bytes in no more seconds; some constraint can no longer be met; or the lower bound of its total time exceeds
# the time of the best assignment known. The bound comes from the dual of the linear relaxation, which is valid for any
# multipliers. The best assignment known comes from a first pass that follows only the most promising partial
# assignments. So the result is exact, unless more than `MOST_OPEN` promising ones exist at once (many layers that are
# all different); then only the most promising are followed. The result is still within the budget, but another one may
# be faster. So a larger budget may give a slower result, by no more than the distance to the relaxation.


@dataclass(frozen=True, slots=True)
class MemoryConstraint:
    """The bytes at one moment of the step: ``base``, plus those held by positions before ``upto``, plus ``own``.

    ``own``: bytes per choice of position ``upto`` itself; None if that position does not contribute.
    """

    base: int
    upto: int
    own: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Open:
    """Partial assignments as arrays: bytes left behind, ticks, index of the extended one, and the last choice."""

    left: Any
    ticks: Any
    parent: Any
    picked: Any


class Search:
    """See Note [The search for an assignment]."""

    def __init__(
        self,
        constraints: Sequence[MemoryConstraint],
        held: Sequence[Sequence[int]],
        seconds: Sequence[Sequence[float]],
        budget: int,
    ) -> None:
        np = self._np = import_extra("numpy", "tools")
        count = len(held)
        whole = self._whole = sum(max(one) for one in seconds) or 1.0
        self._held = [np.array(sizes, dtype=np.int64) for sizes in held]
        self._ticks = [np.array([round(time / whole * TICKS) for time in times], dtype=np.int64) for times in seconds]
        self._room: list[Any] = []  # per position and choice: the most bytes that earlier positions may leave behind
        for position in range(count + 1):
            room = np.full(len(held[position]) if position < count else 1, np.iinfo(np.int64).max)
            for constraint in constraints:
                if constraint.upto == position:
                    room = np.minimum(room, budget - constraint.base - np.array(constraint.own or (0,), dtype=np.int64))
            self._room.append(room)
        self._bound_by_relaxation(constraints, budget)

    def best(self) -> tuple[int, ...]:
        """Return the best choice of each position."""
        np = self._np
        first = self._pass(np.inf, FIRST_OPEN)
        limit = float(first[0]) if first else np.inf
        found = self._pass(limit, MOST_OPEN) or first
        assert found is not None, "the budget can be met"
        return found[1]

    def _bound_by_relaxation(self, constraints: Sequence[MemoryConstraint], budget: int) -> None:
        """Compute ``slope`` and ``rest``: positions from p on take at least ``rest[p] + slope[p] * left`` ticks."""
        np = self._np
        prices = self._prices(constraints, budget)
        count = len(self._held)
        self._slope, self._rest = np.zeros(count + 1), np.zeros(count + 1)
        slope = rest = 0.0
        for position in range(count, -1, -1):
            here = [
                (price, constraint)
                for price, constraint in zip(prices, constraints, strict=True)
                if constraint.upto == position
            ]
            if position < count:
                cost = self._ticks[position] + slope * self._held[position]
                for price, constraint in here:
                    if constraint.own is not None:
                        cost = cost + price * np.array(constraint.own, dtype=float)
                rest += float(cost.min())
            slope += sum(price for price, _ in here)
            rest += sum(price * (constraint.base - budget) for price, constraint in here)
            self._slope[position], self._rest[position] = slope, rest

    def _prices(self, constraints: Sequence[MemoryConstraint], budget: int) -> Any:
        """Return the price of a byte in ticks per constraint: the dual of the relaxation that may mix choices."""
        np = self._np
        optimize, sparse = import_extra("scipy.optimize", "tools"), import_extra("scipy.sparse", "tools")
        starts = np.cumsum([0, *(len(sizes) for sizes in self._held)])
        count, total = len(self._held), int(starts[-1])
        scale = float(max(1, max(int(sizes.max()) for sizes in self._held)))
        # Variables: the share of each choice, then the bytes left behind before each position.
        equal = sparse.lil_array((2 * count + 1, total + count + 1))
        equal[2 * count, total] = 1
        upper = sparse.lil_array((len(constraints), total + count + 1))
        for position, sizes in enumerate(self._held):
            choices = slice(int(starts[position]), int(starts[position + 1]))
            equal[position, choices] = 1
            equal[count + position, choices] = sizes / scale
            equal[count + position, total + position] = 1
            equal[count + position, total + position + 1] = -1
        for number, constraint in enumerate(constraints):
            upper[number, total + constraint.upto] = 1
            if constraint.own is not None:
                upper[number, int(starts[constraint.upto]) : int(starts[constraint.upto + 1])] = (
                    np.array(constraint.own) / scale
                )
        cost = np.concatenate([*self._ticks, np.zeros(count + 1)]) / TICKS
        solved = optimize.linprog(
            cost,
            A_ub=upper.tocsr(),
            b_ub=np.array([(budget - constraint.base) / scale for constraint in constraints]),
            A_eq=equal.tocsr(),
            b_eq=np.array([1.0] * count + [0.0] * (count + 1)),
            method="highs",
        )
        if solved.ineqlin is None or solved.x is None:
            return np.zeros(len(constraints))  # still a valid lower bound
        return np.maximum(0.0, -solved.ineqlin.marginals) * TICKS / scale

    def _pass(self, limit: float, most: int) -> tuple[int, tuple[int, ...]] | None:
        """Follow the ``most`` promising partial assignments; return ticks and choices of the best, None if all drop."""
        np = self._np
        steps: list[_Open] = []
        left, ticks = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        for position, (sizes, times) in enumerate(zip(self._held, self._ticks, strict=True)):
            # One row per choice. The partial assignments are sorted by bytes left behind, so each row is sorted.
            lefts, all_ticks = left + sizes[:, None], ticks + times[:, None]
            bound = all_ticks + self._slope[position + 1] * lefts + self._rest[position + 1]
            fits = (left <= self._room[position][:, None]) & (bound <= limit + 1e-9 * TICKS)
            picked, parent = np.nonzero(fits)
            if not len(picked):
                return None
            left, ticks, bound = lefts[fits], all_ticks[fits], bound[fits]
            keep = np.argsort(left, kind="stable")  # merges the rows
            fastest = np.minimum.accumulate(ticks[keep])
            keep = keep[np.append(True, fastest[1:] < fastest[:-1])]
            keep = keep[np.append(left[keep[1:]] > left[keep[:-1]], True)]  # the fastest of those with equal bytes
            if len(keep) > most:
                keep = keep[np.sort(np.argsort(bound[keep], kind="stable")[:most])]
            left, ticks = left[keep], ticks[keep]
            steps.append(_Open(left, ticks, parent[keep], picked[keep]))
        ends = np.flatnonzero(left <= self._room[-1][0])
        if not len(ends):
            return None
        at = best = int(ends[np.argmin(ticks[ends])])
        choice = []
        for step in reversed(steps):
            choice.append(int(step.picked[at]))
            at = int(step.parent[at])
        return int(ticks[best]), tuple(reversed(choice))


# -- The fastest assignment within a budget


class BudgetTooSmallError(PlanError):
    """No choice meets every constraint within the budget; ``least`` is the lowest peak, at number ``constraint``."""

    def __init__(self, budget: int, least: int, constraint: int) -> None:
        super().__init__(Problem("budget", f"{budget} bytes", f"at least {least} bytes (row {constraint})"))
        self.budget, self.least, self.constraint = budget, least, constraint

    def __reduce__(self) -> Any:
        return type(self), (self.budget, self.least, self.constraint)


def peak(
    constraints: Sequence[MemoryConstraint], held: Sequence[Sequence[int]], choice: Sequence[int]
) -> tuple[int, int]:
    """Return the peak of live bytes, and the number of the first constraint that reaches it."""
    before = [0]
    for position, picked in enumerate(choice):
        before.append(before[-1] + held[position][picked])
    live = [
        constraint.base + before[constraint.upto] + (constraint.own[choice[constraint.upto]] if constraint.own else 0)
        for constraint in constraints
    ]
    most = max(live)
    return most, live.index(most)


def assign(
    constraints: Sequence[MemoryConstraint],
    held: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    budget: int,
) -> tuple[int, ...]:
    """Return the choice of each position with the least total seconds that keeps every constraint within ``budget``.

    ``held[p][c]`` is the number of bytes that position ``p`` leaves behind under choice ``c``, ``seconds[p][c]`` its
    time. A larger budget is never slower (but see the Note). Among equal positions, those that hold more come later if
    the constraints allow it. Needs scipy. Raises ``BudgetTooSmallError``. See Note [The search for an assignment].
    """
    least, constraint = peak(constraints, held, _smallest(constraints, held))
    if least > budget:
        raise BudgetTooSmallError(budget, least, constraint)
    return _ordered(Search(constraints, held, seconds, budget).best(), constraints, held, seconds, budget)


def assign_alike(
    constraints: Sequence[MemoryConstraint],
    held: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    budget: int,
    groups: Sequence[int],
) -> tuple[int, ...]:
    """Like `assign`, with one choice for all positions of a group. ``groups``: the group of each position.

    All positions of a group have the same number of choices. All combinations are tried. Raises
    ``BudgetTooSmallError``.
    """
    order = sorted(set(groups))
    counts = [len(held[groups.index(group)]) for group in order]
    least: tuple[int, int] | None = None
    best: tuple[float, tuple[int, ...]] | None = None
    for combination in product(*map(range, counts)):
        by_kind = dict(zip(order, combination, strict=True))
        choice = tuple(by_kind[group] for group in groups)
        time = math.fsum(times[picked] for times, picked in zip(seconds, choice, strict=True))
        if best is not None and time >= best[0]:
            continue
        most = peak(constraints, held, choice)
        least = most if least is None else min(least, most)
        if most[0] <= budget:
            best = time, choice
    if best is None:
        raise BudgetTooSmallError(budget, *(least or (0, 0)))
    return best[1]


def _smallest(constraints: Sequence[MemoryConstraint], held: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the choice with the lowest peak, by bisection over budgets; `_least_left` decides which can be met."""
    low, high = 0, peak(constraints, held, [0] * len(held))[0]
    found = (0,) * len(held)
    tops = _tops(constraints, held)
    while low < high:
        middle = (low + high) // 2
        choice = _least_left(tops, held, middle)
        if choice is None:
            low = middle + 1
        else:
            found, high = choice, middle
    return found


def _tops(
    constraints: Sequence[MemoryConstraint], held: Sequence[Sequence[int]]
) -> list[tuple[float, tuple[float, ...]]]:
    """Return, per position and for the end, the highest constraint independent of the choice, and that per choice.

    Both exclude the bytes that earlier positions leave behind, and are minus infinity if there is no constraint.
    """
    tops = []
    for position in range(len(held) + 1):
        here = [constraint for constraint in constraints if constraint.upto == position]
        of_choice = [(constraint.base, constraint.own) for constraint in here if constraint.own is not None]
        whatever = max((constraint.base for constraint in here if constraint.own is None), default=-math.inf)
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
    constraints: Sequence[MemoryConstraint],
    held: Sequence[Sequence[int]],
    seconds: Sequence[Sequence[float]],
    budget: int,
) -> tuple[int, ...]:
    """Reorder the choices of equal positions so that later ones hold more, if the budget allows it."""
    alike: dict[Any, list[int]] = {}
    for position in range(len(held)):
        alike.setdefault((tuple(held[position]), tuple(seconds[position])), []).append(position)
    ordered = list(choice)
    for (sizes, _), positions in alike.items():
        picks = sorted((choice[position] for position in positions), key=lambda picked: (sizes[picked], picked))
        for position, picked in zip(positions, picks, strict=True):
            ordered[position] = picked
    return tuple(ordered) if peak(constraints, held, ordered)[0] <= budget else choice
