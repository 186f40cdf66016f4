"""External memory that a region wrote to, and generators passed to it: restored to their state before the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sac.region.rng import default_generator, put_back, state_of, states_of
from sac.region.undo import UndoStack
from sac.tensors import copy_of, version_watch
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


# Storage address -> the copy of the storage from the start of the forward, if there is one.
AtStart = Callable[[int], torch.UntypedStorage | None]


def no_copy(address: int) -> torch.UntypedStorage | None:
    """Return that there is no copy."""
    return None


class WriteGuard(dict[int, StorageSnapshot]):
    """What a region changes outside of itself, as it was before: storages, by address, and generators passed to it."""

    __slots__ = ("at_start", "generators")

    def __init__(self) -> None:
        super().__init__()
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.at_start: AtStart = no_copy

    def before_write(self, address: int, tensor: torch.Tensor) -> None:
        """Keep a copy of the storage of a strided ``tensor``, which is about to be written to, unless there is one.

        A copy from the start of the forward takes precedence: something that is not an op (NumPy) may have written
        since.
        """
        if address in self:
            return
        self.forget_freed()
        storage, before = tensor.untyped_storage(), self.at_start(address)
        reference: Any = storage._weak_ref()
        if before is None or before.nbytes() != storage.nbytes():
            before = copy_of(storage)
        self[address] = StorageSnapshot(reference, before, version_watch(tensor))

    def before_draw(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
        """Keep the states of the generators among the arguments of an op, from which it is about to draw."""
        for generator in (*args, *kwargs.values()):
            if not isinstance(generator, torch.Generator):
                continue
            usual = default_generator(generator.device)
            if usual is not None and usual._cdata == generator._cdata:  # type: ignore[attr-defined]
                continue  # the frame's snapshot holds it
            if generator._cdata not in self.generators:  # type: ignore[attr-defined]
                self.generators[generator._cdata] = generator, state_of(generator)  # type: ignore[attr-defined]

    def drop(self) -> None:
        """Release everything."""
        self.clear()
        self.generators.clear()
        self.at_start = no_copy

    def forget_freed(self) -> None:
        """Drop the copies of freed storages; see Note [Memory of a compiled function]."""
        for address in [address for address, image in self.items() if image.storage is None]:
            del self[address]

    def enter_on(self, stack: UndoStack, also: Iterable[torch.Generator] = ()) -> None:
        """Restore the state before the forward; restore the current one when ``stack`` is left.

        ``also``: other generators that will advance.
        """
        noted = list(self.generators.values())
        moved = {id(generator): generator for generator in (*(generator for generator, _ in noted), *also)}
        stack.callback(put_back, states_of(moved.values()))
        for one in self.values():
            held = one.storage
            if held is not None and held.nbytes() == one.copy.nbytes():
                if set_version_counters is not None:
                    stack.callback(set_version_counters, (one.watch,), (one.watch._version,))
                stack.overwrite(held, one.copy)
        put_back(noted)
