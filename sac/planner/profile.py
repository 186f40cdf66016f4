"""Profiles of regions: their ops, the values that these read and make, and the values that backward needs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from sac.engine.schedule import schedule_replay
from sac.engine.tape import Tape
from sac.stores import transfers
from sac.stores.transfers import pinned_bytes

# Note [Profiles]
#
# A profile is the tape of a region (`sac/engine/tape.py`) without tensors. It has numbered values; each is made by one
# entry, or by none (a leaf: an input or a parameter). Values are located in storages; a storage is identified by its
# first value, the root. A *save option* is the set of entries whose results are saved. `schedule_replay`, which the
# engine itself uses, computes its cost: the entries that run again, and the values that are held because replay
# starts from them. All results of an entry that must be saved are held in any case.


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a region's tape.

    ``module``, ``op`` and ``call`` identify it in a policy; ``op`` is empty for an alias that was created without a
    visible op. ``reads`` and ``makes`` are values, ``writes`` the roots that it writes in place. ``moved_bytes`` is the
    size of the storages that it reads and makes, a lower bound of what its kernel moves.
    """

    number: int = 0
    module: str = ""
    op: str = ""
    call: int = 0
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    savable: bool = False  # a policy may save it, and saving it would hold memory
    must_save: bool = False  # saved whatever the policy says
    is_collective: bool = False
    is_view: bool = False
    flops: int = 0
    moved_bytes: int = 0
    is_causal: bool = False  # attention whose kernel skips the keys after each query
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Option:
    """Entries that a region saves in addition to those that must be, or None for no checkpointing.

    ``bytes`` are then held; ``seconds`` and ``flops`` are recomputed, with the time that checkpointing itself takes.
    """

    saved: frozenset[int] | None
    bytes: int
    entries: tuple[int, ...] = ()  # that run again, in order
    held: frozenset[int] = frozenset()  # storages
    seconds: float = 0.0
    ops_s: float = 0.0  # of ``seconds``, the ops
    flops: int = 0
    sent: frozenset[int] = frozenset()  # of ``saved``, those whose results wait on the host


def _tape_of(entries: Sequence[Entry], roots: Sequence[int], maker: Mapping[int, int]) -> Tape:
    """Return a tape without tensors that has all that a schedule depends on."""
    tape = Tape(None, ())  # type: ignore[arg-type]
    tape.sites, tape.roots = [*entries], [*roots]
    tape.reads = [[*entry.reads] for entry in entries]
    tape.firsts = [min(entry.makes, default=0) for entry in entries]
    tape.counts = {entry.number: len(entry.makes) for entry in entries}
    tape.makers = [maker.get(value, -1) for value in range(len(roots))]
    for entry in entries:
        for root in entry.writes:
            tape.writers.setdefault(root, []).append(entry.number)
    tape.collectives = [entry.number for entry in entries if entry.is_collective]
    tape.waits = {entry.number for entry in entries if entry.is_collective and entry.is_view}
    tape.before = dict.fromkeys(range(len(roots)), (torch.empty(0), None))  # each leaf has a copy
    return tape


@dataclass(frozen=True, slots=True)
class RegionProfile:
    """The profile of a region, see Note [Profiles]. ``roots`` and ``bytes`` (of the storage) are per value.
    ``needs``: the values that backward reads, each as it is before the entry of a number.

    ``reason``: why the region cannot be planned op by op; it has no entries then.
    """

    entries: tuple[Entry, ...] = ()
    roots: tuple[int, ...] = ()
    bytes: tuple[int, ...] = ()
    needs: tuple[tuple[int, int], ...] = ()
    reason: str = ""
    maker: dict[int, int] = field(init=False, compare=False, repr=False)
    tape: Tape = field(init=False, compare=False, repr=False)
    needed: frozenset[int] = field(init=False, compare=False, repr=False)  # storages: autograd saves, the region makes
    routed: frozenset[int] = field(init=False, compare=False, repr=False)  # held in any case: of what must be saved
    reads: list[list[int]] = field(init=False, compare=False, repr=False)  # of each entry: values, inverted writers

    def __post_init__(self) -> None:
        maker = {value: entry.number for entry in self.entries for value in entry.makes}
        routed = (self.roots[value] for entry in self.entries if entry.must_save for value in entry.makes)
        object.__setattr__(self, "maker", maker)
        object.__setattr__(self, "tape", _tape_of(self.entries, self.roots, maker))
        object.__setattr__(self, "needed", frozenset(self.roots[value] for value, _ in self.needs if value in maker))
        object.__setattr__(self, "routed", frozenset(routed))
        reads = ([(value, entry.number) for value in entry.reads] for entry in self.entries)
        object.__setattr__(self, "reads", [*map(self._read, reads)])

    @property
    def candidates(self) -> tuple[Entry, ...]:
        """The entries that a policy may choose to save."""
        return tuple(entry for entry in self.entries if entry.savable and not entry.must_save)

    def bytes_of(self, roots: Collection[int]) -> int:
        """Return the bytes of these storages."""
        return sum(map(self.bytes.__getitem__, roots))

    def used_by(self, entry: Entry) -> set[int]:
        """Return the storages that an entry reads, makes or writes to."""
        return {*(self.roots[value] for value in (*entry.reads, *entry.makes)), *entry.writes}

    def sendable(self, option: Option, room: int, host_room: int) -> frozenset[int]:
        """Return saved entries whose results can wait on the host: the largest in ``room`` bytes.

        What no later op of the region reads is its result, which others hold. ``host_room``: for pinned memory, of
        which torch takes powers of two.
        """
        read = {self.roots[value] for entry in self.entries for value in entry.reads if value in self.maker}
        sizes = {number: [self.bytes[root] for root in self.roots_of(number)] for number in option.saved or ()}
        sent = set()
        for number, each in sorted(sizes.items(), key=lambda one: -sum(one[1])):
            is_alone = self.roots_of(number) <= read & option.held and min(each) >= transfers.LIMITS.smallest
            pinned = sum(map(pinned_bytes, each))
            if is_alone and sum(each) <= room and pinned <= host_room:
                sent.add(number)
                room, host_room = room - sum(each), host_room - pinned
        return frozenset(sent)

    def sent_bytes(self, option: Option) -> int:
        """Return the bytes that an option has on the host."""
        return self.bytes_of({root for number in option.sent for root in self.roots_of(number)})

    def roots_of(self, number: int) -> set[int]:
        """Return the storages of the results of an entry."""
        return {self.roots[value] for value in self.entries[number].makes}

    def recomputed(self, saved: Collection[int]) -> tuple[tuple[int, ...], frozenset[int]]:
        """Return the entries that run again, in order, and the storages that are held if the entries ``saved`` are."""
        again, starts = self._schedule(self._kept(saved), self.needs)
        return tuple(again), frozenset(starts | self.routed)

    def late_replay(self, saved: Collection[int]) -> tuple[int, set[int]]:
        """Return when the replay begins if the entries ``saved`` are saved, and the storages that it starts from.

        Backward, which reads the needs from the last to the first, begins it at a need that is in no storage that is
        saved or from outside; -1 if there is none.
        """
        kept = self._kept(saved)
        roots = {self.roots[value] for value in kept}
        missing = [
            (value, time)
            for value, time in self.needs
            if (root := self.roots[value]) in self.maker and (root not in roots or self.tape.last_write(value) >= time)
        ]
        return max((time for _, time in missing), default=-1), self._schedule(kept, missing)[1]

    def _kept(self, saved: Collection[int]) -> set[int]:
        chosen = {*saved, *(entry.number for entry in self.entries if entry.must_save)}
        return {value for number in chosen for value in self.entries[number].makes}

    def _schedule(self, kept: Collection[int], needs: Sequence[tuple[int, int]]) -> tuple[list[int], set[int]]:
        """Return the entries that run again, and the storages of kept values that they start from."""
        roots, tape = {self.roots[value] for value in kept}, self.tape
        if tape.collectives or any(root in roots or root not in self.maker for root in tape.writers):
            tape.kept = dict.fromkeys(kept)
            schedule = schedule_replay(tape, [(handle, *need) for handle, need in enumerate(needs)])
            return [step[0] for step in schedule.steps], {self.roots[value] for value in schedule.kept}
        # Elsewhere a value is kept, or what makes it runs again, and all that have written to it by then.
        run, starts, waiting = set[int](), set[int](), self._read(needs)
        for node in waiting:
            if node in kept:
                starts.add(self.roots[node])
            elif (entry := self.maker.get(node, ~node)) not in run:
                run.add(entry)
                waiting += self.reads[entry]
        return sorted(run), starts

    def _read(self, reads: Sequence[tuple[int, int]]) -> list[int]:
        """Return the values of the region that are read, each at a time, and inverted the writers before that time."""
        wrote = [(one, time) for value, time in reads for one in self.tape.writers.get(self.roots[value], ())]
        return [*(value for value, _ in reads if value in self.maker), *(~one for one, time in wrote if one < time)]
