"""What is held of a module that is saved as a whole: its result, arguments that it wrote to, and state that it left."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sac.errors import Problem, RegionError
from sac.outer_hooks import active_hooks
from sac.region.fingerprint import PLAIN, attributes_of
from sac.region.frame import Handle
from sac.region.module_state import bind, is_bound, is_own
from sac.region.python_state import ReachableState
from sac.region.rng import HostRandomState, RngSnapshot, generators_now, put_back, state_of, states_of
from sac.region.settings import Settings
from sac.region.undo import UndoStack
from sac.region.writes import give_history, writes_buffers_unseen
from sac.stores.saved_tensor import AtHand, SavedLeaves, SavedResult, compact
from sac.tensors import (
    copy_of,
    detached,
    equal,
    storage_address,
    storage_sizes,
    version_of,
    write_onto,
)
from sac.torch_private import tree_flatten, tree_leaves, tree_unflatten

# -- The saved leaves of a module's result


@dataclass(frozen=True, slots=True)
class Serving:
    """One recomputation's call of a saved module.

    ``given``: the leaves of its arguments. ``name`` is called with each kept value and the tensor that now holds it.
    ``fetched``: values that were fetched in advance, by the id of the leaf. ``storages`` and ``made``: the copies and
    the tensors made for the call so far.
    """

    given: list[Any]
    name: Callable[[SavedLeaf, torch.Tensor], None]
    fetched: AtHand
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    made: dict[SavedLeaf, torch.Tensor] = field(default_factory=dict)


class SavedLeaf(SavedResult):
    """One tensor of a result. A leaf that needs a gradient, usually a parameter, is external, and is held itself.

    ``indices``: value id and offset of each of its parts, where value ids are used.
    """

    __slots__ = ("indices", "is_external", "needs_grad")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.is_external = tensor.requires_grad and tensor.is_leaf and not tensor._is_view()
        self.needs_grad = tensor.requires_grad
        if self.is_external:
            self.value = tensor
        self.watched = self.held
        self.version = version_of(tensor)
        self.indices: list[tuple[int, int]] = []

    @property
    def held(self) -> torch.Tensor:
        """The tensor, during the forward."""
        assert isinstance(self.value, torch.Tensor)
        return self.value

    def made(self, serving: Serving) -> torch.Tensor:
        """Return the tensor for one recomputation: one tensor, however often the module returned it."""
        if self not in serving.made:
            serving.made[self] = tensor = self._tensor(serving)
            serving.name(self, tensor)
        return serving.made[self]

    def _tensor(self, serving: Serving) -> torch.Tensor:
        data = self.fetch(serving.fetched)
        if self.is_external:
            return data
        return self.leaf(self.own(detached(data), serving.storages))

    def write_to(self, target: torch.Tensor, serving: Serving) -> None:
        """Write this value to ``target``, as the in-place op left it in forward."""
        value = self.fetch(serving.fetched)
        if storage_address(value) != storage_address(target):
            write_onto(target, value)
        if self.needs_grad and not target.requires_grad:
            give_history(target, detached(value).requires_grad_())


class Argument:
    """An argument that the module returned as it is."""

    __slots__ = ("_position",)

    def __init__(self, position: int) -> None:
        self._position = position

    def made(self, serving: Serving) -> Any:
        """Return the recomputation's argument."""
        return serving.given[self._position]


class ArgumentView:
    """A returned view of one of the arguments."""

    __slots__ = ("_geometry", "_needs_grad", "_of", "_position")

    def __init__(self, tensor: torch.Tensor, argument: torch.Tensor, position: int) -> None:
        self._position = position
        self._of = argument.shape, argument.stride()
        self._geometry = tensor.shape, tensor.stride(), tensor.storage_offset() - argument.storage_offset()
        self._needs_grad = tensor.requires_grad

    def fits(self, given: list[Any]) -> bool:
        """Return whether the argument is laid out as in forward."""
        argument = given[self._position] if self._position < len(given) else None
        return type(argument) is torch.Tensor and (argument.shape, argument.stride()) == self._of

    def made(self, serving: Serving) -> Any:
        """Return the view of the recomputation's argument."""
        shape, stride, offset = self._geometry
        argument = serving.given[self._position]
        with torch.set_grad_enabled(self._needs_grad):
            return argument.as_strided(shape, stride, argument.storage_offset() + offset)


class HoldingObject:
    """An object with tensors in its attributes, for example a dataclass.

    Unlike a ``SavedObject`` among a region's arguments, whose tensors keep their graph, it gets other tensors.
    """

    __slots__ = ("_attributes", "_kind")

    def __init__(self, cls: type, attributes: dict[str, tuple[list[Any], Any]]) -> None:
        self._kind = cls
        self._attributes = attributes

    def made(self, serving: Serving) -> Any:
        """Return a new object of this class."""
        built: Any = object.__new__(self._kind)
        for name, (leaves, spec) in self._attributes.items():
            object.__setattr__(built, name, tree_unflatten([made(leaf, serving) for leaf in leaves], spec))
        return built


STANDING = (SavedLeaf, Argument, ArgumentView, HoldingObject)


def made(leaf: Any, serving: Serving) -> Any:
    """Return the recomputation's value for ``leaf`` of a result; a plain value is returned as it is."""
    return leaf.made(serving) if isinstance(leaf, STANDING) else leaf


# -- What one call of a saved module leaves behind: kept in forward, served in recomputation

# Note [What a saved module leaves behind]
#
# Autograd holds what the backward of the module reads. What the rest of the region reads is kept here, and
# recomputation serves it as if the module had run:
#  - a tensor that the module returned, without its graph: it comes back as a leaf that needs a gradient if the original
#    did;
#  - a returned argument, or a returned view of one: it is taken from the recomputation's arguments;
#  - writes to arguments: the values after the call are kept and written again;
#  - the states of random generators and of the user's state providers after the call;
#  - the contents of buffers and of other tensors that it can reach and has written to, and the buffers that it has
#    replaced: they are there until the recomputation ends, which began with those of the forward's start.
#
# Later in-place writes of the region to a kept tensor must not be part of what is served. A watched call sees such a
# write in advance (Note [Whole modules]) and copies first; the next calls copy as soon as the module returns. A write
# that was not seen in advance shows in the version counter: recomputation then runs the module again, unseen by the
# region.

_DEEPEST = 3  # nesting depth of objects that are searched for tensors
_OPAQUE = (nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)


def given_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the leaves of a call's arguments, in the same order for equal calls."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) and type(leaf) not in PLAIN:
            return tree_leaves((args, kwargs))
    return leaves


def versions_of(leaves: list[Any]) -> list[int]:
    """Return the version counter of each leaf that is a tensor, and 0 for the others."""
    return [version_of(leaf) if isinstance(leaf, torch.Tensor) else 0 for leaf in leaves]


def tensors_within(value: Any, depth: int = 0) -> list[torch.Tensor]:
    """Return the tensors in what a module returned, also those in attributes of objects."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif not (type(leaf) in PLAIN or isinstance(leaf, _OPAQUE) or depth == _DEEPEST):
            found += tensors_within(attributes_of(leaf), depth + 1)
    return found


class ModuleResult(SavedLeaves):
    """What one call of a saved module left behind; see the Note. ``where`` names the module in messages."""

    __slots__ = ("_known", "_leaves", "_spec", "_storages", "_views", "where", "writes")
    tensors: list[SavedLeaf]

    def __init__(self, out: Any, given: list[Any], before: list[int], where: str) -> None:
        self.where = where
        self.tensors = []
        self._known: dict[int, Any] = {
            id(leaf): Argument(position) for position, leaf in enumerate(given) if type(leaf) not in PLAIN
        }
        plain = [(position, leaf) for position, leaf in enumerate(given) if type(leaf) in (torch.Tensor, Parameter)]
        self._storages = {storage_address(leaf): (position, leaf) for position, leaf in plain}
        self._views: list[ArgumentView] = []
        self._spec: Any = None
        if isinstance(out, torch.Tensor):
            self._leaves = [self._keep(out, 0)]
        else:
            leaves, self._spec = tree_flatten(out)
            self._leaves = [self._keep(leaf, 0) for leaf in leaves]
        self.writes: list[tuple[int, SavedLeaf]] = [
            (position, SavedLeaf(leaf))
            for position, leaf in enumerate(given)
            if isinstance(leaf, torch.Tensor) and version_of(leaf) != before[position]
        ]
        self.tensors += [kept for _, kept in self.writes]
        self._known, self._storages = {}, {}

    def _keep(self, leaf: Any, depth: int) -> Any:
        """Return what is kept for one leaf of the result."""
        if type(leaf) in PLAIN:
            return leaf
        if id(leaf) in self._known:
            return self._known[id(leaf)]
        if isinstance(leaf, torch.Tensor):
            found = self._storages.get(storage_address(leaf)) if type(leaf) is torch.Tensor else None
            if found is not None and _lies_in(leaf, found[1]):
                self._views.append(ArgumentView(leaf, found[1], found[0]))
                return self._views[-1]
            self._known[id(leaf)] = kept = SavedLeaf(leaf)
            self.tensors.append(kept)
            return kept
        return leaf if isinstance(leaf, _OPAQUE) or depth == _DEEPEST else self._keep_object(leaf, depth)

    def _keep_object(self, leaf: Any, depth: int) -> Any:
        if isinstance(leaf, (dict, list, tuple, set, frozenset)):
            inside: Any = [*leaf.values()] if isinstance(leaf, dict) else [*leaf]
            if any(isinstance(one, torch.Tensor) for one in tree_leaves(inside)):
                raise RegionError(_hidden(leaf, self.where))
        attributes: dict[str, tuple[list[Any], Any]] = {}
        for name, value in attributes_of(leaf).items():
            leaves, spec = tree_flatten(value)
            attributes[name] = [self._keep(one, depth + 1) for one in leaves], spec
        parts = [part for leaves, _ in attributes.values() for part in leaves]
        return HoldingObject(type(leaf), attributes) if any(isinstance(part, STANDING) for part in parts) else leaf

    def serves(self, given: list[Any]) -> bool:
        """Return whether ``build`` gives what the module would return for these leaves of its arguments.

        It does not if a kept tensor was written to without a copy, if a needed value was released, or if the argument
        of a returned view has another layout than in forward.
        """
        if self.was_changed or any(kept.value is None for kept in self.tensors):
            return False
        return all(view.fits(given) for view in self._views)

    def compact(self) -> None:
        """Hold small parts of a large storage as copies, so that they do not pin all of it."""
        compact(kept for kept in self.tensors if type(kept.value) is torch.Tensor and not kept.is_external)

    def build(self, serving: Serving) -> Any:
        """Return what the module would have returned, and write to its arguments as it would have."""
        for position, written in self.writes:
            written.write_to(serving.given[position], serving)
            serving.name(written, serving.given[position])
        leaves = [made(leaf, serving) for leaf in self._leaves]
        return leaves[0] if self._spec is None else tree_unflatten(leaves, self._spec)


def _lies_in(tensor: torch.Tensor, argument: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view inside the range of ``argument``, which shares its storage."""
    if tensor.dtype != argument.dtype or any(one.is_conj() or one.is_neg() for one in (tensor, argument)):
        return False
    first, last = _span(argument)
    begin, end = _span(tensor)
    return type(argument) is torch.Tensor and first <= begin and end <= last


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset())
    return start, start + sum((size - 1) * int(step) for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _hidden(leaf: Any, where: str) -> Problem:
    return Problem(
        where=where,
        found=f"this module is saved as a whole and returned a {type(leaf).__qualname__}, in which tensors cannot be "
        "exchanged",
        fix="return tuples, lists, dicts, dataclasses or what is registered as a pytree, or save the ops in the module "
        "by rules with `ops`",
    )


# -- Side effects of a saved module on generators and Python state, repeated where the module does not run


def generators_at(settings: Settings) -> list[torch.Generator]:
    """Return the generators that a module of the region may draw from, as far as the region restores them."""
    return generators_now(settings) if settings.preserve_rng_state else []


class ModuleStates:
    """The state that ``modules`` change: made before they run, and closed after. ``reached``: the region's tensors.

    It then holds what changed: the states of generators, Python state (Note [Python state]), and tensors. Changes of
    trackers and of the user's state providers cannot be detected, so these are always restored.
    """

    __slots__ = ("_before", "_host_rng", "_moved", "_provided", "_reachable", "_settings", "_tensors", "_trackers")

    def __init__(
        self,
        modules: Sequence[nn.Module],
        reached: Sequence[torch.Tensor],
        generators: list[torch.Generator],
        settings: Settings,
    ) -> None:
        self._settings = settings
        self._reachable = reachable = ReachableState(modules)
        others = {id(one): one for one in (*reached, *reachable.tensors.values())}
        self._tensors = ReachedTensors(modules, others.values()) if settings.freeze_buffers else None
        self._host_rng: HostRandomState | None = None
        if settings.preserve_rng_state:
            generators = [*generators, *reachable.generators]
            self._host_rng = HostRandomState(reachable.others)
        self._before = states_of(generators)

    def close(self) -> None:
        """The module has run."""
        settings = self._settings
        self._moved = [(one, now) for one, was in self._before if not equal(now := state_of(one), was)]
        self._before = []
        self._reachable.keep_changes()
        if self._tensors is not None:
            self._tensors.keep_changes()
        if self._host_rng is not None:
            self._host_rng = self._host_rng.again() if self._host_rng.has_moved() else None
        trackers = settings.trackers and settings.preserve_rng_state
        self._trackers = RngSnapshot((), settings) if trackers else None
        self._provided = [(provider, provider.snapshot()) for provider in settings.providers]

    def put_back(self, stack: UndoStack) -> None:
        """Restore the state from after the module's call; that of tensors is taken back when ``stack`` is left."""
        self.put_tensors_back(stack)
        if self._trackers is not None:
            self._trackers.put_back()
        put_back(self._moved)
        if self._host_rng is not None:
            self._host_rng.put_back()
        self._reachable.put_back()
        for provider, state in self._provided:
            provider.restore(state)

    def put_tensors_back(self, stack: UndoStack) -> None:
        """Restore the tensors alone, for a module that has run again: its writes have been taken back."""
        if self._tensors is not None:
            self._tensors.enter_on(stack)


class ReachedTensors:
    """Buffers of ``modules``, and ``others`` that they can reach: which of them change, and what is in them then.

    A write that moves no version is found by what the modules' code names, see ``writes_buffers_unseen``.
    """

    __slots__ = ("_contents", "_others", "_tables", "_unseen", "_versions")

    def __init__(self, modules: Sequence[nn.Module], others: Iterable[torch.Tensor]) -> None:
        self._tables = [(held, {**held}) for owner in modules if (held := owner._buffers)]
        self._others = list(filter(is_own, others))
        self._unseen = bool(self._tables or self._others) and any(map(writes_buffers_unseen, modules))
        self._versions = {id(one): version_of(one) for one in self._all()}
        self._contents: dict[torch.UntypedStorage, torch.UntypedStorage] = {}

    def _all(self) -> list[torch.Tensor]:
        held = [one for table, _ in self._tables for one in table.values() if one is not None and is_own(one)]
        return [*held, *self._others]

    def keep_changes(self) -> None:
        """The modules have run: hold copies of what they have written to, and which buffers they have replaced."""
        found = list({id(one): one for one in self._all()}.values())
        changed = found if self._unseen else [one for one in found if self._versions.get(id(one)) != version_of(one)]
        storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in changed}
        self._contents = {storage: copy_of(storage) for storage in storages.values()}
        self._tables = [(table, {**table}) for table, before in self._tables if not is_bound(table, before)]
        self._others, self._versions = [], {}

    def enter_on(self, stack: UndoStack) -> None:
        """Restore what ``keep_changes`` has found; restore the current contents when ``stack`` is left."""
        for table, after in self._tables:
            stack.callback(bind, table, {**table})
            bind(table, after)
        for storage, content in self._contents.items():
            if storage.nbytes() == content.nbytes():
                stack.overwrite(storage, content)


# -- What autograd keeps inside of a saved module


def handles_inside(
    module: nn.Module,
    path: str,
    *,
    sizes: dict[int, int] | None = None,
    inputs: Collection[int] = (),
    handles: list[weakref.ref[Handle]] | None = None,
) -> saved_tensors_hooks:
    """Return the context in which autograd keeps handles; hooks around the region get the tensors instead.

    If ``sizes`` is given, the bytes of each storage that autograd keeps are recorded there, by address. It leaves out
    what exists anyway: parameters and buffers of ``module``, and the storages at ``inputs``. If ``handles`` is given,
    the handles are added, to be offloaded. ``path`` names the region.
    """
    theirs = active_hooks()
    own = {address for tensor in (*module.parameters(), *module.buffers()) for address in storage_sizes(tensor)}

    def pack(tensor: torch.Tensor) -> Any:
        if sizes is not None and not isinstance(tensor, Parameter):
            found = storage_sizes(tensor)
            sizes.update((address, found[address]) for address in found.keys() - own if address not in inputs)
        if theirs is not None:
            return theirs[0](tensor)
        handle = Handle(0, tensor)
        handle.keep(tensor)
        handle.is_external = isinstance(tensor, Parameter) or storage_address(tensor) in own
        if handles is not None:
            handles.append(weakref.ref(handle))
        return handle

    def unpack(packed: Any) -> torch.Tensor:
        if theirs is not None:
            return theirs[1](packed)
        value: torch.Tensor = packed.kept_value(path)
        return value

    return saved_tensors_hooks(pack, unpack)
