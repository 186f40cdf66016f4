"""What is held of a module that is saved as a whole: its result, arguments that it wrote to, and state that it left."""

from __future__ import annotations

import contextvars
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
from sac.region.ambient import GENERATOR, HOST, BackendFlags, surroundings_now
from sac.region.fingerprint import PLAIN, attributes_of
from sac.region.frame import Handle
from sac.region.inputs import SavedObject, is_kept_object
from sac.region.module_state import bind, is_bound, is_own
from sac.region.python_state import ReachableState
from sac.region.rng import HostRandomState, RngSnapshot, generators_now, put_back, state_of, states_of
from sac.region.settings import Settings
from sac.region.tables import ModuleTables
from sac.region.undo import UndoStack
from sac.region.writes import give_history, writes_buffers_unseen
from sac.stores.saved_tensor import AtHand, SavedLeaves, SavedResult, compact
from sac.tensors import (
    copy_of,
    detached,
    equal,
    is_plain,
    last_offset,
    lazy_bits,
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
    ``fetched``: values that were fetched in advance, by the id of the leaf. ``storages`` and ``made``: the copies, and
    the tensors and objects, made for the call so far.
    """

    given: list[Any]
    name: Callable[[SavedLeaf, torch.Tensor], None]
    fetched: AtHand
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    made: dict[Any, Any] = field(default_factory=dict)


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
        """Return the tensor for one recomputation."""
        tensor = self.fetch(serving.fetched)
        if not self.is_external:
            tensor = self.leaf(self.own(detached(tensor), serving.storages))
        serving.name(self, tensor)
        return tensor

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
        return is_plain(argument) and (argument.shape, argument.stride()) == self._of

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
        built: Any = new_object(self._kind)
        for name, (leaves, spec) in self._attributes.items():
            object.__setattr__(built, name, tree_unflatten([made(leaf, serving) for leaf in leaves], spec))
        return built


def new_object(cls: type) -> Any:
    """Return an object of ``cls`` without attributes; raises ``TypeError`` if making one takes arguments."""
    try:
        return object.__new__(cls)
    except TypeError:  # it has a base in C
        return cls.__new__(cls)  # type: ignore[call-overload]


STANDING = (SavedLeaf, Argument, ArgumentView, HoldingObject)


def made(leaf: Any, serving: Serving) -> Any:
    """Return the recomputation's value for ``leaf`` of a result: one tensor or object, however often it was returned.

    A plain value is returned as it is.
    """
    if isinstance(leaf, SavedObject):
        return serving.made.setdefault(leaf, leaf.rebuild())
    if not isinstance(leaf, STANDING):
        return leaf
    if leaf not in serving.made:
        serving.made[leaf] = leaf.made(serving)
    return serving.made[leaf]


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
#
# The module also runs again where its call left something behind that cannot be served:
#  - it raised, and the region went on;
#  - it changed an object or a container among its arguments: in recomputation other objects stand there;
#  - it returned a container that it was given, or one container twice;
#  - it changed parameters, whether they need a gradient, `training` flags, context variables or flags of the process;
#  - the region writes to what it returned, and the same memory is that of an argument or of a buffer.

_DEEPEST = 3  # nesting depth of objects that are searched for tensors
_MOST_NESTED = 100  # depth of a result whose containers are looked at
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
    """What one call of a saved module left behind; see the Note. ``where`` names the module in messages.

    ``is_exact``: whether ``build`` can make all objects of the result. ``returned``: the addresses of the storages that
    are kept of the result.
    """

    __slots__ = ("_known", "_leaves", "_spec", "_storages", "_views", "is_exact", "returned", "where", "writes")
    tensors: list[SavedLeaf]

    def __init__(self, out: Any, given: list[Any], before: list[int], where: str) -> None:
        self.where = where
        self.tensors = []
        self.is_exact = True
        self._known: dict[int, Any] = {
            id(leaf): Argument(position) for position, leaf in enumerate(given) if type(leaf) not in PLAIN
        }
        self._storages: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for position, leaf in enumerate(given):
            if is_plain(leaf):
                self._storages.setdefault(storage_address(leaf), []).append((position, leaf))
        self._views: list[ArgumentView] = []
        self._spec: Any = None
        if isinstance(out, torch.Tensor):
            self._leaves = [self._keep(out, 0)]
        else:
            leaves, self._spec = tree_flatten(out)
            self.is_exact = _Containers(out).is_tree
            self._leaves = [self._keep(leaf, 0) for leaf in leaves]
        self.returned = frozenset(self.sizes())
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
            for position, argument in self._storages.get(storage_address(leaf), ()) if is_plain(leaf) else ():
                if _lies_in(leaf, argument):
                    self._views.append(ArgumentView(leaf, argument, position))
                    return self._views[-1]
            self._known[id(leaf)] = kept = SavedLeaf(leaf)
            self.tensors.append(kept)
            return kept
        if hasattr(type(leaf), "__next__"):
            self.is_exact = False  # the region draws from it
        elif not isinstance(leaf, _OPAQUE) and depth != _DEEPEST:
            self._known[id(leaf)] = leaf = self._keep_object(leaf, depth)
        return leaf

    def _keep_object(self, leaf: Any, depth: int) -> Any:
        if isinstance(leaf, (dict, list, tuple, set, frozenset)):
            inside: Any = [*leaf.values()] if isinstance(leaf, dict) else [*leaf]
            if any(isinstance(one, torch.Tensor) for one in tree_leaves(inside)):
                raise RegionError(_hidden(leaf, self.where))
        attributes: dict[str, tuple[list[Any], Any]] = {}
        for name, value in attributes_of(leaf).items():
            leaves, spec = tree_flatten(value)
            attributes[name] = [self._keep(one, depth + 1) for one in leaves], spec
        if any(isinstance(part, STANDING) for leaves, _ in attributes.values() for part in leaves):
            try:
                new_object(type(leaf))
            except TypeError:
                self.is_exact = False
            return HoldingObject(type(leaf), attributes)
        return SavedObject(leaf) if is_kept_object(leaf) else leaf

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
        compact(kept for kept in self.tensors if is_plain(kept.value) and not kept.is_external)

    def build(self, serving: Serving) -> Any:
        """Return what the module would have returned, and write to its arguments as it would have."""
        for position, written in self.writes:
            written.write_to(serving.given[position], serving)
            serving.name(written, serving.given[position])
        leaves = [made(leaf, serving) for leaf in self._leaves]
        return leaves[0] if self._spec is None else tree_unflatten(leaves, self._spec)


def _lies_in(tensor: torch.Tensor, argument: torch.Tensor) -> bool:
    """Return whether ``tensor`` is a view inside the range of ``argument``, which shares its storage."""
    if tensor.dtype != argument.dtype or lazy_bits(tensor) or lazy_bits(argument):
        return False
    begin = int(tensor.storage_offset()) - int(argument.storage_offset())
    end = begin + last_offset(tensor.shape, tensor.stride())
    return begin >= 0 and end <= last_offset(argument.shape, argument.stride())


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
    """The state that ``modules`` change: made before they run, and closed after.

    ``owners``: all modules of the region. ``reached``: its tensors. After ``close`` it holds what changed: the states
    of generators, Python state (Note [Python state]), and tensors. Changes of trackers and of the user's state
    providers cannot be detected, so these are always restored. ``are_restored``: whether nothing else has changed;
    ``written``: the parameters that were written to.
    """

    __slots__ = (
        *("_before", "_flags", "_host_rng", "_known", "_knows_default", "_moved", "_parameters", "_provided"),
        *("_reachable", "_settings", "_tensors", "_trackers", "_training", "_variables", "are_restored", "written"),
    )

    def __init__(
        self,
        modules: Sequence[nn.Module],
        owners: Sequence[nn.Module],
        reached: Sequence[torch.Tensor],
        generators: list[torch.Generator],
        settings: Settings,
        again: Any = None,
    ) -> None:
        """``again``: a survey's record of what ``owners`` could reach when the region began; None if there is none."""
        self._settings = settings
        count = len(owners)
        owners = tuple(dict.fromkeys((*owners, *modules)))
        is_as_then = again is not None and len(owners) == count and again.holds()
        self._reachable = reachable = ReachableState(
            owners, found=ModuleTables(None, reached=again) if is_as_then else None
        )
        held = (one for owner in owners for one in owner._parameters.values() if one is not None)
        self._parameters = [(one, one.requires_grad, version_of(one)) for one in held]
        self._training = [(owner, owner.training) for owner in owners]
        self._known = known = surroundings_now()
        self._variables = contextvars.copy_context()
        self._flags = BackendFlags() if known is None else known.flags
        self.are_restored = False
        self.written: list[torch.Tensor] = []
        others = {id(one): one for one in (*reached, *reachable.tensors.values())}
        self._tensors = ReachedTensors(modules, others.values()) if settings.freeze_buffers else None
        self._host_rng: HostRandomState | None = None
        if settings.preserve_rng_state:
            generators = [*generators, *reachable.generators]
            is_known = known is not None and not reachable.others
            self._host_rng = known.host if known is not None and is_known else HostRandomState(reachable.others)
        default = torch.default_generator
        self._knows_default = known is not None and default in generators and known.same(GENERATOR) != 0
        if self._knows_default:
            generators = [one for one in generators if one is not default]
        self._before = states_of(generators)

    def close(self) -> None:
        """The module has run."""
        settings = self._settings
        self.written = [one for one, _, version in self._parameters if version_of(one) != version]
        self.are_restored = (
            not self.written
            and all(one.requires_grad == was for one, was, _ in self._parameters)
            and all(owner.training == was for owner, was in self._training)
            and _is_same_context(contextvars.copy_context(), self._variables)
            and not self._flags.have_changed()
        )
        self._parameters, self._training, self._variables = [], [], contextvars.Context()
        self._moved = [(one, now) for one, was in self._before if not equal(now := state_of(one), was)]
        known, self._known, self._before = self._known, None, []
        same = 0 if known is None else known.same((GENERATOR if self._knows_default else 0) | HOST)
        if self._knows_default and not same & GENERATOR:
            self._moved.insert(0, (torch.default_generator, state_of(torch.default_generator)))
        self._reachable.keep_changes()
        if self._tensors is not None:
            self._tensors.keep_changes()
        if self._host_rng is not None:
            is_same = known is not None and self._host_rng is known.host and same & HOST
            self._host_rng = self._host_rng.again() if not is_same and self._host_rng.has_moved() else None
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


def _is_same_context(one: contextvars.Context, other: contextvars.Context) -> bool:
    return len(one) == len(other) and all(other.get(variable, one) is value for variable, value in one.items())


class ArgumentState:
    """What a module can change in its arguments, apart from the tensors among their leaves ``given``.

    Recomputation has other objects there, so a change of them cannot be restored.
    """

    __slots__ = ("_containers", "_draws", "_generators", "_others", "_reachable", "_tensors")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Any]) -> None:
        known = {id(leaf) for leaf in given}
        self._containers = _Containers((args, kwargs)).lists
        self._draws = any(hasattr(type(leaf), "__next__") for leaf in given)  # iterators, from which it may draw
        self._reachable = found = ReachableState((), (args, kwargs))
        self._tensors = [(one, version_of(one)) for key, one in found.tensors.items() if key not in known]
        self._generators = states_of(found.generators)
        self._others = HostRandomState(found.others) if found.others else None

    def has_changed(self, out: Any) -> bool:
        """Return whether the module has changed something there, or has returned a container that it was given."""
        return (
            self._draws
            or self._reachable.has_changed()
            or any(version_of(one) != version for one, version in self._tensors)
            or any(not equal(state_of(one), state) for one, state in self._generators)
            or (self._others is not None and self._others.has_moved())
            or not self._containers.isdisjoint(_Containers(out).lists)
        )


def argument_state(args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Any]) -> ArgumentState | None:
    """Return what a module can change in its arguments; None if they consist of tensors and plain values."""
    return None if all(map(_is_fixed, (*args, *kwargs.values()))) else ArgumentState(args, kwargs, given)


def _is_fixed(value: Any) -> bool:
    cls = type(value)
    return cls in PLAIN or isinstance(value, torch.Tensor) or (cls is tuple and all(map(_is_fixed, value)))


class _Containers:
    """The lists and dicts in a structure, also those in attributes of objects.

    ``lists``: their ids. ``is_tree``: whether none of them occurs twice, and no object inside of itself.
    """

    __slots__ = ("_above", "_objects", "is_tree", "lists")

    def __init__(self, structure: Any) -> None:
        self.lists: set[int] = set()
        self._objects: set[int] = set()
        self._above: list[int] = []
        self.is_tree = True
        self._walk(structure)

    def _walk(self, value: Any) -> None:
        known = self.lists
        if isinstance(value, (list, tuple, dict)):
            parts: Any = [*value.values()] if isinstance(value, dict) else value
        elif type(value) in PLAIN or not is_kept_object(value):
            return
        else:
            parts, known = [*attributes_of(value).values()], self._objects
        if id(value) in known or len(self._above) == _MOST_NESTED:
            self.is_tree = self.is_tree and known is self._objects and id(value) not in self._above
            return
        if not isinstance(value, tuple):
            known.add(id(value))
        self._above.append(id(value))
        for part in parts:
            self._walk(part)
        self._above.pop()


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
