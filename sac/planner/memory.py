"""Predict the peak of a whole step under any choice of save options per layer, from steps that were run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from sac.errors import PlanError, Problem
from sac.planner.layers import MemoryConstraint, peak
from sac.planner.step import BETWEEN, FORWARD, StepRecord

# Note [The peak of a step]
#
# A step is divided into phases at the borders of its regions (`StepPhase` in step.py). The live bytes at a moment are
# the bytes that no policy changes, plus the bytes that each region whose forward is over and whose backward is not has
# left behind (`held`). During a region's own forward or backward, its save option also changes the peak (`own`). So for
# the choices c
#
#     peak = max over phases w of  base_w + sum of held_p(c_p) over the regions p before w + own_w(c_w)
#
# (cf. Beaumont et al. 2019 on chains of layers). Running a step measures `base` of each of its phases, and `held` and
# `own` of each (group, choice) that occurs in it. So one run of a model with many layers measures as many choices.
# Choices that are not measured yet are estimated from below, so a plan that uses them is run before it is accepted.
#
# A region leaves its result behind for the next region, which may hold it as its input. Without checkpointing, possibly
# nothing holds it, and it is freed after the region, when the caller releases it. So bytes that are freed between two
# regions, beyond those freed there under other choices, are attributed to the first region (`late`).
#
# In a sharded model, the first region's forward also frees the memory into which the parameters outside of all regions
# were gathered. This would look as if its choice held less. So the first region is not measured there (`gathers`), if
# others of its group are: what it frees is then a part of `base`.

Choice = tuple[int, int]  # region group, and index of one of its choices


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment of one constraint: a part of the step, and the position of its region."""

    part: str
    position: int
    path: str  # of the region; empty between two of them
    in_backward: bool


@dataclass(slots=True)
class StepModel:
    """See Note [The peak of a step]. ``groups``: the region group at each position."""

    groups: tuple[int, ...]
    bytes: Sequence[Sequence[int]]  # bytes held per group and choice, as priced by the profile
    paths: tuple[str, ...] = ()
    static: int = 0
    extra: int = 0  # bytes in addition to the step: state of the optimizer
    gathers: bool = False  # parameters are gathered from other ranks
    moments: list[Moment] = field(default_factory=list)
    bases: list[int] = field(default_factory=list)
    held: dict[Choice, int] = field(default_factory=dict)
    late: dict[Choice, int] = field(default_factory=dict)  # to be added to `held`: 0 or below
    gaps: dict[int, dict[int, int]] = field(default_factory=dict)  # after a position: choice there -> bytes
    own: dict[tuple[int, int, bool], int] = field(default_factory=dict)  # group, choice, in backward

    @property
    def unmeasured(self) -> int | None:
        """The position whose measurements do not hold for others of its group, if there is one."""
        return 0 if self.gathers and self.groups.count(self.groups[0]) > 1 else None

    def learn(self, record: StepRecord, choices: Sequence[int]) -> None:
        """Add the measurements of a step that was run with ``choices``, one per position.

        Raises ``PlanError`` if it did not call the same blocks as earlier steps.
        """
        self._refuse_other_calls(record)
        forwards = {phase.position: phase for phase in record.phases if phase.part == FORWARD}
        for index, choice in enumerate(choices):
            key = self.groups[index], choice
            count = forwards[index].after - forwards[index].before
            if index != self.unmeasured:
                self.held[key] = max(count, self.held.get(key, 0))
            if index + 1 in forwards:
                self.gaps.setdefault(index, {})[choice] = forwards[index + 1].before - forwards[index].after
        for index, gaps in self.gaps.items():
            for choice, count in gaps.items():
                key = self.groups[index], choice
                self.late[key] = min(count - max(gaps.values()), self.late.get(key, 0))
        held = [self._held(group, choice) for group, choice in zip(self.groups, choices, strict=True)]
        moments: list[Moment] = []
        bases: list[int] = []
        firsts: list[tuple[int, int, tuple[int, int, bool]]] = []
        in_backward = False
        for phase in record.phases:
            index = phase.position
            in_backward = in_backward or (phase.part == BETWEEN and index == len(held) and bool(moments))
            before = sum(held[:index])
            if phase.part == BETWEEN:
                moments.append(Moment(BETWEEN, index, "", in_backward))
                bases.append(phase.peak - before)
                continue
            own = phase.peak - phase.before + (held[index] if in_backward else 0)
            place = self.groups[index], choices[index], in_backward
            moments.append(Moment(phase.part, index, record.paths[index], in_backward))
            if index == self.unmeasured:
                firsts.append((len(bases), phase.peak - before, place))
            else:
                self.own[place] = max(own, self.own.get(place, 0))
            bases.append(phase.before - before - (held[index] if in_backward else 0))
        for number, peak_without, place in firsts:
            bases[number] = peak_without - self._own(*place)
        if self.moments == moments:
            bases = [max(pair) for pair in zip(bases, self.bases, strict=True)]
        self.moments, self.bases = moments, bases
        self.paths, self.static = record.paths, record.static

    def _refuse_other_calls(self, record: StepRecord) -> None:
        calls = zip_longest(self.paths or record.paths, record.paths, fillvalue="no block")
        for number, (before, now) in enumerate(calls, start=1):
            if before != now:
                found = f"call {number} is of {before} in one step and of {now} in another"
                fix = "turn off what leaves layers out at random (layerdrop, stochastic depth) while the plan is made"
                raise PlanError(Problem("blocks", found, fix=fix))

    def peak(self, choices: Sequence[int]) -> tuple[int, int]:
        """Return the predicted peak under ``choices``, one per position, and the number of its constraint."""
        held = [self.held_by(group) for group in self.groups]
        return peak(self.constraints(), held, choices)

    def peak_of(self, record: StepRecord) -> int:
        """Return the peak of a step that was run, plus optimizer state."""
        return record.peak + self.extra

    def held_by(self, group: int) -> tuple[int, ...]:
        """Return the bytes that a region of this group leaves behind per choice: measured, otherwise estimated."""
        return tuple(self._held(group, choice) for choice in range(len(self.bytes[group])))

    def _held(self, group: int, choice: int) -> int:
        if (group, choice) in self.held:
            return self.held[group, choice] + self.late.get((group, choice), 0)
        beyond = [count - self.bytes[group][one] for (of, one), count in self.held.items() if of == group]
        return min(beyond, default=0) + self.bytes[group][choice]

    def _own(self, group: int, choice: int, in_backward: bool) -> int:
        if (group, choice, in_backward) in self.own:
            return self.own[group, choice, in_backward]
        known = (own for (of, _, back), own in self.own.items() if of == group and back == in_backward)
        return min(known, default=0)

    def constraints(self) -> tuple[MemoryConstraint, ...]:
        """Return the memory constraints, in the order of the step."""
        own = {
            (group, back): tuple(self._own(group, choice, back) for choice in range(len(self.bytes[group])))
            for group in {*self.groups}
            for back in (False, True)
        }
        return tuple(
            MemoryConstraint(
                base + self.extra,
                moment.position,
                None if moment.part == BETWEEN else own[self.groups[moment.position], moment.in_backward],
            )
            for moment, base in zip(self.moments, self.bases, strict=True)
        )
