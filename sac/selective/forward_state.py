"""What a region wrote to from outside, and generators it was given, as they were before it: put back for a while."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sac.region.detach import copy_of, overwrite
from sac.region.states.rng import default_generator
from sac.region.states.rng_trackers import state_of, states_of

Images = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]
Generators = dict[int, tuple[torch.Generator, torch.Tensor]]


def note_generator(generators: Generators, generator: torch.Generator) -> None:
    """An op is about to draw from ``generator``, which the caller passed: remember where it stood."""
    usual = default_generator(generator.device)
    if usual is not None and usual._cdata == generator._cdata:  # type: ignore[attr-defined]
        return  # the frame's snapshot holds it
    if generator._cdata not in generators:  # type: ignore[attr-defined]
        generators[generator._cdata] = generator, state_of(generator)  # type: ignore[attr-defined]


class ForwardState:
    """``images``: storages with copies made before the first write to them. ``also``: generators that will move."""

    def __init__(self, images: Images, generators: Generators, also: Iterable[torch.Generator] = ()) -> None:
        self._images = [pair for pair in images.values() if pair[0].nbytes() == pair[1].nbytes()]
        self._generators = list(generators.values())
        self._also = list(also)

    def put_back(self) -> None:
        """Let all be as before the forward."""
        self._present = [(storage, copy_of(storage)) for storage, _ in self._images]
        moved = {id(generator): generator for generator, _ in self._generators}
        moved |= {id(generator): generator for generator in self._also}
        self._present_generators = states_of(moved.values())
        for storage, image in self._images:
            overwrite(storage, image)
        for generator, state in self._generators:
            generator.set_state(state)

    def undo(self) -> None:
        """Let all be as before ``put_back``."""
        for storage, image in self._present:
            overwrite(storage, image)
        for generator, state in self._present_generators:
            generator.set_state(state)
