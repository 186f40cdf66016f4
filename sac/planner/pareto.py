"""The save options of one region that are worth a choice: more bytes only for less time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sac.planner.profile import Engine, RegionProfile

# Note [The search for save options]
#
# Two walks, one entry at a time: from nothing saved, each step saves the entry that spares most seconds per byte; from
# everything saved, each step drops the entry that costs fewest seconds per byte. The second finds entries that are
# worth saving only together. Of all options on the way, those remain that no other one beats in both bytes and time.
# Against all subsets, plans are slower by 0.1 % of a step at most.

MOST_OPTIONS = 100  # of a region; of more, every n-th


@dataclass(frozen=True, slots=True)
class SaveOption:
    """Entries to save in addition to those that must be saved; the bytes then held, and the recomputed seconds."""

    saved: frozenset[int]
    bytes: int
    seconds: float


def priced(profile: RegionProfile, times: Sequence[float], saved: Collection[int], engine: Engine) -> SaveOption:
    """Return the save option of the entries ``saved`` with its cost. ``times``: seconds per entry."""
    cost = profile.recomputed(saved, engine)
    return SaveOption(frozenset(saved), cost.bytes, math.fsum(times[number] for number in cost.entries))


def pareto(profile: RegionProfile, times: Sequence[float], engine: Engine = "replay") -> tuple[SaveOption, ...]:
    """Return save options of which none is beaten in bytes or seconds by one that is no worse in the other.

    Bytes ascend and seconds descend, with one save option for each pair. Among options of equal cost, the one that
    saves fewer entries is preferred, then the one that saves earlier entries. ``times``: seconds per entry, not
    negative. See Note [The search for save options].
    """
    found: dict[frozenset[int], SaveOption] = {}

    def price(saved: frozenset[int]) -> SaveOption:
        if saved not in found:
            found[saved] = priced(profile, times, saved, engine)
        return found[saved]

    candidates = frozenset(entry.number for entry in profile.candidates)
    _save_more(candidates, price)
    _save_less(candidates, price)
    best: list[SaveOption] = []
    for option in sorted(found.values(), key=lambda one: (one.bytes, one.seconds, len(one.saved), sorted(one.saved))):
        if not best or option.seconds < best[-1].seconds:
            best.append(_tidied(profile, option, engine, price))
    step = -(-(len(best) - 1) // (MOST_OPTIONS - 1)) or 1
    return (*best[:-1:step], best[-1])


def _tidied(
    profile: RegionProfile, option: SaveOption, engine: Engine, price: Callable[[frozenset[int]], SaveOption]
) -> SaveOption:
    """Return ``option`` without the entries that hold nothing, unless that costs more."""
    held = {profile.maker.get(value) for value in profile.recomputed(option.saved, engine).held}
    for number in sorted(option.saved - held):
        less = price(option.saved - {number})
        if less.bytes <= option.bytes and less.seconds <= option.seconds:
            option = less
    return option


def _save_more(candidates: frozenset[int], price: Callable[[frozenset[int]], SaveOption]) -> None:
    option = price(frozenset())
    while True:
        more = [price(option.saved | {number}) for number in sorted(candidates - option.saved)]
        more = [one for one in more if one.seconds < option.seconds]
        if not more:
            return
        now = option
        option = max(more, key=lambda one: (now.seconds - one.seconds) / max(one.bytes - now.bytes, 1))


def _save_less(candidates: frozenset[int], price: Callable[[frozenset[int]], SaveOption]) -> None:
    option = price(candidates)
    while option.saved:
        less = [price(option.saved - {number}) for number in sorted(option.saved, reverse=True)]
        now = option
        option = min(less, key=lambda one: _loss(now, one))


def _loss(before: SaveOption, after: SaveOption) -> float:
    """Return the seconds that are lost per byte that is freed; less than zero if nothing changes."""
    seconds, size = after.seconds - before.seconds, before.bytes - after.bytes
    if size > 0:
        return seconds / size
    return math.inf if seconds > 0 else -1.0
