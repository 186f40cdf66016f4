"""The search for what each region saves, recomputes and offloads, within a budget of the device and of the host."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sac.planner.layers import BudgetTooSmallError, MemoryConstraint, Search, assign
from sac.planner.transfer_clock import Clocked, Link, RegionLoad, StepTimes, Windows, clock

# Note [The search with a link]
#
# Next to memory, the link is scarce: what it carries without delaying the step is limited by the time of the step. As a
# constraint of its own it has a price: seconds per byte that is offloaded. For a given price, an option of a region
# costs its recomputation plus the price of the bytes that it sends, and the search is that of a plan without a link
# (Note [The search for an assignment]). So it runs for several prices, and for several windows, of which that many
# bytes are kept free. Each result is run through the clock (Note [The clock of transfers]), which adds the stalls, and
# says how much of the windows is used when. Simulated annealing (Kirkpatrick et al. 1983) improves the best one: a
# region takes another option, two regions exchange theirs, or the windows change, and the clock says what the step
# takes then. The random changes are the same in every run.
#
# The bound. Whatever is sent, a step waits for what the link cannot carry during the forward, beyond one window. So for
# any price up to that of a wait, 1 / (bytes per second), the relaxation's bound less the price of what the link
# carries is a lower bound of the time of recomputation and waiting. The best of these bounds is reported.

PRICES = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)  # of a byte, in units of the time that the link takes for it
WINDOWS = (0.6, 1.0, 1.5)  # in units of what the link carries while a region's forward runs
CHANGES = 8_000  # that annealing tries


@dataclass(frozen=True, slots=True)
class LinkOption:
    """One way to treat a region: bytes left on the device, recomputed seconds, and bytes of each storage offloaded.

    ``input``: bytes of the region's input, if it waits on the host.
    """

    held: int
    seconds: float
    sent: tuple[int, ...] = ()
    input: int = 0

    @property
    def carried(self) -> int:
        """The bytes that the link carries."""
        return sum(self.sent) + self.input


@dataclass(frozen=True, slots=True)
class Row:
    """A constraint on the device's memory; see ``MemoryConstraint``.

    ``position``: whose entry of ``Clocked.early`` (in the backward) or ``flying`` is there too.
    """

    constraint: MemoryConstraint
    position: int
    in_backward: bool


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """The option of each region, the limits of the transfers, the peak in bytes, and what the clock says."""

    choice: tuple[int, ...]
    windows: Windows
    peak: int
    clocked: Clocked


@dataclass(frozen=True, slots=True)
class LinkProblem:
    """What a search is about. ``groups``: the group of each position; ``options``: those of each group."""

    groups: tuple[int, ...]
    options: tuple[tuple[LinkOption, ...], ...]
    rows: tuple[Row, ...]
    times: StepTimes
    link: Link

    def run(self, choice: Sequence[int], windows: Windows) -> LinkPlan:
        """Return what the clock says of a choice."""
        picked = [self.options[group][one] for group, one in zip(self.groups, choice, strict=True)]
        loads = [RegionLoad(one.seconds, one.sent, one.input) for one in picked]
        clocked = clock(self.times, loads, self.link, windows)
        before = [0]
        for one in picked:
            before.append(before[-1] + one.held)
        peak = 0
        for row in self.rows:
            at, own = row.constraint.upto, row.constraint.own
            window = clocked.early if row.in_backward and row.position < len(picked) else clocked.flying
            live = row.constraint.base + before[at] + (own[choice[at]] if own is not None else 0)
            peak = max(peak, live + window[row.position])
        return LinkPlan(tuple(choice), windows, peak, clocked)

    def fits(self, found: LinkPlan, budget: int) -> bool:
        """Return whether a plan is within the budgets of device and host."""
        return found.peak <= budget and self.link.has_room(found.clocked.host)

    def windows(self) -> list[Windows]:
        """Return the limits to try."""
        layer = self.link.down * sum(self.times.forward) / len(self.times.forward)
        sizes = {self._rounded(layer * share) for share in WINDOWS}
        return [Windows(size, size) for size in sorted({0, *sizes})]

    def _rounded(self, size: float) -> int:
        """Return a window of about ``size`` bytes."""
        return max(1, round(size / self.link.smallest)) * self.link.smallest

    def best(self, budget: int) -> LinkPlan | None:
        """Return the fastest plan found; None if nothing fits. See Note [The search with a link]."""
        found = [
            plan
            for windows in self.windows()
            for price in PRICES
            for plan in self._at_price(budget, windows, price / self.link.down)
            if self.fits(plan, budget)
        ]
        if not found:
            return None
        return self._annealed(min(found, key=lambda plan: plan.clocked.seconds), budget)

    def bound(self, budget: int, in_flight: int = 0) -> float:
        """Return a lower bound of the seconds of a step within the budget, with a window of up to ``in_flight``."""
        window = max(in_flight, *(windows.in_flight for windows in self.windows()))
        best = 0.0
        for price in PRICES:
            of_byte = price / self.link.down
            kept = self._reduced(of_byte, math.inf)
            try:
                found = Search(*self._problem(kept, of_byte), budget).bound
            except BudgetTooSmallError:
                continue
            best = max(best, found - of_byte * (window + self.link.down * sum(self.times.forward)))
        return self.times.total + best

    @property
    def _groups(self) -> range:
        return range(len(self.options))

    def _places(self, group: int) -> list[int]:
        return [at for at, of in enumerate(self.groups) if of == group]

    def _reduced(self, of_byte: float, most: float) -> list[list[int]]:
        """Return the options of each group that no other beats in bytes and price, and that send at most ``most``."""
        kept = []
        for options in self.options:
            able = [at for at, one in enumerate(options) if sum(one.sent) <= most]
            cost = {at: options[at].seconds + of_byte * options[at].carried for at in able}
            front: list[int] = []
            for at in sorted(able, key=lambda at: (options[at].held, cost[at])):
                if not front or cost[at] < cost[front[-1]]:
                    front.append(at)
            kept.append(front)
        return kept

    def _problem(self, kept: list[list[int]], of_byte: float, room: int = 0) -> tuple[Any, Any, Any]:
        """Return constraints, bytes and costs of the options ``kept``, with ``room`` bytes of a window in each row."""
        constraints = [
            replace(
                row.constraint,
                base=row.constraint.base + (room if row.position else 0),
                own=None
                if row.constraint.own is None
                else tuple(row.constraint.own[at] for at in kept[self.groups[row.constraint.upto]]),
            )
            for row in self.rows
        ]
        held = [[self.options[group][at].held for at in kept[group]] for group in self.groups]
        cost = {
            group: [self.options[group][at].seconds + of_byte * self.options[group][at].carried for at in kept[group]]
            for group in self._groups
        }
        return constraints, held, [cost[group] for group in self.groups]

    def _at_price(self, budget: int, windows: Windows, of_byte: float) -> list[LinkPlan]:
        kept = self._reduced(of_byte, windows.in_flight)
        if not all(kept):
            return []
        found = []
        for room in {windows.in_flight, windows.in_flight // 2}:
            try:
                picked = assign(*self._problem(kept, of_byte, room), budget)
            except BudgetTooSmallError:
                continue
            choice = [kept[group][one] for group, one in zip(self.groups, picked, strict=True)]
            found += [self.run(order, windows) for order in (choice, self._spread(choice))]
        return found

    def _spread(self, choice: list[int]) -> list[int]:
        """Return the options of each group in an order that sends about as much at any time."""
        spread = [*choice]
        for group in self._groups:
            places = self._places(group)
            counts: dict[int, int] = {}
            for at in places:
                counts[choice[at]] = counts.get(choice[at], 0) + 1
            turns = sorted(((n + 0.5) / count, one) for one, count in counts.items() for n in range(count))
            for at, (_, one) in zip(places, turns, strict=True):
                spread[at] = one
        return spread

    def _annealed(self, plan: LinkPlan, budget: int) -> LinkPlan:
        """Return the best plan that random changes lead to from ``plan``; the same one in every run."""
        chance = random.Random(0)
        places = [self._places(group) for group in self._groups]
        most = max(one.seconds for of in self.options for one in of)
        range_ = max(1, max(max(one.held for one in of) - min(one.held for one in of) for of in self.options))

        def cost(one: LinkPlan, warmth: float) -> float:
            room = self.link.host
            over = max(0, one.peak - budget) + (max(0, one.clocked.host - room) if room is not None else 0)
            return one.clocked.seconds + (20 * most / range_ * over + warmth if over else 0.0)

        now, best = plan, plan
        for number in range(CHANGES):
            warmth = 0.3 * most * 0.003 ** (number / CHANGES)
            choice, windows, kind = [*now.choice], now.windows, chance.random()
            one = chance.randrange(len(choice))
            other = chance.choice(places[self.groups[one]])
            if kind < 0.55:
                choice[one] = chance.randrange(len(self.options[self.groups[one]]))
            elif kind < 0.7:
                choice[one] = choice[other]
            elif kind < 0.9:
                choice[one], choice[other] = choice[other], choice[one]
            else:
                size = self._rounded(windows.in_flight * math.exp(chance.uniform(-0.3, 0.3)))
                windows = Windows(size, size)
            changed = self.run(choice, windows)
            worse = cost(changed, warmth) - cost(now, warmth)
            if worse < 0 or chance.random() < math.exp(-worse / warmth):
                now = changed
                if self.fits(now, budget) and now.clocked.seconds < best.clocked.seconds:
                    best = now
        return best
