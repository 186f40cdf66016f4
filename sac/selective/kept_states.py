"""What a saved module left behind beside its result, put back where it is not run: random states and Python state."""

from __future__ import annotations

import torch
from torch import nn

from sac.region.detach import equal
from sac.region.settings import Settings
from sac.region.states.bindings import owners_of
from sac.region.states.host_rng import HostRandomState
from sac.region.states.reachable import ReachableState
from sac.region.states.rng import RngSnapshot, generators_now
from sac.region.states.rng_trackers import put_back, state_of, states_of


def generators_at(settings: Settings) -> list[torch.Generator]:
    """Return the generators that a module of the region may draw from, as far as the region puts them back."""
    return generators_now(settings) if settings.preserve_rng_state else []


class KeptStates:
    """Made before ``module`` runs, and closed after it: then it holds the states of the generators that have moved.

    And what the module has made of the Python state that it can reach, its attributes foremost: the region's
    recomputation begins with what was there before (Note [Python state]). Of trackers and of the user's state providers
    nobody can tell what has changed: they are put back always.
    """

    __slots__ = (
        *("_before", "_changed", "_host", "_moved", "_moved_host"),
        *("_provided", "_reachable", "_settings", "_trackers"),
    )

    def __init__(self, module: nn.Module, generators: list[torch.Generator], settings: Settings) -> None:
        self._settings = settings
        reachable = ReachableState(owners_of(module))
        puts_back = settings.preserve_rng_state
        self._before = states_of([*generators, *reachable.generators] if puts_back else generators)
        self._host = HostRandomState(reachable.others) if puts_back else None
        self._reachable: ReachableState | None = reachable

    def close(self) -> None:
        """The module has run."""
        settings = self._settings
        self._moved = [(one, now) for one, was in self._before if not equal(now := state_of(one), was)]
        self._before = []
        self._changed = self._reachable.changed() if self._reachable is not None else []
        self._moved_host = self._host.moved() if self._host is not None else []
        self._reachable = self._host = None
        trackers = settings.trackers and settings.preserve_rng_state
        self._trackers = RngSnapshot((), settings) if trackers else None
        self._provided = [(provider, provider.snapshot()) for provider in settings.providers]

    def put_back(self) -> None:
        """Let all stand where it stood after the module."""
        if self._trackers is not None:
            self._trackers.put_back()
        put_back(self._moved)
        for write, state in self._moved_host:
            write(state)
        for place in self._changed:
            place.put_back()
        for provider, state in self._provided:
            provider.restore(state)
