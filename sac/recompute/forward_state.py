"""What a region wrote to from outside, and generators it was given, as they were before it: put back for a while."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sac.region.rng import default_generator, state_of, states_of
from sac.tensors import copy_of, overwrite, version_watch
from sac.torch_private import set_version_counters

# Note [Memory of a compiled function]
#
# A kernel that a compiled function calls through torch (inductor's matrix products) writes to memory that the function
# has allocated itself, unseen by any mode. To a recorder this looks like a write to a tensor from outside, and it makes
# an image. When the forward is over nothing holds that memory any more, so nobody can read it again, and the image is
# useless. So an image holds its storage weakly, and is forgotten with it: otherwise a region in mode `full` would hold
# twice what a compiled function inside it has computed. The weak reference keeps the storage's address from being
# given to another one. Held by tests/stacks/test_compiled_parts_stay_compiled.py.


@dataclass(frozen=True, slots=True)
class StorageSnapshot:
    """What lay in a storage before the region wrote to it. ``watch`` shares the version counter of what lies there.

    ``reference``: a weak one to the storage, which the image frees.
    """

    reference: int
    copy: torch.UntypedStorage
    watch: torch.Tensor

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.reference)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage, None if nobody holds it any more."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference)
        return found


StorageSnapshots = dict[int, StorageSnapshot]
Generators = dict[int, tuple[torch.Generator, torch.Tensor]]


def snapshot_of(tensor: torch.Tensor) -> StorageSnapshot:
    """Return an image of the storage of a strided tensor that is about to be written to."""
    storage = tensor.untyped_storage()
    reference: Any = storage._weak_ref()
    return StorageSnapshot(reference, copy_of(storage), version_watch(tensor))


def forget_freed(snapshots: StorageSnapshots) -> None:
    """Drop the images of storages that nobody holds any more; see Note [Memory of a compiled function]."""
    for address in [address for address, image in snapshots.items() if image.storage is None]:
        del snapshots[address]


def note_generator(generators: Generators, generator: torch.Generator) -> None:
    """An op is about to draw from ``generator``, which the caller passed: remember where it stood."""
    usual = default_generator(generator.device)
    if usual is not None and usual._cdata == generator._cdata:  # type: ignore[attr-defined]
        return  # the frame's snapshot holds it
    if generator._cdata not in generators:  # type: ignore[attr-defined]
        generators[generator._cdata] = generator, state_of(generator)  # type: ignore[attr-defined]


class PreForwardState:
    """``images``: storages with copies made before the first write to them. ``also``: generators that will move."""

    def __init__(
        self, snapshots: StorageSnapshots, generators: Generators, also: Iterable[torch.Generator] = ()
    ) -> None:
        alive = ((one, one.storage) for one in snapshots.values())
        self._snapshots = [
            (one, held) for one, held in alive if held is not None and held.nbytes() == one.copy.nbytes()
        ]
        self._generators = list(generators.values())
        self._also = list(also)

    def put_back(self) -> None:
        """Let all be as before the forward."""
        self._present = [(one, held, copy_of(held), one.watch._version) for one, held in self._snapshots]
        moved = {id(generator): generator for generator, _ in self._generators}
        moved |= {id(generator): generator for generator in self._also}
        self._present_generators = states_of(moved.values())
        for one, held in self._snapshots:
            overwrite(held, one.copy)
        for generator, state in self._generators:
            generator.set_state(state)

    def undo(self) -> None:
        """Let all be as before ``put_back``."""
        for one, held, present, version in self._present:
            overwrite(held, present)
            if set_version_counters is not None:
                set_version_counters((one.watch,), (version,))
        for generator, state in self._present_generators:
            generator.set_state(state)
