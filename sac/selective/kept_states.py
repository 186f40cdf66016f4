"""Where random generators and the user's own state stood after a saved module, put back where it is not run again."""

from __future__ import annotations

import torch

from sac.region.detach import equal
from sac.region.settings import Settings
from sac.region.states.rng import RngSnapshot, generators_now
from sac.region.states.rng_trackers import put_back, state_of, states_of


def generators_at(settings: Settings) -> list[torch.Generator]:
    """Return the generators that a module of the region may draw from, as far as the region puts them back."""
    return generators_now(settings) if settings.preserve_rng_state else []


class KeptStates:
    """Made before a module runs, and closed after it: then it holds the states of the generators that have moved.

    Of trackers and of the user's state providers nobody can tell what has changed: they are put back always.
    """

    __slots__ = ("_before", "_moved", "_provided", "_settings", "_trackers")

    def __init__(self, generators: list[torch.Generator], settings: Settings) -> None:
        self._settings = settings
        self._before = states_of(generators)

    def close(self) -> None:
        """The module has run."""
        settings = self._settings
        self._moved = [(one, now) for one, was in self._before if not equal(now := state_of(one), was)]
        self._before = []
        trackers = settings.trackers and settings.preserve_rng_state
        self._trackers = RngSnapshot((), settings) if trackers else None
        self._provided = [(provider, provider.snapshot()) for provider in settings.providers]

    def put_back(self) -> None:
        """Let all stand where it stood after the module."""
        if self._trackers is not None:
            self._trackers.put_back()
        put_back(self._moved)
        for provider, state in self._provided:
            provider.restore(state)
