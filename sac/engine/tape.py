"""The tape: what each op of one forward of a region read, produced and wrote to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sac.engine.objects import tensors_in
from sac.engine.rng import GeneratorStates
from sac.engine.table import DecisionTable
from sac.engine.wrappers import PART, WRAP, memory_of, parts_of, wrap_arguments
from sac.outer_hooks import is_written
from sac.stores.store import StoredTensor
from sac.tensors import (
    copy_of,
    detached,
    inner_tensors,
    is_plain,
    is_wrapper,
    storage_address,
    storage_bytes,
)
from sac.torch_private import next_node_number

# A *value* is a tensor that an op reads or produces; it has a number. A value that no op of the tape produced is a
# *leaf*. All values in one storage have the same *root*, the first of them. Reading a value at *time* t (before entry
# t) means reading what the writers of its root among the entries before t have left there. The tape holds leaves and
# kept values; of all others it has weak references only.

_COPIED = 64  # of leaves of at most so many bytes the contents are held: counters, scales
_SMALL = 16  # unknown tensors with at most so many elements are held: they are constants made for one op


class CannotReplayError(Exception):
    """This call cannot be replayed; the text says why."""


class DiffersError(CannotReplayError):
    """A replay differs from the forward, which other ranks may not find."""


@dataclass(slots=True, eq=False)
class Leaf:
    """A tensor from outside. ``version``: at the end of the forward. ``is_parameter``: its storage identifies it."""

    tensor: Any  # may be packed by hooks around the region; None if no recomputation needs it
    version: int
    shape: torch.Size
    is_parameter: bool


class Tape:
    """The tape of one region call; an entry is an index into the first four lists."""

    def __init__(self, table: DecisionTable, owners: Sequence[nn.Module]) -> None:
        self.table, self._owners = table, owners
        self.sites: list[Any] = []  # call sites, of ops and of units
        self.args: list[Any] = []  # a tuple: what follows the tensors it reads; a list: arguments, with Ref for tensors
        self.reads: list[list[int]] = []  # the values of these tensors
        self.firsts: list[int] = []  # the first value that the entry makes
        self.kwargs: dict[int, Any] = {}  # only of entries that have some
        self.returned: dict[int, Any] = {}  # kept entry -> what it returned, with `Ref`s, if not one tensor
        self.counts: dict[int, int] = {}  # how many values an entry makes, if that is not one
        self.roots: list[int] = []  # per value
        self.makers: list[int] = []  # per value: its entry; -1 for a leaf
        self.refs: list[weakref.ref[Tensor]] = []  # per value: its tensor
        self.ids: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # id of a tensor -> the tensor, value
        self.leaves: dict[int, Leaf] = {}
        self.leaf_roots: dict[int, int] = {}  # address of a leaf's storage -> root
        self.writers: dict[int, list[int]] = {}  # root -> entries that write to it
        # Root of leaves -> one of them, contents before the first write
        self.before: dict[int, tuple[Tensor, Any]] = {}
        self.kept: dict[int, Any] = {}  # value -> tensor, at first all that the policy saves
        self.kept_roots: set[int] = set()
        self.kept_keys: tuple[int, ...] = ()  # those of `kept` at the end of the forward
        self.kept_versions: dict[int, int] = {}
        self.rule_of: dict[int, int] = {}  # kept value -> index of its rule
        # Entry -> generators that it advances, with states before it; None: no schedule needs them
        self.states: dict[int, GeneratorStates | None] = {}
        self.after: dict[int, GeneratorStates] = {}  # kept entry -> the same after it
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # passed to ops, with states before the first
        self.autocast: dict[int, Any] = {}  # entry of a custom op -> whether its body runs under autocast
        self.sums: dict[int, Any] = {}  # kept entry -> checksum of its results, if the call is verified
        self.metadata: dict[int, Any] = {}  # kept entry -> shapes and dtypes of its arguments
        self.fresh: set[int] = set()  # roots of uninitialised memory that no entry has written to
        self.where = ""  # the region's name in messages
        self.why_not = ""  # why this call cannot be replayed
        self.has_collectives = False  # other ranks take part in a recomputation
        self.collectives: list[int] = []  # entries; a unit instead of those inside
        self.waits: set[int] = set()  # those that wait for the result of another, in place
        self.ends_early = True  # a rerun ends with the last tensor that is missing
        self.input_roots: set[int] = set()
        self.stored: dict[int, StoredTensor | None] = {}  # roots of inputs in a store, as the forward found them
        self.is_careful = False  # there is something of which a forward without a mode takes no notice
        # Id of a tensor in a wrapper value
        self.parts: dict[int, tuple[weakref.ref[Tensor], int, tuple[int, ...]]] = {}
        self.of_unknown_origin: set[int] = set()  # leaves that are not held: the region may have made them
        self.joined: set[int] = set()  # roots of wrappers that the region has made of other values, and of these
        self.units: dict[int, Any] = {}  # entry -> how to repeat a call of an autograd function
        self.differing: list[int] = []  # the unit that a replay has shown not to repeat itself
        self.scope: Any = None  # the call of an autograd function that is running
        self.module_tensors: set[int] = set()  # ids of parameters and buffers
        self._first_node = next_node_number()
        self._reachable: set[int] | None = None  # addresses

    def fail(self, why: str) -> None:
        """Record that this call cannot be replayed; the first reason counts."""
        if self.scope is not None:  # the whole call is repeated
            self.scope.strict = True
            return
        self.why_not = self.why_not or why

    # -- Values

    def add_value(self, tensor: Tensor, root: int, maker: int) -> int:
        """Give ``tensor`` the next number; ``root`` -1: it is the first value in its storage."""
        value = len(self.roots)
        reference = weakref.ref(tensor)
        self.ids[id(tensor)] = reference, value
        self.refs.append(reference)
        self.roots.append(value if root < 0 else root)
        self.makers.append(maker)
        if type(tensor) is not Tensor and type(tensor) is not Parameter and is_wrapper(tensor):
            self.parts.update((id(part), (weakref.ref(part), value, path)) for part, path in parts_of(tensor))
        return value

    def add_leaf(self, tensor: Tensor) -> int:
        """Add a tensor from outside of the region."""
        address = storage_address(tensor)
        value = self.add_value(tensor, self.leaf_roots.get(address, -1), -1)
        self.leaf_roots.setdefault(address, self.roots[value])
        is_parameter = tensor.is_leaf and tensor.requires_grad
        self.leaves[value] = Leaf(tensor, 0, tensor.shape, is_parameter)
        if is_parameter or not is_plain(tensor) or self.roots[value] != value:
            return value
        if storage_bytes(tensor) <= _COPIED and not tensor._is_zerotensor():
            self.before[value] = detached(tensor), copy_of(tensor.untyped_storage())
        return value

    def find_input(self, tensor: Tensor) -> int:
        """Return the value of an input."""
        value = self.known(tensor)
        if value is None:
            value = self.add_leaf(tensor)
            self.leaves[value].is_parameter = type(tensor) is Parameter
        self.input_roots.add(self.roots[value])
        return value

    def close(self) -> None:
        """End the forward: release what only recording needs."""
        self.ids, self.refs, self._reachable, self._owners = {}, [], None, ()
        self.parts, self.stored = {}, dict.fromkeys(self.stored)
        self.scope = None

    def known(self, tensor: Tensor) -> int | None:
        """Return the value of a tensor, None if this very tensor is not on the tape."""
        entry = self.ids.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def find(self, tensor: Tensor, reader: Any = None) -> int:
        """Return the value of ``tensor``; if it is not on the tape, find out where it comes from."""
        entry = self.ids.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            return entry[1]
        if type(tensor) is Parameter or (tensor.requires_grad and tensor.is_leaf) or self._is_reachable(tensor):
            return self.add_leaf(tensor)
        if (parameter := cast_of(tensor)) is not None:  # autocast had it in its cache
            cast = {"dtype": tensor.dtype}
            return self._add_entry(torch.ops.aten._to_copy.default, self.find(parameter), (), cast, tensor)
        if self.parts and (part := self._find_part(tensor)) is not None:
            return part
        if is_wrapper(tensor) and any(map(self._is_known, inner_tensors(tensor))):
            return self._add_wrapper(tensor, reader)
        if (base := self._in_same_storage(tensor)) is not None:  # made where no mode sees it: `x.data`
            layout = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
            return self._add_entry(torch.ops.aten.as_strided.default, base, layout, {}, tensor, self.roots[base])
        return self._unknown(tensor, reader)

    def _find_part(self, tensor: Tensor) -> int | None:
        """Return the value of a tensor that was taken out of a wrapper; add an entry for that."""
        reference, value, path = self.parts.get(id(tensor), (None, 0, ()))
        if reference is not None and reference() is tensor:
            entry = self.append(PART, (path,), [value], {})
            return self.add_value(tensor, self.roots[value], entry)
        return None

    def _is_known(self, tensor: Tensor) -> bool:
        """Return whether the tape has a tensor, or a part of it."""
        if self.known(tensor) is not None or id(tensor) in self.parts:
            return True
        if is_wrapper(tensor):
            return any(map(self._is_known, inner_tensors(tensor)))
        return self._in_same_storage(tensor) is not None

    def _add_wrapper(self, tensor: Tensor, reader: Any) -> int:
        """Add an entry that makes a wrapper around known tensors."""
        reads = [self.find(part, reader) for part in inner_tensors(tensor)]
        entry = self.append(WRAP, wrap_arguments(tensor), reads, {})
        value = self.add_value(tensor, -1, entry)
        self.joined.update(self.roots[read] for read in (*reads, value))
        return value

    def _unknown(self, tensor: Tensor, reader: Any) -> int:
        """Return the value of a tensor of unknown origin: a leaf, unless the region itself seems to have made it."""
        node = tensor.grad_fn
        is_older = node is not None and node._sequence_nr() < self._first_node
        op = getattr(reader, "op", "autograd")
        is_constant = op is torch.ops.aten.lift_fresh.default and self.scope is None  # `torch.tensor`, `from_numpy`
        if not is_older and tensor.numel() > _SMALL and not is_constant:
            self.fail(f"{op} reads a tensor that no op made and that is no input, parameter or module attribute")
            if self.scope is not None:
                value = self.add_value(tensor, -1, len(self.sites))
                self.scope.opaque.add(value)
                return value
            if reader is not None and reader.is_view:  # FSDP1 makes parameters of a gathered one
                return self.add_leaf(detached(tensor))
            value = self.add_leaf(tensor)
            self.of_unknown_origin.add(value)
            self.leaf_roots.pop(storage_address(tensor))
            self.leaves[value].tensor = None
            return value
        return self.add_leaf(tensor if node is None or is_older else detached(tensor))

    def adopt(self, tensor: Tensor, value: int) -> None:
        """Note that ``tensor``, filled in by a recomputation before the end of the forward, is ``value``."""
        self.refs[value] = weakref.ref(tensor)

    def _add_entry(self, op: Any, base: int, rest: Any, kwargs: Any, out: Tensor, root: int = -1) -> int:
        """Add an entry that makes ``out`` of the value ``base``."""
        site = self.table.sites_of("").get(id(op)) or self.table.add_site(op, "")
        entry = self.append(site, tuple(rest), [base], kwargs)
        return self.add_value(out, root, entry)

    def append(self, site: Any, args: Any, reads: list[int], kwargs: Any) -> int:
        """Append an entry; its results are the next values."""
        entry = len(self.sites)
        self.sites.append(site)
        self.args.append(args)
        self.reads.append(reads)
        self.firsts.append(len(self.roots))
        if kwargs:
            self.kwargs[entry] = kwargs
        return entry

    def in_memory_of(self, tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the living values in the memory of a tensor, the last first: its address is not used again."""
        of: Callable[[Tensor], Any] = storage_address if type(tensor) is Tensor else memory_of
        memory = of(tensor)
        for value in reversed(range(len(self.refs))):
            other = self.refs[value]()
            if other is not None and of(other) == memory:
                yield value, other

    def _in_same_storage(self, tensor: Tensor) -> int | None:
        if is_wrapper(tensor):
            return None
        return next((value for value, other in self.in_memory_of(tensor) if other.dtype is tensor.dtype), None)

    def _is_reachable(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares the storage of a leaf, or of a buffer or an attribute of the modules."""
        address = storage_address(tensor)
        if address in self.leaf_roots or id(tensor) in self.module_tensors:
            return True
        if self._reachable is None:
            modules = (module for owner in self._owners for module in owner.modules())
            self._reachable = {storage_address(one) for module in modules for one in _tensors_on(module)}
        return address in self._reachable

    # -- Writes

    def will_write(self, value: int) -> None:
        """Copy the contents of a leaf's storage before the region first writes to it."""
        root = self.roots[value]
        if root in self.writers or self.makers[root] >= 0:
            return
        tensor = self.leaves[root].tensor
        self.is_careful = True
        if (stored := self.stored.get(root)) is not None:
            stored.settle()  # its copy may still be on the way
        if root in self.before or root in self.of_unknown_origin:
            return
        if is_wrapper(tensor) or tensor.layout is not torch.strided:
            self.fail("the region writes to a tensor of a wrapper class from outside")
            return
        self.before[root] = detached(tensor), copy_of(tensor.untyped_storage())

    def is_written_since(self, value: int) -> bool:
        """Return whether a kept value was written to after the forward, or after what it has run of it."""
        return is_written(self.kept[value], self.kept_versions.get(value, 0))

    def wrote(self, value: int, entry: int) -> None:
        """Record that ``entry`` writes to the storage of ``value``."""
        root = self.roots[value]
        if root in self.joined and entry not in self.waits:
            self.fail(f"{self.sites[entry].op} writes to a wrapper that the region made, or to a tensor in one")
        self.fresh.discard(root)
        writers = self.writers.setdefault(root, [])
        if not writers or writers[-1] != entry:
            writers.append(entry)

    def last_write(self, value: int) -> int:
        """Return the last entry that writes to the storage of ``value`` and is not a wait, -1 if there is none."""
        writers = self.writers.get(self.roots[value])
        return next((entry for entry in reversed(writers) if entry not in self.waits), -1) if writers else -1

    def is_in_flight(self, value: int) -> bool:
        """Return whether a collective may not have ended that gives ``value`` its contents."""
        root = self.roots[value]
        entry = [self.makers[root], *self.writers.get(root, ())][-1]
        return entry >= 0 and entry not in self.waits and bool(self.sites[entry].is_collective)

    def writes_of(self, entry: int) -> list[int]:
        """Return the roots that ``entry`` writes to."""
        roots = (self.roots[value] for value in self.reads[entry])
        return [root for root in roots if entry in self.writers.get(root, ())]

    def results(self, entry: int) -> range:
        """Return the values that ``entry`` makes."""
        return range(self.firsts[entry], self.firsts[entry] + self.counts.get(entry, 1))


def _tensors_on(module: nn.Module) -> Iterator[Tensor]:
    """Return the tensors in attributes of a module, and of its parameters: a quantised weight has its scales there."""
    parameters = (vars(parameter) for parameter in module._parameters.values() if parameter is not None)
    return tensors_in([vars(module), *parameters], 6)


def cast_of(tensor: Tensor) -> Tensor | None:
    """Return the parameter of which ``tensor`` is an unmodified cast to another dtype; None if it is not one."""
    cast = tensor.grad_fn
    if cast is None or type(cast).__name__ != "ToCopyBackward0" or tensor._version:
        return None
    leaf: Tensor | None = getattr(cast.next_functions[0][0], "variable", None)
    if leaf is None or (leaf.shape, leaf.stride(), leaf.device) != (tensor.shape, tensor.stride(), tensor.device):
        return None
    return leaf


# -- Arguments of entries


@dataclass(slots=True, eq=False)
class Ref:
    """A value inside of an argument that holds several tensors, or of a keyword."""

    value: int


def as_refs(argument: Any, find: Callable[[Tensor], int], reads: list[int]) -> Any:
    """Return ``argument`` with ``Ref`` in place of tensors, also in lists, tuples and dicts; add them to ``reads``."""
    if isinstance(argument, Tensor):
        reads.append(find(argument))
        return Ref(reads[-1])
    if type(argument) in (list, tuple):
        return type(argument)([as_refs(part, find, reads) for part in argument])
    if type(argument) is dict:
        return {key: as_refs(part, find, reads) for key, part in argument.items()}
    return argument


def from_refs(argument: Any, values: Any) -> Any:
    """Return ``argument`` with tensors from ``values`` in place of ``Ref``."""
    cls = type(argument)
    if cls is Ref:
        return values[argument.value]
    if cls is list or cls is tuple:
        return cls([from_refs(part, values) for part in argument])
    if cls is dict:
        return {key: from_refs(part, values) for key, part in argument.items()}
    return argument
