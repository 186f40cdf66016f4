"""The options of one region: what may be saved, what that holds, and the time that recomputing the rest takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from sac.planner.cost import FREE, op_class
from sac.planner.devices import Device
from sac.planner.profile import RegionProfile

# Note [The search for save options]
#
# Two walks, one entry at a time: from nothing saved, each step saves the entry that spares most seconds per byte; from
# everything saved, each step drops the entry that costs fewest seconds per byte. The second finds entries that are
# worth saving only together. Of all options on the way, those remain that no other one beats in both bytes and time.
#
# Next to the ops that run again, checkpointing takes time of the host: each call of a region, and each op that is
# recorded. On layers of tiny ops this is most of the time. Without it a plan could be slower than saving nothing, for
# which no op is recorded. A processor runs an op when it is launched, so there this time is added. A GPU runs behind
# the host: there only what is longer than the kernels of the same forward and recomputation counts.

MOST_OPTIONS = 60  # of a region; of more, every n-th
_RECORD_S = 3.5e-6  # per op of a forward; measured with torch 2.13.0+cpu on a core of an AMD EPYC
_CALL_S = 150e-6  # per call of a region


@dataclass(frozen=True, slots=True)
class Option:
    """Entries that a region saves in addition to those that must be, or None for no checkpointing.

    ``bytes`` are then held; ``seconds`` and ``flops`` are recomputed, with the time that checkpointing itself takes.
    """

    saved: frozenset[int] | None
    bytes: int
    seconds: float = 0.0
    ops_s: float = 0.0  # of ``seconds``, the ops
    flops: int = 0


def price(profile: RegionProfile, times: Sequence[float], device: Device, saved: Collection[int]) -> Option:
    """Return the option of saving the entries ``saved``. ``times``: seconds per entry."""
    cost = profile.recomputed(saved)
    host = _CALL_S + _RECORD_S * len(profile.entries)
    if device.name != "cpu":
        kernels = [n for n in (*range(len(times)), *cost.entries) if op_class(profile.entries[n]) != FREE]
        host = max(0.0, host - math.fsum(max(0.0, times[number] - device.launch_s) for number in kernels))
    ops_s = math.fsum(times[number] for number in cost.entries)
    flops = sum(profile.entries[number].flops for number in cost.entries)
    return Option(frozenset(saved), cost.bytes, ops_s + host, ops_s, flops)


def options_of(
    profile: RegionProfile,
    times: Sequence[float],
    device: Device,
    more: Iterable[frozenset[int]] = (),
    *,
    may_skip: bool,
) -> tuple[Option, ...]:
    """Return the options of a region: full recomputation, then those that save more, then no checkpointing.

    Bytes ascend and seconds descend. ``more``: sets of entries that are among the options in any case.
    ``may_skip``: whether no checkpointing is an option. See Note [The search for save options].
    """
    known: dict[frozenset[int], Option] = {}

    def priced(saved: frozenset[int]) -> Option:
        if saved not in known:
            known[saved] = price(profile, times, device, saved)
        return known[saved]

    candidates = frozenset(entry.number for entry in profile.candidates)
    full = priced(frozenset())
    saved = frozenset[int]()
    while True:
        now = priced(saved)
        more_by = {number: priced(saved | {number}) for number in sorted(candidates - saved)}
        gains = {
            number: (now.ops_s - one.ops_s) / max(one.bytes - now.bytes, 1)
            for number, one in more_by.items()
            if one.ops_s < now.ops_s
        }
        if not gains:
            break
        saved |= {max(gains, key=gains.__getitem__)}
    saved = candidates
    while saved:
        losses = {number: _loss(priced(saved), priced(saved - {number})) for number in sorted(saved, reverse=True)}
        saved -= {min(losses, key=losses.__getitem__)}
    best: list[Option] = []
    for option in sorted(known.values(), key=lambda one: (one.bytes, one.seconds, len(one.saved or ()))):
        if option.seconds < (best[-1].seconds if best else full.seconds):
            held, saved = profile.recomputed(option.saved or ()).held, option.saved or frozenset[int]()
            made = {number: {profile.roots[value] for value in profile.entries[number].makes} for number in saved}
            best.append(priced(frozenset(number for number in saved if made[number] & held)))  # the rest holds nothing
    step = -(-len(best) // MOST_OPTIONS) or 1
    chosen = dict.fromkeys([full, *best[::step], *best[-1:], *map(priced, more)])
    found = sorted(chosen, key=lambda one: (one is not full, one.bytes, -one.seconds))
    if may_skip and not profile.reason:
        found.append(Option(None, profile.bytes_of(profile.needed | profile.routed)))
    return tuple(found)


def _loss(before: Option, after: Option) -> float:
    """Return the seconds that are lost per byte that is freed; less than zero if nothing changes."""
    seconds, size = after.ops_s - before.ops_s, before.bytes - after.bytes
    if size > 0:
        return seconds / size
    return math.inf if seconds > 0 else -1.0
