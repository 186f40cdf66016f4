"""Where random generators stood before the ops of a tape that drew from them, so that these can draw the same again."""

from __future__ import annotations

import torch

from sac.region.detach import equal
from sac.region.states.rng import RngSnapshot
from sac.region.states.rng_trackers import States, state_of, states_of
from sac.selective.tape import Tape

# A state of the CPU's generator is five kilobytes. It need not be held for an op that finds the generator where another
# one has left it, if that one runs again too, nor where it stood so at the start of the region: the frame holds that.


class Draws:
    """Takes note of the draws of one region call, for its tape."""

    __slots__ = ("_before", "_last", "_previous", "_tape")

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._before: States = []  # as generators stood before the op that runs now
        # Of each generator that has been drawn from: itself, the entry that did so last (-1: none yet), what that left.
        self._last: dict[int, tuple[torch.Generator, int, torch.Tensor]] = {}
        self._previous: dict[int, tuple[int, ...]] = {}  # entry -> which one left each of its states; -1: none

    def begin(self, snapshot: RngSnapshot | None) -> None:
        """The region starts; ``snapshot`` is held until its backward."""
        if snapshot is not None:
            self._last = {id(generator): (generator, -1, state) for generator, state in snapshot.states}

    def before(self, generators: list[torch.Generator]) -> None:
        """An op is about to run that may draw from ``generators``."""
        self._before = states_of(generators)

    def have_moved(self) -> bool:
        """Whether the op has moved one of its generators."""
        return any(not equal(generator.get_state(), state) for generator, state in self._before)

    def after(self, entry: int, *, runs_again: bool) -> None:
        """The op of ``entry`` has run: note what it moved, and how to do so once more if it ``runs_again``."""
        before, self._before = self._before, []
        found: States = []
        previous = []
        for generator, state in before:
            now = state_of(generator)
            if equal(now, state):
                continue
            _, last, left = self._last.get(id(generator), (None, -1, None))
            if left is not None and equal(left, state):
                found.append((generator, left))
                previous.append(last)
            else:
                found.append((generator, state))
                previous.append(-1)
            self._last[id(generator)] = generator, entry, now
        if runs_again and found:
            self._tape.states[entry] = found
            self._previous[entry] = tuple(previous)

    def close(self, running: set[int]) -> None:
        """The forward is over, and the entries ``running`` are to run again: hold the states that they need."""
        tape, every = self._tape, self._tape.states
        tape.states = {}
        for entry, states in every.items():
            if entry not in running:
                continue
            previous = self._previous[entry]
            follows = tuple(one for one in previous if one in running and one in every)
            if follows:
                tape.draws_after[entry] = follows
            if held := [state for state, one in zip(states, previous, strict=True) if one not in follows]:
                tape.states[entry] = held
        self.drop()

    def drop(self) -> None:
        """Hold nothing any more."""
        self._last, self._previous, self._before = {}, {}, []
