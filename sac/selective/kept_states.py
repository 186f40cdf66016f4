"""What a saved module did beside returning something: to generators and Python state; repeated where it is not run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sac.region.detach import equal
from sac.region.settings import Settings
from sac.region.states.host_rng import HostRandomState
from sac.region.states.reachable import ReachableState
from sac.region.states.rng import RngSnapshot, generators_now
from sac.region.states.rng_trackers import put_back, state_of, states_of


def generators_at(settings: Settings) -> list[torch.Generator]:
    """Return the generators that a module of the region may draw from, as far as the region puts them back."""
    return generators_now(settings) if settings.preserve_rng_state else []


class KeptStates:
    """Made before ``modules`` run, and closed after that: then it holds what has changed of what they can reach.

    That is the states of generators, and Python state (Note [Python state]). Of trackers and of the user's state
    providers nobody can tell what has changed: they are put back always.
    """

    __slots__ = ("_before", "_host_rng", "_moved", "_provided", "_reachable", "_settings", "_trackers")

    def __init__(self, modules: Sequence[nn.Module], generators: list[torch.Generator], settings: Settings) -> None:
        self._settings = settings
        self._reachable = reachable = ReachableState(modules)
        self._host_rng: HostRandomState | None = None
        if settings.preserve_rng_state:
            generators = [*generators, *reachable.generators]
            self._host_rng = HostRandomState(reachable.others)
        self._before = states_of(generators)

    def close(self) -> None:
        """The module has run."""
        settings = self._settings
        self._moved = [(one, now) for one, was in self._before if not equal(now := state_of(one), was)]
        self._before = []
        self._reachable.keep_changes()
        if self._host_rng is not None:
            self._host_rng = self._host_rng.again() if self._host_rng.has_moved() else None
        trackers = settings.trackers and settings.preserve_rng_state
        self._trackers = RngSnapshot((), settings) if trackers else None
        self._provided = [(provider, provider.snapshot()) for provider in settings.providers]

    def put_back(self) -> None:
        """Let all stand where it stood after the module."""
        if self._trackers is not None:
            self._trackers.put_back()
        put_back(self._moved)
        if self._host_rng is not None:
            self._host_rng.put_back()
        self._reachable.put_back()
        for provider, state in self._provided:
            provider.restore(state)
