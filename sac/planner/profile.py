"""Profiles of region groups: their ops, the values that these read and make, and the values that backward needs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from sac.recompute.schedule import ReplaySchedule, Wanted, schedule_replay

# Note [Profiles]
#
# A profile is the tape of one region (Note [The tape]) without tensors. It has numbered values; each is made by one
# entry, or by none (a leaf: an input or a parameter). Values are located in storages; a storage is identified by its
# first value, the root. A *save option* is the set of entries whose results are saved. `schedule_replay`, which the
# replay engine itself uses, computes its cost: the entries that run again, and the values that are held because replay
# starts from them. All results of an entry that must be saved are held in any case, because rerun serves them if replay
# falls back to it.


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a region's tape.

    ``module``, ``op`` and ``call`` identify it in a policy; ``op`` is empty for an alias that was created without a
    visible op. ``reads`` and ``makes`` are values, ``writes`` the roots that it writes in place, ``after`` the entries
    that have to draw random numbers before it if it runs again. ``moved_bytes`` is the size of the storages that it
    reads and makes, a lower bound of what its kernel moves.
    """

    number: int
    module: str
    op: str
    call: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    savable: bool = False  # a policy may save it, and saving it would hold memory
    must_save: bool = False  # saved whatever the policy says
    is_collective: bool = False
    is_view: bool = False
    is_causal: bool = False  # attention whose kernel skips the keys after each query
    flops: int = 0
    moved_bytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Need:
    """A value that backward reads, as it is before entry number ``time``."""

    value: int
    time: int


@dataclass(frozen=True, slots=True)
class Recompute:
    """The cost of a save option: entries that run again, in order, and values that are held, with their bytes."""

    entries: tuple[int, ...]
    held: tuple[int, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class RegionProfile:
    """The profile of a region group, see Note [Profiles]. ``roots`` and ``bytes`` (of the storage) are per value.

    ``paths`` are the regions of the group, in forward order, and ``layers`` their positions in the stack ``stack``.
    """

    name: str
    paths: tuple[str, ...]
    layers: tuple[int, ...]
    entries: tuple[Entry, ...]
    roots: tuple[int, ...]
    bytes: tuple[int, ...]
    needs: tuple[Need, ...]
    signature: str = ""
    stack: str = ""
    stack_size: int = 0
    maker: dict[int, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "maker", {value: e.number for e in self.entries for value in e.makes})

    @property
    def candidates(self) -> tuple[Entry, ...]:
        """The entries that a policy may choose to save."""
        return tuple(entry for entry in self.entries if entry.savable and not entry.must_save)

    @property
    def routed(self) -> tuple[int, ...]:
        """The values that are held in any case: all results of entries that must be saved."""
        return tuple(value for entry in self.entries if entry.must_save for value in entry.makes)

    def replayed(self, saved: Collection[int]) -> Recompute:
        """Return what the replay engine runs again and holds if exactly the entries ``saved`` are saved."""
        schedule = self._schedule(self._kept(saved), self.needs)
        held = sorted({*schedule.kept, *self.routed})
        storages = {self.roots[value]: self.bytes[value] for value in held}
        return Recompute(tuple(step.number for step in schedule.steps), tuple(held), sum(storages.values()))

    def late_replay(self, saved: Collection[int]) -> tuple[int, tuple[int, ...]]:
        """Return when the replay begins if exactly the entries ``saved`` are saved, and the values it starts from.

        Backward, which reads the needs from the last to the first, begins it at a need that is in no saved storage:
        that of the first result, or -1 if there is none.
        """
        kept = self._kept(saved)
        roots = {self.roots[value] for value in kept}
        missing = [need for need in self.needs if need.value in self.maker and self.roots[need.value] not in roots]
        return max((need.time for need in missing), default=-1), tuple(self._schedule(kept, missing).kept)

    def _kept(self, saved: Collection[int]) -> set[int]:
        chosen = {*saved, *(entry.number for entry in self.entries if entry.must_save)}
        return {value for number in chosen for value in self.entries[number].makes}

    def _schedule(self, kept: Collection[int], needs: Sequence[Need]) -> ReplaySchedule:
        tape = SimpleNamespace(
            roots=self.roots,
            kept=kept,
            leaves={value for value in range(len(self.roots)) if value not in self.maker},
            writes={entry.number: entry.writes for entry in self.entries if entry.writes},
            sites=self.entries,
            reads=[entry.reads for entry in self.entries],
            first_outputs=[entry.makes[0] if entry.makes else len(self.roots) for entry in self.entries],
            output_counts={entry.number: len(entry.makes) for entry in self.entries if len(entry.makes) != 1},
            draws_after={entry.number: entry.after for entry in self.entries if entry.after},
        )
        wanted = [Wanted(handle, need.value, need.time) for handle, need in enumerate(needs)]
        return schedule_replay(tape, wanted)  # type: ignore[arg-type]
