"""External memory that a region wrote to, and generators passed to it: restored to their state before the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from sac.region.rng import default_generator, state_of, states_of
from sac.tensors import copy_of, overwrite, version_watch
from sac.torch_private import set_version_counters

# Note [Memory of a compiled function]
#
# A kernel that a compiled function calls through torch (inductor's matrix products) writes to memory that the function
# has allocated itself, unseen by any mode. To a recorder this looks like a write to an external tensor, so it takes a
# snapshot. After the forward nothing holds that memory, so it cannot be read again, and the snapshot is useless. So a
# snapshot holds its storage weakly and is dropped with it: otherwise a region in mode `full` would hold twice what a
# compiled function inside it has computed. While the weak reference exists, the storage's address is not given to
# another storage. Tested by tests/stacks/test_compiled_parts_stay_compiled.py.


@dataclass(frozen=True, slots=True)
class StorageSnapshot:
    """The data of a storage before the region wrote to it. ``watch`` shares the version counter of its tensor.

    ``reference``: a weak reference to the storage, released by the snapshot.
    """

    reference: int
    copy: torch.UntypedStorage
    watch: torch.Tensor

    def __del__(self) -> None:
        torch.UntypedStorage._free_weak_ref(self.reference)

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage, or None if it was freed."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self.reference)
        return found


Generators = dict[int, tuple[torch.Generator, torch.Tensor]]

# Storage address -> the copy of the storage from the start of the forward, if there is one.
AtStart = Callable[[int], torch.UntypedStorage | None]


def no_copy(address: int) -> torch.UntypedStorage | None:
    """Return that there is no copy."""
    return None


class WriteGuard(dict[int, StorageSnapshot]):
    """Copies of external storages from before the region's first write to each, by storage address."""

    def before_write(self, address: int, tensor: torch.Tensor, at_start: AtStart) -> None:
        """Keep a copy of the storage of a strided ``tensor``, which is about to be written to, unless there is one.

        A copy from the start of the forward takes precedence: something that is not an op (NumPy) may have written
        since.
        """
        if address in self:
            return
        self.forget_freed()
        storage, before = tensor.untyped_storage(), at_start(address)
        reference: Any = storage._weak_ref()
        if before is None or before.nbytes() != storage.nbytes():
            before = copy_of(storage)
        self[address] = StorageSnapshot(reference, before, version_watch(tensor))

    def forget_freed(self) -> None:
        """Drop the copies of freed storages; see Note [Memory of a compiled function]."""
        for address in [address for address, image in self.items() if image.storage is None]:
            del self[address]


def note_generator(generators: Generators, generator: torch.Generator) -> None:
    """Record the state of ``generator``, which the caller passed and from which an op is about to draw."""
    usual = default_generator(generator.device)
    if usual is not None and usual._cdata == generator._cdata:  # type: ignore[attr-defined]
        return  # the frame's snapshot holds it
    if generator._cdata not in generators:  # type: ignore[attr-defined]
        generators[generator._cdata] = generator, state_of(generator)  # type: ignore[attr-defined]


class PreForwardState:
    """Restores the state before the forward, and undoes that later.

    ``snapshots``: storages with copies from before the first write. ``also``: other generators that will advance.
    """

    def __init__(self, snapshots: WriteGuard, generators: Generators, also: Iterable[torch.Generator] = ()) -> None:
        alive = ((one, one.storage) for one in snapshots.values())
        self._snapshots = [
            (one, held) for one, held in alive if held is not None and held.nbytes() == one.copy.nbytes()
        ]
        self._generators = list(generators.values())
        self._also = list(also)

    def put_back(self) -> None:
        """Restore the state before the forward."""
        self._present = [(one, held, copy_of(held), one.watch._version) for one, held in self._snapshots]
        moved = {id(generator): generator for generator, _ in self._generators}
        moved |= {id(generator): generator for generator in self._also}
        self._present_generators = states_of(moved.values())
        for one, held in self._snapshots:
            overwrite(held, one.copy)
        for generator, state in self._generators:
            generator.set_state(state)

    def undo(self) -> None:
        """Restore the state before ``put_back``."""
        for one, held, present, version in self._present:
            overwrite(held, present)
            if set_version_counters is not None:
                set_version_counters((one.watch,), (version,))
        for generator, state in self._present_generators:
            generator.set_state(state)
