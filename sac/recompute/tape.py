"""The tape: what each op of one region's forward read, made and wrote to."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sac.region.rng import States
from sac.tensors import WeakStorages, detached, inner_tensors, layout_key, storage_address, version_of, wrapped_parts

# -- What the entries of a tape are made of: arguments with numbers for tensors, and what stands for unseen makings

TENSOR_HOLE = object()  # stands for a tensor among an entry's arguments; its value's number is among the entry's reads

_PLAIN = frozenset({int, float, bool, type(None), str, torch.dtype, torch.device, torch.layout, torch.memory_format})


@dataclass(frozen=True, slots=True)
class Ref:
    """The number of a value, inside an argument that holds several tensors."""

    value: int


def as_reads(value: Any, tape: Tape, op: Any, reads: list[int]) -> Any:
    """Return ``value`` with ``Ref`` in place of tensors, through lists, tuples and dicts; note them in ``reads``."""
    if isinstance(value, Tensor):
        number = tape.find(value, op)
        reads.append(number)
        return Ref(number)
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return kind(as_reads(part, tape, op, reads) for part in value)
    if kind is dict:
        return {key: as_reads(part, tape, op, reads) for key, part in value.items()}
    return value


def from_reads(value: Any, values: list[Any]) -> Any:
    """Return ``value`` with the tensors in ``values`` in place of ``Ref``."""
    kind = type(value)
    if kind is Ref:
        return values[value.value]
    if kind is list or kind is tuple:
        return kind(from_reads(part, values) for part in value)
    if kind is dict:
        return {key: from_reads(part, values) for key, part in value.items()}
    return value


class _Synthetic:
    """What stands in an entry's place for the plan, where no op was called."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


ALIAS = _Synthetic("alias")  # of the root: (geometry,)
PART = _Synthetic("part")  # of a wrapper: (which, geometry)
CAST = _Synthetic("cast")  # of a parameter: (dtype,)
WRAP = _Synthetic("wrap")  # parts in a wrapper: (class, names, context, size, stride)


def cast_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter that ``tensor`` is, in another dtype and untouched; None if it is something else."""
    cast = tensor.grad_fn
    if cast is None or type(cast).__name__ != "ToCopyBackward0" or tensor._version:
        return None
    leaf = getattr(cast.next_functions[0][0], "variable", None)
    if type(leaf) is not Parameter or (leaf.shape, leaf.stride()) != (tensor.shape, tensor.stride()):
        return None
    return leaf if leaf.device == tensor.device else None


def is_wrapper(tensor: Tensor) -> bool:
    """Whether ``tensor`` holds its data in tensors inside it."""
    return hasattr(type(tensor), "__tensor_flatten__")


def first_address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor, of its first part if it is a wrapper."""
    if type(tensor) is not Tensor and is_wrapper(tensor):
        parts = wrapped_parts(tensor)
        return storage_address(parts[0]) if parts else id(tensor)
    return storage_address(tensor)


# -- The tape: what the ops of one region call read, made and wrote, by number, for the replay engine

# Note [The tape]
#
# Forward. Every tensor that an op of the region reads or makes is a *value* and has a number. It is found again by its
# `id`, which a weak reference guards, so the tape keeps no tensor alive. A tensor that no op of the tape has made is a
# *leaf*: an input of the region, or something from outside (a parameter, a buffer, what a closure holds), which is held
# weakly too: replay holds nothing that running the region's Python again would not find.
#
# Values that lie in one storage have one *root*, the first of them. To read a value is to read what all writes to its
# root have left there, so an op depends on the ops that made its arguments and on those that wrote to their roots
# before it (`schedule_replay` in schedule.py). The storages of a tape are referenced weakly: while that is so no other
# storage gets the address of one.
#
# A tensor that nobody made on the tape, in a storage that is known, is an alias: it came about where no mode looks. A
# wrapper subclass (DTensor) around known tensors, or the tensor inside a known wrapper, is one too. An entry that makes
# it again is put on the tape. The root of a wrapper is that of its first part. So is one for a parameter in another
# dtype: autocast keeps those until it is left, and an earlier call may have made it.
#
# *Kept* values are held: what the policy saves, and what replay could not make again, because some kernel that the
# dispatcher does not see has written to it. Anything else that the tape cannot explain is `trouble`: the region is run
# again as Python then, and later calls go under the rerun engine.

SMALL_NUMEL = 16  # a tensor from outside that has no more elements is held: a constant made for one op


@dataclass(slots=True, eq=False)
class Leaf:
    """A value that no op of the region made. ``position`` is that of an input, -1 for a tensor from outside.

    ``version`` and ``shape`` are those of its first use. ``lasts``: it is a parameter, or an input that the region
    holds as it is, so that what lies in it need not be held once more.
    """

    position: int
    tensor: Any  # of one from outside: a weak reference, or something else that returns it when called
    version: int
    shape: torch.Size
    is_persistent: bool


class Tape:
    """See Note [The tape]."""

    __slots__ = (
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
        "storages",
        "unpacked_early",
        "unsynced",
        "versions",
        "writers",
        "writes",
    )

    def __init__(self) -> None:
        # An entry is a place in these four lists, and has more in the two tables where there is more to it.
        self.sites: list[Any] = []  # what the table says of the op, or one of ALIAS, PART, WRAP
        self.arg_templates: list[Any] = []  # its arguments, with TENSOR_HOLE or Ref for tensors
        self.reads: list[Sequence[int]] = []  # the values that it reads
        self.first_outputs: list[int] = []  # the number of its first result
        self.output_counts: dict[int, int] = {}  # how many results it has, where that is not one
        self.keywords: dict[int, Any] = {}
        self.ids: dict[int, tuple[Any, int]] = {}  # by the id of a tensor: a weak reference to it, and its number
        self.roots: list[int] = []  # of each value
        self.versions: list[int] = []  # of each value: its version counter when it was last looked at
        self.seen_at: dict[int, int] = {}  # value -> number of the entry before which its version was last accepted
        self.by_storage: dict[int, int] = {}  # address of a storage -> root; see ``sync``
        self.unsynced: list[tuple[int, weakref.ref[Tensor]]] = []
        self.parts: dict[int, tuple[int, int]] = {}  # address of a part of a wrapper -> the wrapper, which part it is
        self.writers: dict[int, list[int]] = {}  # root -> entries that write to it
        self.writes: dict[int, tuple[int, ...]] = {}  # entry -> roots that it writes to
        self.leaves: dict[int, Leaf] = {}
        self.constants: set[int] = set()  # values made of Python's numbers
        self.kept: dict[int, Tensor] = {}
        self.kept_in: dict[int, list[int]] = {}  # root -> kept values that no op has written to since
        self.unpacked_early: set[int] = set()  # roots of which the region's own forward has unpacked something
        self.overwritten: set[int] = set()  # kept values that something else has written to
        self.persistent_roots: set[int] = set()  # roots of leaves that last
        # By id: tensors that the region could reach when it began. It may let go of them, so that the tape holds them.
        self.external_tensors: dict[int, Tensor] = {}
        self.factories: dict[int, int] = {}  # root -> entry that made it of nothing, while no op has written to it
        self.states: dict[int, States] = {}  # entry -> generators that it moves, as they stood before it
        self.draws_after: dict[int, tuple[int, ...]] = {}  # entry -> those that leave generators as it has to find them
        self.autocast_states: dict[int, Any] = {}  # entry -> the autocast of its caller, where its body leans on that
        self.storages = WeakStorages()
        self.has_meshes = False  # there are DTensors, whose ops may send without being collectives
        self.not_replayable = ""
        self.needs_attention = (
            False  # there is something to look at before the next op: trouble, factories, a pause, suspects
        )

    def fail(self, why: str) -> None:
        """Note that this call cannot be replayed; the first reason is the one to be told."""
        self.not_replayable = self.not_replayable or why
        self.needs_attention = True

    # Reading

    def find(self, tensor: Tensor, op: Any) -> int:
        """Return the number of a tensor that ``op`` reads."""
        found = self.ids.get(id(tensor))
        if found is None or found[0]() is not tensor:
            return self.register_unknown(tensor, op)
        value = found[1]
        if tensor.is_inference():
            self.fail(f"{op} reads a tensor of inference mode")
        elif tensor._version != self.versions[value]:
            return self.look_at_version(tensor, value)
        return value

    def known(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor if it is on the tape as it is."""
        found = self.ids.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def is_known(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` lies in a storage of the tape."""
        self.sync()
        return first_address(tensor) in self.by_storage

    def tensor_of(self, value: int) -> Tensor | None:
        """Return the tensor with this number, if it is still there. Looks through all that are."""
        for reference, number in self.ids.values():
            if number == value:
                found: Tensor | None = reference()
                return found
        return None

    def look_at_version(self, tensor: Tensor, value: int) -> int:
        """The version counter has moved since the tensor was last looked at: by an op of the tape, or unseen?"""
        seen = self.seen_at.get(value, -1)
        writers = self.writers.get(self.roots[value], ())
        if tensor._version - self.versions[value] > sum(entry >= seen for entry in writers):
            return self.hold_current(tensor)  # somebody else wrote to it: what lies there now is a value of its own
        self.versions[value] = tensor._version
        self.seen_at[value] = len(self.sites)
        return value

    def hold_current(self, tensor: Tensor) -> int:
        """Hold what lies in ``tensor`` now, as a value that is not made again; return its number."""
        self.sync()
        before = self.by_storage.get(first_address(tensor))
        value = self.add(tensor, new_root=True)
        self.kept[value] = detached(tensor)
        self.kept_in[value] = [value]
        for held in self.kept_in.pop(before, ()) if before is not None else ():
            if self.versions[held] == tensor._version:  # held after that write, through another view
                self.kept_in[value].append(held)
            else:
                self.overwritten.add(held)
        return value

    def recognise(self, tensor: Tensor, value: int) -> None:
        """Note that ``tensor`` has been replayed inside the region's own forward, as what ``value`` is still."""
        root, address = self.roots[value], first_address(tensor)
        self.sync()
        if root not in self.writers and address not in self.by_storage:
            self.by_storage[address] = root
            self.storages.watch(tensor)
            self.unpacked_early.add(root)

    def sync(self) -> None:
        """Note in which storages the values lie that have been made since the last time.

        Done when that is asked for, and not for each value: many are gone by then. A storage whose values are all gone
        is not known any more; what else lies in it is taken for a tensor from outside.
        """
        by_storage, roots = self.by_storage, self.roots
        for value, reference in self.unsynced:
            tensor = reference()
            if tensor is None:
                tensor = self.kept.get(value)
            if tensor is not None:
                address = storage_address(tensor)
                if address not in by_storage:
                    by_storage[address] = roots[value]
                    self.storages.watch(tensor)
        self.unsynced.clear()

    def add(self, tensor: Tensor, *, new_root: bool = False) -> int:
        """Give ``tensor`` a number."""
        if self.unsynced:
            self.sync()
        value = len(self.roots)
        self.ids[id(tensor)] = (weakref.ref(tensor), value)
        kind = type(tensor)
        plain = kind is Tensor or kind is Parameter
        address = storage_address(tensor) if plain else first_address(tensor)
        root = None if new_root else self.by_storage.get(address)
        # Of a view the mode sees a counter of its own; what is above the mode lets it share that of its base.
        self.versions.append(version_of(tensor) if root is None else self.versions[root])
        wraps = not plain and is_wrapper(tensor)
        if root is None:
            root = value
            if not wraps and tensor.layout is torch.strided:  # others have no storage, and their address means nothing
                self.by_storage[address] = root
                self.storages.watch(tensor)
        self.roots.append(root)
        if wraps:
            self._note_parts(tensor, value, root)
        return value

    def _note_parts(self, wrapper: Tensor, value: int, root: int) -> None:
        self.has_meshes = self.has_meshes or hasattr(wrapper, "device_mesh")
        for place, part in enumerate(wrapped_parts(wrapper)):
            address = storage_address(part)
            self.parts[address] = (value, place)
            if address not in self.by_storage:
                self.by_storage[address] = root
                self.storages.watch(part)

    def register_unknown(self, tensor: Tensor, op: Any) -> int:
        """Give a number to a tensor that no op of the tape has made."""
        kind = type(tensor)
        if kind is Parameter:
            return self._register_parameter(tensor)
        if self.unsynced:
            self.sync()
        if kind is not Tensor and is_wrapper(tensor):
            return self._register_wrapper(tensor, op)
        if tensor.is_inference():
            self.fail(f"{op} reads a tensor of inference mode")
        address = storage_address(tensor)
        root = self.by_storage.get(address)
        if root is None:
            parameter = cast_of(tensor)
            if parameter is not None:
                return self._made(CAST, (tensor.dtype,), (self.find(parameter, op),), tensor)
            return self.add_leaf(tensor)
        if address in self.parts:
            return self._register_part(tensor)
        leaf = self.leaves.get(root)
        if leaf is not None and leaf.position < 0 and root not in self.writers:
            return self.add_leaf(tensor)
        if tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
            self.fail(f"{op} reads a tensor that came about unseen")
        return self._made(ALIAS, (layout_key(tensor),), (root,), tensor)

    def _register_parameter(self, parameter: Tensor) -> int:
        value = len(self.roots)
        reference = weakref.ref(parameter)
        version = version_of(parameter)
        self.ids[id(parameter)] = reference, value
        self.unsynced.append((value, reference))
        address = storage_address(parameter)
        root = self.by_storage.get(address, value)  # of weights that share a storage
        self.roots.append(root)
        self.versions.append(version)
        self.leaves[value] = Leaf(-1, reference, version, parameter.shape, True)
        self.persistent_roots.add(root)
        return value

    def _register_part(self, tensor: Tensor) -> int:
        wrapper, place = self.parts[storage_address(tensor)]
        return self._made(PART, (place, layout_key(tensor)), (wrapper,), tensor)

    def _register_wrapper(self, tensor: Any, op: Any) -> int:
        parts = inner_tensors(tensor)
        addresses = [storage_address(part) for part in wrapped_parts(tensor)]
        if not any(address in self.by_storage for address in addresses):
            return self.add_leaf(tensor)
        names, context = tensor.__tensor_flatten__()
        held = [(name, getattr(tensor, name)) for name in names]  # tensors, and the mesh of a DTensor (torch 2.13)
        inside = [(name, TENSOR_HOLE if isinstance(value, Tensor) else value) for name, value in held]
        rest = (type(tensor), inside, context, tensor.size(), tensor.stride())
        return self._made(WRAP, rest, tuple(self.find(part, op) for part in parts), tensor)

    def _made(self, site: Any, rest: Any, reads: tuple[int, ...], tensor: Tensor) -> int:
        """Put an entry on the tape that makes ``tensor`` of values, and give it a number."""
        value = self.add(tensor)
        self.seen_at[value] = len(self.sites)
        self.append(site, rest, reads, value)
        return value

    def find_behind(self, tensor: Tensor, root: int) -> None:
        """Let ``tensor``, which an op gave back, be known as what lies at ``root``, whoever made that."""
        self._made(ALIAS, (layout_key(tensor),), (root,), tensor)

    def append(self, site: Any, rest: Any, reads: Sequence[int], first: int) -> None:
        """Put an entry with one result on the tape."""
        self.sites.append(site)
        self.arg_templates.append(rest)
        self.reads.append(reads)
        self.first_outputs.append(first)

    def add_leaf(self, tensor: Tensor, position: int = -1, *, lasts: bool = True) -> int:
        """Give a number to an input of the region, or to a tensor from outside.

        ``lasts``: of an input, that the region holds the caller's tensor until backward.
        """
        value = self.add(tensor)
        kind = type(tensor)
        is_parameter = kind is Parameter or (kind is not Tensor and isinstance(tensor, Parameter))
        held: Any = weakref.ref(tensor)
        if position < 0 and kind is Tensor and tensor.numel() <= SMALL_NUMEL and not tensor.requires_grad:
            held = _Held(tensor)
        elif position < 0 and id(tensor) in self.external_tensors:
            held = _Held(tensor if tensor.grad_fn is None else detached(tensor))
        lasts = lasts if position >= 0 else is_parameter
        # Its own version: a view that was replayed inside the region's forward counts for itself.
        self.leaves[value] = Leaf(position, held, version_of(tensor), tensor.shape, lasts)
        if lasts:
            self.persistent_roots.add(self.roots[value])
        return value

    # Writing down

    def add_write(self, roots: tuple[int, ...]) -> None:
        """The entry that comes next writes to what lies at ``roots``."""
        entry = len(self.sites)
        self.writes[entry] = roots
        for root in roots:
            self.writers.setdefault(root, []).append(entry)
            self.factories.pop(root, None)

    def close(self) -> None:
        """The forward is over: what finds tensors again is of no more use."""
        self.ids, self.by_storage, self.parts, self.unsynced = {}, {}, {}, []
        self.seen_at, self.factories, self.external_tensors = {}, {}, {}
        self.storages = WeakStorages()

    def drop(self) -> None:
        """No replay will come: hold nothing any more."""
        self.sites, self.arg_templates, self.reads, self.first_outputs, self.roots, self.versions = (
            [],
            [],
            [],
            [],
            [],
            [],
        )
        self.output_counts, self.keywords, self.kept, self.leaves, self.states, self.autocast_states = (
            {},
            {},
            {},
            {},
            {},
            {},
        )
        self.writers, self.writes = {}, {}


class _Held:
    """Returns a tensor, as a weak reference to it would."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __call__(self) -> Tensor:
        return self.tensor
