"""From one observed step to the peak of every other choice, and to the fastest choice within a budget."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Any

import torch

from sac.blocks.find import Block
from sac.errors import Problem, TooSmallError
from sac.planner.cost import Device, seconds
from sac.planner.explain import Explanation
from sac.planner.observing import BACKWARD, BETWEEN, FORWARD, StepPhase, StepRecord
from sac.planner.profile import Option, RegionProfile
from sac.planner.rules import PlannedRegion, policy_of, saved_by
from sac.policy.model import Policy
from sac.stores import transfers
from sac.tables import Table, bytes_text, flops_text, seconds_text

# Note [From an observed step to every other]
#
# The step was observed under full recomputation. What another choice changes is known from the tape of the region
# (Note [Profiles]), as an upper bound:
# - It leaves behind the storages that replay starts from, or for no checkpointing those that autograd saves.
# - While its forward runs, these are alive in addition to what is alive in any case: the observed forwards are measured
#   at each op, and each storage is known to be alive until the last op that uses it (`_forward_bytes`).
# - In its backward, everything that autograd saves is there at once after the replay, whatever was kept. On top come
#   storages that are only the start of a replay, those that backward has already read when the replay begins, and what
#   is alive between the steps of the replay (`_replay_bytes`).
# Freeing earlier than assumed makes the peak lower, never higher. So a plan can be used without having been tried.
#
# What a choice leaves behind counts in every phase as often as calls of its region wait for their backward then: a
# pipeline stage holds several micro-batches. A step that was run with a choice shows by how much the bounds of the
# options in it were too high (`learn`), and which arguments and results of regions were freed that full recomputation
# holds: so are they with every choice in which the regions that had them have the same options.

# Note [The search over layers]
#
# From full recomputation in each region, options are raised along their lower convex hull, the raise with most seconds
# per byte first, later layers first, as long as the predicted peak fits. Then single regions get faster options, and if
# none fits any more, one region a faster and one a slower option that together are faster. Of regions with equal
# profiles and options, the first and the last are tried.

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

# Note [Values on the host]
#
# With host memory, saved values of a region wait there as far as its own forward hides the copies: bytes up to its
# seconds times the rate of the link, largest values first. So the link has always finished with one region when the
# next one ends, no copy is waited for, and backward, which takes longer, hides the copies back. On the device there is
# at each time at most what transfers may have on their way (`TransferLimits`), and in its own backward what the region
# has sent. A step without data copies nothing: it is run with all values saved, and the rest is this arithmetic.

_PARTS = BETWEEN, FORWARD, BACKWARD
_RECORD_S = 3.5e-6  # per op of a forward; measured with torch 2.13.0+cpu on a core of an AMD EPYC
_CALL_S = 150e-6  # per call of a region
_LEAST_S = 1e-9  # what spares less does not count

Choice = tuple[int, ...]  # the number of the option of each region
_Had = frozenset[tuple[int, int]]  # the regions that had something, each with its option


# -- A plan and its figures


@dataclass(frozen=True, slots=True)
class Row:
    """One way to checkpoint the model: its peak in bytes, and what it recomputes in FLOPs and seconds.

    ``checked``: a step was run with it; the other peaks are predicted, as an upper bound.
    """

    label: str
    peak: int
    flops: int
    seconds: float
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan, its figures in bytes and seconds, and those of the usual ways. ``rows``: the plan first.

    ``next_faster``: the least peak with a faster option in one region, and the path of that region. ``step_s``: the
    predicted seconds of a step with its optimizer, if ops outside of blocks were seen. ``host``: what waits there.
    """

    policy: Policy
    rows: tuple[Row, ...]
    device: Device
    budget: int
    least: int
    most: int
    static: int
    extra: int
    forward_s: float
    in_flight: int
    next_faster: tuple[int, str] | None
    step_s: float = 0.0
    host: int = 0
    notes: tuple[str, ...] = ()
    explanation: Explanation | None = None

    @property
    def peak(self) -> int:
        """The peak of the plan."""
        return self.rows[0].peak

    def __str__(self) -> str:
        again = self.rows[0].seconds / self.forward_s if self.forward_s else 0.0
        size, path = self.next_faster or (0, "")
        return (
            f"planned for a budget of {bytes_text(self.budget)}: predicted peak {bytes_text(self.peak)} (least "
            f"{bytes_text(self.least)}, without checkpointing {bytes_text(self.most)}), "
            f"{seconds_text(self.rows[0].seconds)} of recomputing and recording, {again:.0%} of the blocks' forward"
            + (f", {self.in_flight} forwards in flight" if self.in_flight > 1 else "")
            + (f", {bytes_text(self.host)} wait on the host" if self.host else "")
            + (": no checkpointing is needed" if self.most <= self.budget else "")
            + (f"; a faster option of {path} would take {bytes_text(size)}" if path else "")
        )

    def heading(self) -> tuple[str, ...]:
        """Return the lines above the table: device, budget and peaks."""
        return (
            f"for {self.device.name} ({self.device.title}), torch {torch.__version__}",
            f"budget {bytes_text(self.budget)}; least peak {bytes_text(self.least)}, without checkpointing "
            f"{bytes_text(self.most)}; of it {bytes_text(self.static)} parameters, buffers and inputs"
            + (f", {bytes_text(self.extra)} state of the optimizer" if self.extra else ""),
        )

    def table(self) -> Table:
        """Return a row for the plan and for each of the usual ways."""
        columns = ("", "peak", "recomputed", "time", "of forward", "fits", "")
        return Table(columns, tuple(map(self._cells, self.rows)), right=columns[1:5])

    def _cells(self, row: Row) -> tuple[str, ...]:
        share = f"{row.seconds / self.forward_s:.1%}" if self.forward_s else "–"
        fits = "yes" if row.peak <= self.budget else "no"
        how = "checked" if row.checked else "predicted"
        return row.label, bytes_text(row.peak), flops_text(row.flops), seconds_text(row.seconds), share, fits, how

    def text(self, about: Mapping[str, str] | None = None) -> str:
        """Return the policy as YAML with the figures in comments. ``about``: further lines of the header by title."""
        row = self.rows[0]
        head = [
            f"Planned by sac with torch {torch.__version__}.",
            *(f"{name}: {value}" for name, value in (about or {}).items()),
            f"device: {self.device.name} ({self.device.title})",
            f"budget: {self.budget} bytes ({bytes_text(self.budget)})",
            f"peak: {row.peak} bytes ({bytes_text(row.peak)}), {'checked' if row.checked else 'predicted'}",
            f"recomputed: {flops_text(row.flops)} in {seconds_text(row.seconds)} per step (predicted)",
            *(f"note: {note}" for note in self.notes),
        ]
        shown = ("".join(letter if letter.isprintable() else " " for letter in line) for line in head)
        lines = [f"# {part}" for line in shown for part in textwrap.wrap(line, 98, subsequent_indent="  ")]
        return "\n".join([*lines, self.policy.to_yaml()])

    def to_dict(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        names = ("budget", "least", "most", "static", "extra", "host")
        found: dict[str, Any] = {f"{name}_bytes": getattr(self, name) for name in names}
        rows = [
            {"label": one.label, "peak_bytes": one.peak, "fits": one.peak <= self.budget, "recompute_flops": one.flops,
             "recompute_s": one.seconds, "checked": one.checked}
            for one in self.rows
        ]  # fmt: skip
        found |= {"device": self.device.name, "torch": torch.__version__, "forward_s": self.forward_s}
        explained = None if self.explanation is None else self.explanation.to_dict()
        return found | {"step_s": self.step_s, "rows": rows, "notes": [*self.notes], "explained": explained}


# -- The peaks of all choices


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in a step a phase is: what decides which options count in it.

    ``alive``: how many calls of each region are between their forward and their backward. ``own``: the region whose
    forward or backward it is, -1 between two.
    """

    alive: tuple[int, ...]
    own: int
    part: str


class Prediction:
    """Predicts steps on the grounds of one that was observed; see Note [From an observed step to every other].

    ``profiles``: regions of equal ones are of one kind. ``record``: a step that begins with the bytes of steps to come.
    ``extra``: bytes that will be there and are not in the record. ``shipped``: a policy that is an option in any case.
    """

    def __init__(
        self,
        profiles: Mapping[Block, RegionProfile],
        record: StepRecord,
        device: Device,
        *,
        extra: int = 0,
        shipped: Policy | None = None,
    ) -> None:
        self.record, self.device, self.extra = record, device, extra
        of_path = {block.path: block for block in profiles}
        self.blocks = tuple(of_path[path] for path in dict.fromkeys(record.paths))
        numbers = {profile: kind for kind, profile in enumerate(dict.fromkeys(profiles.values()))}
        self.profiles, self.kinds = tuple(numbers), tuple(numbers[profiles[block]] for block in self.blocks)
        pairs = zip(self.blocks, self.kinds, strict=True)
        saved = [(kind, saved_by(shipped, one, self.profiles[kind])) for one, kind in pairs]
        self.options = [options_of(one, {has for at, has in saved if at == n}, device) for one, n in numbers.items()]
        ways = [[option.saved for option in options] for options in self.options]
        # The usual choices. Full recomputation has the least peak; the last option is no checkpointing, if that is one.
        self.full: Choice = (0,) * len(self.blocks)
        self.fastest: Choice = tuple(len(ways[kind]) - 1 for kind in self.kinds)
        self.shipped: Choice = tuple(ways[kind].index(entries) for kind, entries in saved)
        self.seconds = [tuple(option.seconds for option in self.options[kind]) for kind in self.kinds]
        self._forwards_s = [sum(seconds(entry, device) for entry in profile.entries) for profile in self.profiles]
        self.forward_s = sum(self._forwards_s[kind] for kind in self.kinds)
        self._bases: dict[_Place, int] = {}
        self._measured: dict[tuple[str, int, int], int] = {}  # bytes by part, kind and option
        self._freed: dict[_Place, dict[_Had, int]] = {}  # bytes
        left = dict.fromkeys(self.kinds, 0)  # by a forward under full recomputation
        for place, phase in self._placed(record):
            self._bases[place] = max(self._bases.get(place, 0), phase.peak + extra)
            if place.part == FORWARD:
                kind = self.kinds[place.own]
                left[kind] = max(left[kind], phase.after - phase.before)
        self.in_flight = max(count for place in self._bases for count in place.alive)
        # What each option of a kind takes above full recomputation: between its forward and its backward, and besides
        # in these two.
        self._more: dict[tuple[str, int], list[int]] = {}
        forwards: dict[int, list[list[int]]] = {}
        for kind, size in left.items():
            profile, (full, *others) = self.profiles[kind], self.options[kind]
            inputs = max(0, size - full.bytes)
            self._more[BETWEEN, kind] = [0, *(max(0, option.bytes - full.bytes) for option in others)]
            self._more[FORWARD, kind] = [0] * (len(others) + 1)
            forwards[kind] = [_forward_bytes(profile, option) for option in others]
            self._more[BACKWARD, kind] = [0, *(_replay_bytes(profile, option, inputs) for option in others)]
        for place, phase in self._placed(record):
            if place.part == FORWARD:
                kind, above = self.kinds[place.own], phase.before + extra - self._bases[place]
                for option, more in enumerate(forwards[kind], 1):
                    # If calls differ in their ops, all that an option adds may be there at the peak.
                    rises = phase.rises if len(phase.rises) == len(more) else [max(phase.rises)] * len(more)
                    size = above + max(map(add, rises, more))
                    self._more[FORWARD, kind][option] = max(self._more[FORWARD, kind][option], size)

    def _placed(self, record: StepRecord) -> Iterator[tuple[_Place, StepPhase]]:
        """Yield the phases of a step with their places."""
        numbers = {block.path: number for number, block in enumerate(self.blocks)}
        for phase in record.phases:
            counts, own = Counter(phase.alive), -1 if phase.part == BETWEEN else numbers[phase.path]
            yield _Place(tuple(counts[path] for path in numbers), own, phase.part), phase

    def sending(self, host: int) -> Prediction:
        """Return the prediction if options keep values in ``host`` bytes; see Note [Values on the host]."""
        if not host or self.record.phases[-1].alive:  # a graph that is retained holds what was copied back
            return self
        other, limit = copy(self), transfers.LIMITS.in_flight
        share = host // max(sum(place.alive) for place in self._bases)
        other.options, other._more = [*self.options], {**self._more}
        other._bases = {place: size + limit for place, size in self._bases.items()}
        for kind in {*self.kinds}:
            profile, room = self.profiles[kind], min(limit, int(self.device.host_bytes_per_s * self._forwards_s[kind]))
            options = (replace(one, sent=profile.sendable(one, room, share)) for one in self.options[kind])
            other.options[kind] = tuple(options)
            for part, sign in (BETWEEN, -1), (BACKWARD, 1):
                pairs = zip(self._more[part, kind], other.options[kind], strict=True)
                other._more[part, kind] = [size + sign * profile.sent_bytes(option) for size, option in pairs]
        return other

    def host_of(self, choice: Choice) -> int:
        """Return the most bytes that a choice has on the host at once."""
        sent = [region.profile.sent_bytes(region.option) for region in self.regions(choice)]
        return max(sum(count * size for count, size in zip(place.alive, sent, strict=True)) for place in self._bases)

    def learn(self, record: StepRecord, choice: Choice, *, exceeds: bool = False) -> None:
        """Take over what a step with ``choice`` shows of its options. If it ``exceeds`` the budget, of all options."""
        known = self.record
        seen = [(one.paths, len(one.phases), [size for size, _ in one.passed]) for one in (record, known)]
        if seen[0] != seen[1]:
            return
        above = self.extra + max(0, known.static - record.static)  # this step may have begun with fewer bytes
        peaks: dict[_Place, int] = {}
        freed: dict[_Place, set[tuple[int, int]]] = {}
        held = []
        phases = zip(self._placed(record), known.phases, self._freed_in(record), strict=True)
        for (place, phase), full, (early, late) in phases:
            if place in self._bases:
                peaks[place] = max(peaks.get(place, 0), phase.peak + above)
                gone = {*((number, -1) for number in early), *((number, place.own) for number in late)}
                freed[place] = freed.get(place, gone) & gone
            if place.part == FORWARD:
                left = phase.after - phase.before - (full.after - full.before)
                held.append((BETWEEN, place.own, max(0, left + sum(known.passed[number][0] for number in late))))
        self._take_over(choice, held)
        options = {block.path: (at, option) for at, (block, option) in enumerate(zip(self.blocks, choice, strict=True))}
        for place, numbers in freed.items():
            before = self._freed.get(place, {}).items()
            sizes = Counter({had: size for had, size in before if any(choice[at] != option for at, option in had)})
            for number, own in numbers:
                size, paths = known.passed[number]
                # What is freed in a phase may have been there at its peak, which then counts for the phase's region.
                mine = [(own, choice[own])] if own >= 0 else []
                sizes[frozenset([*map(options.__getitem__, paths), *mine])] += size
            self._freed[place] = sizes
        rises = [(at, peak - self._bases[at] - self._held_at(at, choice)) for at, peak in peaks.items()]
        self._take_over(choice, ((at.part, at.own, size) for at, size in rises if at.part != BETWEEN and not exceeds))
        live = dict(zip(self._bases, self.live(choice), strict=True))
        for place, peak in peaks.items():
            self._bases[place] += max(0, peak - live[place])

    def _freed_in(self, record: StepRecord) -> Iterator[tuple[set[int], set[int]]]:
        """Yield for each phase what is freed before it and while it lasts, and held to its end under recomputation."""
        early, others = set[int](), {*self.record.phases[0].freed}
        for phase, after, full in zip(record.phases, record.phases[1:], self.record.phases[1:], strict=False):
            others.update(full.freed)
            early = {*early, *phase.freed} - others
            yield early, {*after.freed} - others
        yield set(), set()

    def _take_over(self, choice: Choice, measured: Iterable[tuple[str, int, int]]) -> None:
        """Take over the largest of the bytes that were ever measured of an option: (part, region, bytes)."""
        for part, own, size in measured:
            key = part, self.kinds[own], choice[own]
            self._measured[key] = max(size, self._measured.get(key, size))
            self._more[part, key[1]][key[2]] = self._measured[key] if key[2] else 0

    def live(self, choice: Sequence[int]) -> list[int]:
        """Return the predicted peak at each place of the step."""
        return [
            base
            + self._held_at(place, choice)
            + (0 if place.own < 0 else self._more[place.part, self.kinds[place.own]][choice[place.own]])
            for place, base in self._bases.items()
        ]

    def _held_at(self, place: _Place, choice: Sequence[int]) -> int:
        """Return the bytes that regions hold at a place with a choice, above full recomputation."""
        numbers = zip(place.alive, self.kinds, choice, strict=True)
        held = sum(count * self._more[BETWEEN, kind][option] for count, kind, option in numbers if count)
        freed = self._freed.get(place, {}).items()
        return held - sum(size for had, size in freed if all(choice[at] == option for at, option in had))

    def peak_of(self, choice: Sequence[int]) -> int:
        """Return the predicted peak of a choice, in bytes."""
        return max(self.live(choice))

    def time_of(self, choice: Choice) -> float:
        """Return the seconds that a choice recomputes, and checkpointing itself takes."""
        return math.fsum(times[option] for times, option in zip(self.seconds, choice, strict=True))

    def regions(self, choice: Choice) -> tuple[PlannedRegion, ...]:
        """Return what each region is to do for a choice."""
        rows = zip(self.blocks, self.kinds, choice, strict=True)
        return tuple(PlannedRegion(block, self.profiles[kind], self.options[kind][one]) for block, kind, one in rows)

    def plan(self, choice: Choice, budget: int, way: Prediction) -> Plan:
        """Return a choice as a plan. ``way``: this prediction, or ``sending`` of it."""
        usual = {"plan": choice, "none": self.fastest, "full": self.full, "selective": self.shipped}
        flops = {label: sum(region.option.flops for region in self.regions(one)) for label, one in usual.items()}
        peaks = {label: self.peak_of(one) for label, one in usual.items()} | {"plan": way.peak_of(choice)}
        return Plan(
            policy_of(way.regions(choice)),
            tuple(Row(label, peaks[label], flops[label], self.time_of(one)) for label, one in usual.items()),
            self.device,
            budget,
            self.peak_of(self.full),
            self.peak_of(self.fastest),
            self.record.static,
            self.extra,
            self.forward_s,
            self.in_flight,
            way.next_faster(choice),
            host=way.host_of(choice),
        )

    def search(self, allowed: int, *known: Choice) -> Choice:
        """Return a fast choice within ``allowed`` bytes, of which no region can get a faster option.

        It is no slower than the choices ``known`` that fit. See Note [The search over layers]. Full recomputation fits,
        or is returned.
        """
        starts = [one for one in (self.fastest, self.shipped, *known) if self.peak_of(one) <= allowed]
        return min((self._filled(one, allowed) for one in (self.full, *starts)), key=self.time_of)

    def _filled(self, choice: Choice, allowed: int) -> Choice:
        """Return a choice no slower than ``choice``; see Note [The search over layers]."""
        chosen, times, places = [*choice], self.seconds, [*self._bases]
        live: list[int] = []
        room, place = 0, places[0]  # of the place with most bytes
        known: dict[int, list[int]] = {}

        def settle(after: list[int]) -> None:
            """Go on with these bytes at each place."""
            nonlocal live, room, place
            live, room, place = after, allowed - max(after), places[after.index(max(after))]
            known.clear()

        def sizes(at: int) -> list[int]:
            """Return what each option of a region takes at the place with most bytes."""
            if at not in known:
                held = [place.alive[at] * size for size in self._more[BETWEEN, self.kinds[at]]]
                known[at] = [*map(add, held, self._more[place.part, self.kinds[at]])] if place.own == at else held
            return known[at]

        def fits(*moves: tuple[int, int]) -> bool:
            """Carry out changes of options if they fit."""
            after = live
            for at, option in moves:
                after = self._changed(after, at, chosen[at], option)
            if max(after) > allowed:
                return False
            for at, option in moves:
                chosen[at] = option
            settle(after)
            return True

        def take(at: int, option: int, others: Sequence[int] = ()) -> None:
            """Give a region a faster option, if need be with a slower one for one of the others."""
            spared, size = times[at][chosen[at]] - times[at][option], sizes(at)
            left = room + size[chosen[at]] - size[option]
            if spared < _LEAST_S or (left >= 0 and fits((at, option))):
                return
            for other in others:
                now, size = chosen[other], sizes(other)
                for slower in reversed(range(now if other != at else 0)):
                    if spared - times[other][slower] + times[other][now] < _LEAST_S:
                        break
                    if left + size[now] - size[slower] >= 0 and fits((at, option), (other, slower)):
                        return

        settle(self.live(choice))
        raises = [
            (rate, at, option)
            for at, kind in enumerate(self.kinds if choice == self.full else ())
            for rate, option in _hull(self._more[BETWEEN, kind], times[at])
        ]
        for _, at, option in sorted(raises, key=lambda one: (-one[0], -one[1])):
            take(at, option)
        while True:
            before = [*chosen]
            if self._freed:
                settle(self.live(chosen))
            for at in reversed(range(len(chosen))):
                for option in reversed(range(len(times[at]))):
                    take(at, option)
            alike = [*zip(self.kinds, chosen, strict=True)]
            ends = [at for at, one in enumerate(alike) if one not in alike[:at] or one not in alike[at + 1 :]]
            for at in reversed(ends if chosen == before else ()):
                for option in reversed(range(len(times[at]))):
                    take(at, option, ends)
            if chosen == before:
                return tuple(chosen)

    def _changed(self, live: Sequence[int], at: int, old: int, new: int) -> list[int]:
        """Return the most bytes at each place if a region gets another option."""
        kind, freed = self.kinds[at], self._freed
        more = {part: self._more[part, kind][new] - self._more[part, kind][old] for part in _PARTS}
        after = [
            size + place.alive[at] * more[BETWEEN] + (more[place.part] if place.own == at else 0)
            for size, place in zip(live, self._bases, strict=True)
        ]
        if not freed:
            return after
        sizes = (sum(size for had, size in freed.get(place, {}).items() if (at, old) in had) for place in self._bases)
        return [*map(add, after, sizes)]

    def next_faster(self, choice: Choice) -> tuple[int, str] | None:
        """Return the least peak of a choice in which one more region gets a faster option, and the region's path."""
        alike = {(kind, option): at for at, (kind, option) in enumerate(zip(self.kinds, choice, strict=True))}
        peaks = (
            (self.peak_of((*choice[:at], option, *choice[at + 1 :])), self.blocks[at].path)
            for at in alike.values()
            for option, time in enumerate(self.seconds[at])
            if time < self.seconds[at][choice[at]]
        )
        return min(peaks, default=None)

    def refuse(self, where: str, written: str, allowed: int) -> TooSmallError:
        """Return the error for a budget below the least peak: the peak, and its parts, the largest first."""
        phase, least = max(self.record.phases, key=lambda one: one.peak), self.peak_of(self.full)
        where_in = f"in the {phase.part} of {phase.path}"
        place = where_in if phase.part != BETWEEN else "outside of blocks, as in the head and the loss"
        parts = {
            "there when the step begins (parameters, gradients, optimizer state, inputs)": self.record.static,
            "state that the optimizer is going to make": self.extra,
            "made before and still held (inputs of blocks, logits, gradients)": phase.before - self.record.static,
            f"made {place}, where the peak is": phase.peak - phase.before,
        }
        shown = sorted(((size, text) for text, size in parts.items() if size > 0), reverse=True)
        found = f"{written} ({allowed} bytes) is below the least peak of a step of this model on these inputs: "
        found += "; ".join(f"{bytes_text(size)} {text}" for size, text in shown)
        fix = "give more, or make smaller what checkpointing cannot: shard parameters, chunk the loss, shrink the batch"
        error = TooSmallError(Problem(where, found, f"{least} bytes ({bytes_text(least)}) or more", fix=fix))
        error.least = least
        return error


def _hull(more: Sequence[int], times: Sequence[float]) -> Iterator[tuple[float, int]]:
    """Yield the options on the lower convex hull of bytes and seconds, after the first, with seconds per byte."""
    now = 0
    while faster := [option for option, time in enumerate(times) if time < times[now]]:
        rates = {one: (times[now] - times[one]) / max(1, more[one] - more[now]) for one in faster}
        rate, now = max(((rate, one) for one, rate in rates.items()), key=lambda one: (one[0], more[one[1]], -one[1]))
        yield rate, now


def _forward_bytes(profile: RegionProfile, option: Option) -> list[int]:
    """Return the most bytes by which a forward under ``option`` may exceed one under full recomputation, op by op.

    The last number is for the time after all ops. All that a policy saves is held until then, needed or not, and what
    is written to later once more.
    """
    held, copied = profile.needed, set[int]()
    if option.saved is not None:
        held = option.held.union(*map(profile.roots_of, option.saved))
        copied = {root for entry in profile.entries for root in entry.writes}
    ops = [entry for entry in profile.entries if entry.op]
    used = {root: number for number, entry in enumerate(ops) for root in profile.used_by(entry)}  # at last
    more = [0] * (len(ops) + 1)
    for root in held - profile.routed:
        more[0 if root in copied else used.get(root, -1) + 1] += profile.bytes[root]
    return [*accumulate(more)]


def _replay_bytes(profile: RegionProfile, option: Option, inputs: int) -> int:
    """Return the most bytes by which a backward under ``option`` may exceed one under full recomputation.

    ``inputs``: what the region holds besides results of its ops.
    """
    if option.saved is None:
        return 0
    held, needed = option.held, profile.needed
    # Until the replay begins, everything that it starts from is there, also what backward has read already.
    times = sorted((time, profile.roots[value]) for value, time in profile.needs if value in profile.maker)
    first_read = {root: time for time, root in times}
    begins, starts = profile.late_replay(option.saved)
    waits = {root for root in starts if first_read.get(root, -1) > begins}
    # While entries run again, results count until the last entry that reads them; what autograd saves, until the end.
    steps = [profile.used_by(profile.entries[number]) for number in option.entries]
    last = {root: step for step, roots in enumerate(steps) for root in roots}
    first = {root: step for step, roots in reversed([*enumerate(steps)]) for root in roots}
    changes = [0] * (len(steps) + 1)
    for root in last.keys() & profile.maker.keys() - held:
        changes[first[root]] += profile.bytes[root]
        if root not in needed:
            changes[last[root] + 1] -= profile.bytes[root]
    between = max(accumulate(changes)) - profile.bytes_of(needed - held)
    more = profile.bytes_of(held - needed | waits) + max(0, between)
    return more + (inputs if begins < max(first_read.values(), default=-1) else 0)


# -- What may be saved in a region


def options_of(profile: RegionProfile, shipped: Iterable[frozenset[int]], device: Device) -> tuple[Option, ...]:
    """Return the options of a region: full recomputation, then those that save more, then no checkpointing.

    Bytes ascend and seconds descend. ``shipped``: sets of entries that are options in any case.
    See Note [The search for save options].
    """
    times, flops = [seconds(one, device) for one in profile.entries], [one.flops for one in profile.entries]
    behind = [max(0.0, time - device.launch_s) for time in times]

    def priced(saved: frozenset[int]) -> Option:
        again, held = profile.recomputed(saved)
        behind_s = 0.0 if device.name == "cpu" else math.fsum((*behind, *map(behind.__getitem__, again)))
        host_s = max(0.0, _CALL_S + _RECORD_S * len(times) - behind_s)
        ops_s, again_flops = math.fsum(map(times.__getitem__, again)), sum(map(flops.__getitem__, again))
        return Option(saved, profile.bytes_of(held), again, held, ops_s + host_s, ops_s, again_flops)

    def changed(now: Option, number: int) -> Option:
        saved, roots = (now.saved or frozenset()) ^ {number}, profile.roots_of(number)
        counts = number in now.entries or roots & (now.held | profile.tape.writers.keys())  # else nothing reads it
        return priced(saved) if counts or profile.entries[number].is_collective else replace(now, saved=saved)

    full = now = priced(frozenset())
    seen: list[Option] = []
    for goal, sign in (frozenset(one.number for one in profile.candidates), 1), (frozenset[int](), -1):
        while now.saved != goal:
            tried = [changed(now, number) for number in sorted((now.saved or frozenset()) ^ goal)[::sign]]
            rates = [_rate(one, now) if sign > 0 else -_rate(now, one) for one in tried]
            now = tried[rates.index(max(rates))]
            seen = sorted([*seen, *tried], key=lambda one: (one.bytes, one.seconds, len(one.saved or ())))
            lows = accumulate((one.seconds for one in seen), min, initial=full.seconds)  # of those before
            seen = [one for one, low in zip(seen, lows, strict=False) if one.seconds < low or profile.tape.collectives]
    best: list[Option] = []  # without what is saved and not held, which may keep a collective from running again
    for one in seen:
        if one.seconds < (best[-1] if best else full).seconds:
            best.append(priced(frozenset(number for number in one.saved or () if profile.roots_of(number) & one.held)))
    chosen = dict.fromkeys([full, *best, *map(priced, shipped)])
    found = sorted(chosen, key=lambda one: (one is not full, one.bytes, -one.seconds))
    if not profile.reason:
        found.append(Option(None, profile.bytes_of(profile.needed | profile.routed)))
    return tuple(found)


def _rate(more: Option, less: Option) -> float:
    """Return the seconds per byte that an option spares that saves more; less than zero if nothing changes."""
    spared, size = less.ops_s - more.ops_s, more.bytes - less.bytes
    return spared / size if size > 0 else math.inf if spared > 0 else -1.0
