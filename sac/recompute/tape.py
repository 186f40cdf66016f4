"""The tape: a record of what each op of one region's forward read, produced and wrote to."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.region.rng import States
from sac.tensors import (
    WeakStorages,
    detached,
    inner_tensors,
    is_plain,
    is_wrapper,
    layout_key,
    storage_address,
    tensors_of,
    version_of,
    wrapped_parts,
)

# -- Entries of a tape

TENSOR_HOLE = object()  # placeholder for a tensor in an entry's arguments; the tensor's value is in the entry's reads

_PLAIN = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value, inside an argument that holds several tensors."""

    value: int


def as_reads(value: Any, tape: Tape, op: Any, reads: list[int]) -> Any:
    """Return ``value`` with ``Ref`` in place of tensors, also in lists, tuples and dicts; add them to ``reads``."""
    if isinstance(value, Tensor):
        number = tape.find(value, op)
        reads.append(number)
        return Ref(number)
    cls = type(value)
    if cls in _PLAIN:
        return value
    if cls is list or cls is tuple:
        return cls(as_reads(part, tape, op, reads) for part in value)
    if cls is dict:
        return {key: as_reads(part, tape, op, reads) for key, part in value.items()}
    return value


def from_reads(value: Any, values: list[Any]) -> Any:
    """Return ``value`` with the tensors in ``values`` in place of ``Ref``."""
    cls = type(value)
    if cls is Ref:
        return values[value.value]
    if cls is list or cls is tuple:
        return cls(from_reads(part, values) for part in value)
    if cls is dict:
        return {key: from_reads(part, values) for key, part in value.items()}
    return value


def read_arguments(tape: Tape, site: Any, args: Any, kwargs: Any) -> tuple[Any, Any, list[int]]:
    """Return the templates of the arguments and keywords of a call, and the values that it reads."""
    reads: list[int] = []
    if not site.is_flat:
        return as_reads(args, tape, site.op, reads), as_reads(kwargs, tape, site.op, reads), reads
    rest = []
    for value in args:
        if isinstance(value, Tensor):
            reads.append(tape.find(value, site.op))
            rest.append(TENSOR_HOLE)
        else:
            rest.append(value)
    return rest, kwargs, reads


class _Synthetic:
    """Takes the place of the call site in an entry that is not an op call."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


# Each reads the values named first; its argument template is the tuple.
ALIAS = _Synthetic("alias")  # a root: (geometry,)
PART = _Synthetic("part")  # a wrapper: (which part, geometry)
CAST = _Synthetic("cast")  # a parameter: (dtype,)
WRAP = _Synthetic("wrap")  # the parts of a wrapper: (class, names, context, size, stride)


def cast_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter of which ``tensor`` is an unmodified cast to another dtype; None if it is not one."""
    cast = tensor.grad_fn
    if cast is None or type(cast).__name__ != "ToCopyBackward0" or tensor._version:
        return None
    leaf = getattr(cast.next_functions[0][0], "variable", None)
    if type(leaf) is not Parameter or (leaf.shape, leaf.stride()) != (tensor.shape, tensor.stride()):
        return None
    return leaf if leaf.device == tensor.device else None


def first_address(tensor: Tensor) -> int:
    """Return the storage address of a tensor; of a wrapper, that of its first part."""
    if type(tensor) is not Tensor and is_wrapper(tensor):
        parts = wrapped_parts(tensor)
        return storage_address(parts[0]) if parts else id(tensor)
    return storage_address(tensor)


# -- The tape

# Note [The tape]
#
# Values. Every tensor that an op of the region reads or produces is a *value* and has a number. The tape finds it by
# its `id`, guarded by a weak reference, so the tape keeps no tensor alive. A tensor that no op of the tape produced is
# a *leaf*: an input of the region or an external tensor (a parameter, a buffer, a tensor in a closure). Leaves are held
# weakly too: replay holds nothing that a rerun of the region's Python would find anyway.
#
# Roots. All values in one storage have the same *root*: the first value in that storage. To read a value is to read the
# result of all earlier writes to its root. So an op depends on the ops that produced its arguments, and on the ops that
# wrote to their roots before it (`schedule_replay` in schedule.py). The tape holds weak references to its storages;
# while it does, their addresses are not given to other storages.
#
# Aliases. A tensor in a known storage that no entry produced is an alias, created where no dispatch mode sees it. So is
# a wrapper subclass (DTensor) around known tensors, and the tensor inside a known wrapper. The tape gets an entry that
# makes the alias again. The root of a wrapper is that of its first part. A cast of a parameter gets an entry too:
# autocast caches casts until it exits, so an earlier call may have made it.
#
# *Kept* values are held strongly: the results that the policy saves, and values that replay cannot recompute because a
# kernel that the dispatcher does not see has written to them. If the tape meets anything else that it cannot explain,
# the call is not replayable (`Tape.fail`): its Python runs again instead, and later calls use the rerun engine. The
# tape goes on recording, because Python is served from it (Note [What a fallback is served]).
#
# Example. The policy saves `mm`; the region runs `h = up(x).relu_()` and `h * h`, where `up` is a Linear without bias.
#
#   entry  op     reads   produces   writes to root
#   0      t      1       2          -                 value 0 is x, 1 the weight: leaves; 2 is a view with root 1
#   1      mm     0, 2    3          -                 the policy saves 3: kept
#   2      relu_  3       -          3                 the kept data of 3 is cloned before the write
#   3      mul    3, 3    4          -                 reads what entry 2 wrote: depends on entries 1 and 2

SMALL_NUMEL = 16  # external tensors with at most this many elements are held: they are constants made for one op


@dataclass(slots=True, eq=False)
class Leaf:
    """A value that no op of the region produced. ``position``: index of the input, or -1 for an external tensor.

    ``version`` and ``shape`` are those at its first use. ``is_persistent``: it is a parameter, or an input whose tensor
    the region holds itself, so that its data need not be held a second time.
    """

    position: int
    tensor: Any  # a callable that returns the tensor, mostly a weak reference; used for external tensors
    version: int
    shape: torch.Size
    is_persistent: bool


class Tape:
    """The tape of one region call; see Note [The tape]."""

    __slots__ = (
        "addresses",
        "arg_templates",
        "autocast_states",
        "by_storage",
        "constants",
        "draws_after",
        "external_tensors",
        "factories",
        "first_outputs",
        "has_meshes",
        "ids",
        "kept",
        "kept_in",
        "keywords",
        "leaves",
        "needs_attention",
        "not_replayable",
        "output_counts",
        "overwritten",
        "parts",
        "persistent_roots",
        "reads",
        "roots",
        "seen_at",
        "sites",
        "states",
        "states_after",
        "storages",
        "unpacked_early",
        "unseen",
        "unsynced",
        "versions",
        "writers",
        "writes",
    )

    def __init__(self) -> None:
        self.begin()
        # Only some entries and values have one of these.
        self.output_counts: dict[int, int] = {}  # the number of an entry's results, if that is not one
        self.keywords: dict[int, Any] = {}
        self.seen_at: dict[int, int] = {}  # value -> number of the entry before which its version was last accepted
        self.parts: dict[int, tuple[int, int]] = {}  # address of a part of a wrapper -> value of the wrapper, its index
        self.writers: dict[int, list[int]] = {}  # root -> entries that write to it
        self.writes: dict[int, tuple[int, ...]] = {}  # entry -> roots that it writes to
        self.leaves: dict[int, Leaf] = {}
        self.constants: set[int] = set()  # values made from Python numbers
        # During the forward these are tensors, which ops read and the C++ library puts here. After it they are held
        # until backward: as a `SavedResult` where something else may hold one (hooks around the region, the host).
        self.kept: dict[int, Any] = {}
        self.kept_in: dict[int, list[int]] = {}  # root -> kept values that no op has written to since
        self.unpacked_early: set[int] = set()  # roots with a value that the region's own forward has unpacked
        self.overwritten: set[int] = set()  # kept values that an unseen write has modified
        self.unseen: dict[int, int] = {}  # value that an unseen write has made -> root of what was there before
        self.persistent_roots: set[int] = set()  # roots of persistent leaves
        # By id: tensors that the region could reach when it began. The tape holds them, since the region may release
        # them.
        self.external_tensors: dict[int, Tensor] = {}
        self.factories: MutableMapping[
            int, int
        ] = {}  # root -> the factory entry that made it, while no op has written to it
        self.states: dict[int, States] = {}  # entry -> the generators that it advances, with their states before it
        self.draws_after: dict[int, tuple[int, ...]] = {}  # entry -> entries that leave the generator states it needs
        # Saved entry -> the generators that it advanced, with the states that it left; None if these were released.
        self.states_after: dict[int, States | None] = {}
        self.autocast_states: dict[int, Any] = {}  # entry of a custom op -> its caller's autocast, if the body uses it
        self.has_meshes = False  # there are DTensors, whose ops may communicate without being collectives
        self.not_replayable = ""  # why this call cannot be replayed
        # The next op needs the slow path: not replayable, factories, a pause, or values that may have been modified.
        self.needs_attention = False

    def begin(self) -> None:
        """Make the tables that every entry and every value has."""
        # An entry is an index into these four lists.
        self.sites: list[Any] = []  # its call site, or one of ALIAS, PART, CAST, WRAP
        self.arg_templates: list[Any] = []  # its arguments, with TENSOR_HOLE or Ref for tensors
        self.reads: list[Sequence[int]] = []  # the values that it reads
        self.first_outputs: list[int] = []  # the number of its first result
        self.ids: dict[int, tuple[Any, int]] = {}  # id of a tensor -> a weak reference to it, and its value
        self.roots: list[int] = []  # per value
        self.versions: list[int] = []  # per value: its version counter at the last check
        # Per value: the address of its storage; 0 if others may exchange that: of parameters and external tensors.
        self.addresses: list[int] = []
        self.by_storage: dict[int, int] = {}  # address of a storage -> root; see ``sync``
        self.unsynced: list[tuple[int, weakref.ref[Tensor]]] = []
        self.storages = WeakStorages()

    def fail(self, why: str) -> None:
        """Record that this call cannot be replayed, and why; only the first reason is reported."""
        self.not_replayable = self.not_replayable or why
        self.needs_attention = True

    # Entries and values. Only the methods of this section touch the tables that an op needs; the others call them.

    def entry_count(self) -> int:
        """Return the number of entries, which is the number of the next one."""
        return len(self.sites)

    def value_count(self) -> int:
        """Return the number of values, which is the number of the next one."""
        return len(self.roots)

    def results(self, entry: int) -> range:
        """Return the values that ``entry`` makes."""
        first = self.first_outputs[entry]
        return range(first, first + self.output_counts.get(entry, 1))

    def arguments(self, entry: int) -> tuple[Any, Any]:
        """Return the templates of the arguments and keywords of ``entry``."""
        return self.arg_templates[entry], self.keywords.get(entry, {})

    def call_of(self, entry: int) -> tuple[Any, Any]:
        """Return the templates with which the op of ``entry`` can be called again from Python."""
        return self.arguments(entry)

    def add_entry(self, site: Any, rest: Any, keywords: Any, reads: Sequence[int], out: Any) -> int:
        """Add the entry of an op that has returned ``out``; return how many values it makes: not what it was given."""
        entry, first = self.entry_count(), self.value_count()
        tensors = new_tensors(out)
        count = 0 if all(self.known(tensor) is not None for tensor in tensors) else len(tensors)
        for tensor in tensors[:count]:
            self.add(tensor)
        self.append(site, rest, reads, first)
        if count != 1:
            self.output_counts[entry] = count
        if site.is_view and reads:
            version = self.version(reads[0])
            for value in range(first, first + count):
                self.set_version(value, version)
        if keywords:
            self.keywords[entry] = keywords
        return count

    def append(self, site: Any, rest: Any, reads: Sequence[int], first: int) -> None:
        """Add an entry with one result."""
        self.sites.append(site)
        self.arg_templates.append(rest)
        self.reads.append(reads)
        self.first_outputs.append(first)

    def number(self, tensor: Tensor, root: int, version: int, address: int) -> int:
        """Give ``tensor`` the next number; ``root`` is -1 if it is the first value in its storage.

        ``address``: that of its storage, which ``has_moved`` compares, or 0.
        """
        value = len(self.roots)
        self.ids[id(tensor)] = weakref.ref(tensor), value
        self.versions.append(version)
        self.addresses.append(address)
        self.roots.append(value if root < 0 else root)
        return value

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor, or None if this very tensor is not on the tape."""
        found = self.ids.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def has_moved(self, tensor: Tensor, value: int) -> bool:
        """Return whether ``tensor``, which is ``value``, has other data now: ``tensor.data = …`` moves no version."""
        address = self.addresses[value]
        return address != 0 and storage_address(tensor) != address

    def tensor_of(self, value: int) -> Tensor | None:
        """Return the tensor with this number if it is still alive. A linear search."""
        for reference, number in self.ids.values():
            if number == value:
                found: Tensor | None = reference()
                return found
        return None

    def alive(self) -> dict[int, Tensor]:
        """Return the tensors on the tape that are still alive, by number."""
        found = ((value, reference()) for reference, value in self.ids.values())
        return {value: tensor for value, tensor in found if tensor is not None}

    def version(self, value: int) -> int:
        """Return the version counter of ``value`` at the last check."""
        return self.versions[value]

    def set_version(self, value: int, version: int) -> None:
        """Record that ``version`` of ``value`` has been checked."""
        self.versions[value] = version

    def root_at(self, address: int) -> int | None:
        """Return the root of the storage at ``address``, if it has been recorded; see ``sync``."""
        return self.by_storage.get(address)

    def record_storage(self, address: int, root: int, tensor: Tensor) -> None:
        """Record that the storage at ``address``, that of ``tensor``, has the root ``root``."""
        self.by_storage[address] = root
        self.storages.watch(tensor)

    def watch(self, value: int, tensor: Tensor) -> None:
        """Let the next ``sync`` record the storage of ``tensor``, which is ``value``."""
        self.unsynced.append((value, weakref.ref(tensor)))

    def sync(self) -> None:
        """Record the storages of the values produced since the last sync.

        This runs on demand, not per value, because many values are freed by then. A storage whose values are all freed
        is not known any more; another tensor in it counts as external.
        """
        for value, reference in self.unsynced:
            tensor = reference()
            if tensor is None:
                tensor = self.kept.get(value)
            if tensor is not None:
                address = storage_address(tensor)
                if address not in self.by_storage:
                    self.record_storage(address, self.roots[value], tensor)
        self.unsynced.clear()

    def leaf(self, value: int) -> Leaf | None:
        """Return the leaf that ``value`` is, if it is one."""
        return self.leaves.get(value)

    def set_leaf(self, value: int, leaf: Leaf) -> None:
        """Record that ``value`` is a leaf."""
        self.leaves[value] = leaf

    def leaf_positions(self) -> list[tuple[int, int]]:
        """Return each leaf with its position."""
        return [(value, leaf.position) for value, leaf in self.leaves.items()]

    def leaf_ids(self, values: Sequence[int]) -> frozenset[int]:
        """Return the ids of the tensors of these leaves."""
        return frozenset(id(leaf.tensor()) for value in values if (leaf := self.leaf(value)) is not None)

    def layout(self) -> Any:
        """Return what ``has_layout`` compares: sites, reads, first results and roots."""
        return self.sites, self.reads, self.first_outputs, self.roots

    def has_layout(self, layout: Any) -> bool:
        """Return whether this tape has the same ``layout``; share its lists if so."""
        if type(layout) is not tuple or layout != (self.sites, self.reads, self.first_outputs, self.roots):
            return False
        self.sites, self.reads, self.first_outputs, self.roots = layout
        return True

    def forget_tensors(self) -> None:
        """Release the tables that find tensors."""
        self.ids, self.by_storage, self.unsynced = {}, {}, []
        self.storages = WeakStorages()

    def note_left(self, state: Tensor) -> None:
        """Tell the C++ library in which state the CPU's default generator is now; it is held anyway."""

    def take_draws(self) -> Sequence[tuple[int, Tensor, Tensor]]:
        """Return the entries of the C++ library that have drawn since the last call; see ``RandomOpStates``.

        With each, the states of the CPU's default generator before and after it.
        """
        return ()

    def close(self) -> None:
        """End the forward."""
        self.forget_tensors()
        self.parts, self.seen_at, self.factories, self.external_tensors = {}, {}, {}, {}

    def drop(self) -> None:
        """Release everything; no replay follows."""
        self.begin()
        self.output_counts, self.keywords, self.kept, self.leaves = {}, {}, {}, {}
        self.states, self.autocast_states, self.writers, self.writes = {}, {}, {}, {}
        self.states_after = {}

    def watches_factories(self) -> bool:
        """Return whether every op has to be looked at, because it may read what a factory has made."""
        return bool(self.factories)

    # Reading

    def find(self, tensor: Tensor, op: Any) -> int:
        """Return the number of a tensor that ``op`` reads."""
        value = self.known(tensor)
        if value is None:
            return self.register_unknown(tensor, op)
        if tensor.is_inference():
            self.fail(f"{op} reads an inference tensor")
        elif tensor._version != self.version(value):
            return self.look_at_version(tensor, value)
        elif self.has_moved(tensor, value):
            return self.hold_current(tensor)
        return value

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether the storage of ``tensor`` is on the tape."""
        self.sync()
        return self.root_at(first_address(tensor)) is not None

    def look_at_version(self, tensor: Tensor, value: int) -> int:
        """Return the number of ``tensor``, whose version counter has moved: ``value``, or a new one if unseen."""
        seen = self.seen_at.get(value, -1)
        writers = self.writers.get(self.roots[value], ())
        if tensor._version - self.version(value) > sum(entry >= seen for entry in writers):
            return self.hold_current(tensor)  # an unseen write: the present data is a new value
        self.set_version(value, tensor._version)
        self.seen_at[value] = self.entry_count()
        return value

    def hold_current(self, tensor: Tensor) -> int:
        """Keep the present data of ``tensor`` as a new value that replay does not recompute; return its number."""
        self.sync()
        before = self.root_at(first_address(tensor))
        value = self.add(tensor, new_root=True)
        if before is not None:
            self.unseen[value] = before
        self.kept[value] = detached(tensor)
        self.kept_in[value] = [value]
        for held in self.kept_in.pop(before, ()) if before is not None else ():
            if self.version(held) == tensor._version:  # kept after that write, through another view
                self.kept_in[value].append(held)
            else:
                self.overwritten.add(held)
        return value

    def recognise(self, tensor: Tensor, value: int) -> None:
        """Record that ``tensor``, replayed inside the region's own forward, holds the present data of ``value``."""
        root, address = self.roots[value], first_address(tensor)
        self.sync()
        if root not in self.writers and self.root_at(address) is None:
            self.record_storage(address, root, tensor)
            self.unpacked_early.add(root)

    def add(self, tensor: Tensor, *, new_root: bool = False, is_external: bool = False) -> int:
        """Give ``tensor`` a number."""
        self.sync()
        cls = type(tensor)
        plain = cls is Tensor or cls is Parameter
        address = storage_address(tensor) if plain else first_address(tensor)
        root = None if new_root else self.root_at(address)
        # In the mode, a view has its own version counter; above the mode, it shares the counter of its base.
        version = version_of(tensor) if root is None else self.version(root)
        value = self.number(tensor, -1 if root is None else root, version, address if plain and not is_external else 0)
        wraps = not plain and is_wrapper(tensor)
        if root is None:
            root = value
            if not wraps and tensor.layout is torch.strided:  # others have no storage, so the address means nothing
                self.record_storage(address, root, tensor)
        if wraps:
            self._note_parts(tensor, value, root)
        return value

    def _note_parts(self, wrapper: Tensor, value: int, root: int) -> None:
        self.has_meshes = self.has_meshes or hasattr(wrapper, "device_mesh")
        for index, part in enumerate(wrapped_parts(wrapper)):
            address = storage_address(part)
            self.parts[address] = (value, index)
            if self.root_at(address) is None:
                self.record_storage(address, root, part)

    def register_unknown(self, tensor: Tensor, op: Any) -> int:
        """Give a number to a tensor that no op of the tape produced."""
        cls = type(tensor)
        if cls is Parameter:
            return self._register_parameter(tensor)
        self.sync()
        if cls is not Tensor and is_wrapper(tensor):
            return self._register_wrapper(tensor, op)
        if tensor.is_inference():
            self.fail(f"{op} reads an inference tensor")
        address = storage_address(tensor)
        root = self.root_at(address)
        if root is None:
            parameter = cast_of(tensor)
            if parameter is not None:
                return self._made(CAST, (tensor.dtype,), (self.find(parameter, op),), tensor)
            return self.add_leaf(tensor)
        if address in self.parts:
            return self._register_part(tensor)
        leaf = self.leaf(root)
        if leaf is not None and leaf.position < 0 and root not in self.writers:
            return self.add_leaf(tensor)
        if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
            self.fail(f"{op} reads a tensor that no recorded op made")
        return self._made(ALIAS, (layout_key(tensor),), (root,), tensor)

    def _register_parameter(self, parameter: Tensor) -> int:
        version = version_of(parameter)
        root = self.root_at(storage_address(parameter))  # weights may share a storage
        value = self.number(parameter, -1 if root is None else root, version, 0)
        self.watch(value, parameter)
        self.set_leaf(value, Leaf(-1, weakref.ref(parameter), version, parameter.shape, True))
        self.persistent_roots.add(self.roots[value])
        return value

    def _register_part(self, tensor: Tensor) -> int:
        wrapper, index = self.parts[storage_address(tensor)]
        return self._made(PART, (index, layout_key(tensor)), (wrapper,), tensor)

    def _register_wrapper(self, tensor: Any, op: Any) -> int:
        parts = inner_tensors(tensor)
        addresses = [storage_address(part) for part in wrapped_parts(tensor)]
        if all(self.root_at(address) is None for address in addresses):
            return self.add_leaf(tensor)
        names, context = tensor.__tensor_flatten__()
        held = [(name, getattr(tensor, name)) for name in names]  # tensors, and the mesh of a DTensor (torch 2.13)
        inside = [(name, TENSOR_HOLE if isinstance(value, Tensor) else value) for name, value in held]
        rest = (type(tensor), inside, context, tensor.size(), tensor.stride())
        return self._made(WRAP, rest, tuple(self.find(part, op) for part in parts), tensor)

    def _made(self, site: Any, rest: Any, reads: tuple[int, ...], tensor: Tensor) -> int:
        """Add an entry that makes ``tensor`` from the values ``reads``, and give the tensor a number."""
        value = self.add(tensor)
        self.seen_at[value] = self.entry_count()
        self.append(site, rest, reads, value)
        return value

    def find_behind(self, tensor: Tensor, root: int) -> None:
        """Register ``tensor``, which an op returned, as an alias of ``root``, whichever op produced that."""
        self._made(ALIAS, (layout_key(tensor),), (root,), tensor)

    def add_leaf(self, tensor: Tensor, position: int = -1, *, lasts: bool = True) -> int:
        """Give a number to an input of the region, or to an external tensor.

        ``lasts``: for an input, whether the region holds the caller's tensor until backward.
        """
        value = self.add(tensor, is_external=position < 0)
        cls = type(tensor)
        is_parameter = cls is Parameter or (cls is not Tensor and isinstance(tensor, Parameter))
        held: Any = weakref.ref(tensor)
        if position < 0 and is_plain(tensor) and tensor.numel() <= SMALL_NUMEL and not tensor.requires_grad:
            held = Held(tensor)
        elif position < 0 and id(tensor) in self.external_tensors:
            held = Held(tensor if tensor.grad_fn is None else detached(tensor))
        lasts = lasts if position >= 0 else is_parameter
        # The tensor's own version: a view that was replayed inside the region's forward has its own counter.
        self.set_leaf(value, Leaf(position, held, version_of(tensor), tensor.shape, lasts))
        if lasts:
            self.persistent_roots.add(self.roots[value])
        return value

    # Writing

    def root_of_part(self, tensor: Tensor, part: Tensor) -> int | None:
        """Return the root of ``part`` of ``tensor``, which an op is about to write to; call ``sync`` before."""
        root = self.root_at(storage_address(part))
        if root is None and part is tensor and (value := self.known(tensor)) is not None:
            return self.roots[value]  # the first value in this storage is freed; this is a view of it
        return root

    def add_write(self, roots: tuple[int, ...]) -> None:
        """Record that the next entry writes to ``roots``."""
        entry = self.entry_count()
        self.writes[entry] = roots
        for root in roots:
            self.writers.setdefault(root, []).append(entry)
            self.factories.pop(root, None)


@dataclass(frozen=True, slots=True)
class BareTape:
    """A tape without tensors: all that a replay schedule depends on, under the names of ``Tape``.

    ``makes``: per entry, the values that it makes.
    """

    sites: Sequence[Any]
    reads: Sequence[Sequence[int]]
    makes: Sequence[Sequence[int]]
    writes: Mapping[int, tuple[int, ...]]
    roots: Sequence[int]
    leaves: Collection[int]
    kept: Collection[int] = ()
    draws_after: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def results(self, entry: int) -> Sequence[int]:
        """Return the values that ``entry`` makes."""
        return self.makes[entry]


def new_tensors(out: Any) -> list[Tensor]:
    """Return the tensors of an op's result, in order."""
    return [out] if isinstance(out, Tensor) else tensors_of(out)


class Held:
    """A strong reference to a tensor with the call interface of a weak one."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        """Return the tensor."""
        return self.tensor
