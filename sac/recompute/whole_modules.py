"""Modules that are saved as a whole: in recomputation, their saved results replace the module."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.ops.flops import flops_of
from sac.outer_hooks import active_packs, without_hooks, without_mode
from sac.policy.model import ALTERNATE, Decision
from sac.recompute import module_tracker as scope
from sac.recompute.module_tracker import TrackedForward
from sac.recompute.saved_results import (
    ModuleResult,
    ModuleStates,
    SavedLeaf,
    Serving,
    argument_state,
    generators_at,
    given_leaves,
    handles_inside,
    versions_of,
)
from sac.recompute.table import CallSite, DecisionTable, ResolvedRule, paths_up
from sac.region.frame import Handle, Handles, Progress, Recorder
from sac.region.inputs import RegionInputs
from sac.region.module_state import ModuleState
from sac.region.settings import Settings
from sac.region.undo import UndoStack
from sac.stores.saved_tensor import AtHand, Held, fetch_recomputed
from sac.tensors import copy_of, detached, overwrite, plain_address, storage_sizes, unchanged, version_of
from sac.torch_private import set_version_counters, transform_is_active, tree_leaves

if TYPE_CHECKING:
    from sac.recompute.op_trace import SavedFigures
    from sac.recompute.value_ids import ValueIds


# -- Whole modules that a rule saves: what one region call keeps of them

# Note [Whole modules]
#
# A rule with `module` and without `ops` decides on calls of modules. A module that it saves runs in forward as if there
# were no region: the region's saved-tensor hooks and its dispatch mode are off, all others stay on. So autograd keeps
# what it would keep anyway, and the region does not count it. Recomputation is given what the call left behind (Note
# [What a saved module leaves behind]); the key is the module's path and the number of the call at that path. Modules
# inside a saved one are part of it, and no rule reaches them. The instance-level forwards that report which module runs
# (`TrackedForward`) ask the active pass.
#
# A call of a region that has a recorder is *watched*: the region's dispatch mode stays on inside saved modules but
# decides nothing there. It sees their writes, copies the target first if it is kept, a parameter or an input of the
# region, and counts FLOPs. Hooks count what autograd keeps. The resulting `ModuleEvidence` holds for later calls with
# the same input signature. If no rule of a region matches ops, these later calls enter no dispatch mode (Note
# [Evidence]).
#
# Under replay the tape also has the ops inside a saved module, without decisions. What the module returned and what it
# wrote to are kept values, from which a replay starts. So nothing else that it leaves behind has to be held: if the
# call cannot be replayed, the module runs again, unseen by the region's saved-tensor hooks.
#
# A recomputation with early stop never reaches the modules after the last missing handle: what they left behind is
# freed when the forward ends.
#
# Example. A rule saves `attn` in a block `h = x + attn(norm1(x)); return h + mlp(norm2(h))`. In forward, autograd keeps
# the activations inside `attn`, and the region holds the module's result under ("attn", 0). Recomputation runs norm1,
# returns that result as a leaf instead of running `attn`, and runs the rest up to the last missing handle, inside
# `mlp`. If the rule saves `mlp` instead, the last missing handle belongs to norm2. The result of `mlp` is freed when
# the forward ends, and recomputation ends before `mlp`.

CallKey = tuple[str, int]  # path of a module, and the number of its call in the region


@dataclass(slots=True)
class ModuleEvidence:
    """What a watched call of a region has shown about its saved modules; holds for one input signature.

    ``copies``: calls of modules to whose results the region writes. ``bytes_inside``: what autograd keeps in saved
    modules, by rule. ``figures``: everything that such a call keeps. ``not_recomputed``: modules that recomputation
    never runs, by id. ``differentiated``: calls through which the region's own forward takes a gradient. Recomputation
    takes it again, through its own graph, so it must run those modules. Each call looks for them by itself; those that
    are known from earlier calls are not kept in the first place.
    """

    copies: set[CallKey] = field(default_factory=set)
    differentiated: set[CallKey] = field(default_factory=set)
    bytes_inside: dict[int, int] = field(default_factory=dict)
    figures: SavedFigures | None = None
    not_recomputed: frozenset[int] = frozenset()


class SavedModuleCall:
    """One call of a saved module: its rule, and what it left behind. ``flops``: only of a watched call.

    ``handles``: if it is offloaded, those that autograd holds inside of it. ``runs_again``: recomputation runs the
    module, because what the call left behind cannot be served. ``given``: addresses of the storages of its arguments.
    """

    __slots__ = (
        *("begins", "call_key", "flops", "given", "handles", "inside", "packs_before", "result", "rule"),
        *("runs_again", "states"),
    )

    def __init__(self, call_key: CallKey, rule: ResolvedRule, packs_before: int) -> None:
        self.call_key = call_key
        self.rule = rule
        self.packs_before = packs_before
        self.result: ModuleResult | None = None
        self.states: ModuleStates | None = None
        self.inside: dict[int, int] = {}
        self.handles: list[weakref.ref[Handle]] = []
        self.flops = 0
        self.begins = 0, 0  # on a tape: its first entry and its first value
        self.runs_again = False
        self.given: frozenset[int] = frozenset()

    def add(
        self, site: CallSite, rule: Any, decision: Decision, args: Any, kwargs: Any, out: Any, *, call: Any = None
    ) -> None:
        """Count the FLOPs of an op inside; see ``OpTraceRecorder.add``."""
        self.flops += flops_of(site.op, args, kwargs, out)

    def result_sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that is kept of its result, by address."""
        kept = self.result.tensors if self.result is not None else []
        return {address: size for one in kept if not one.is_external for address, size in one.sizes().items()}

    def run_again(self) -> None:
        """Let recomputation run the module, and release its result."""
        self.runs_again = True
        if self.result is not None:
            self.result.drop()

    def drop(self) -> None:
        """Release what it left behind."""
        self.result = self.states = None


class SavedModules:
    """What one region call keeps of the modules that its rules save as a whole; see Note [Whole modules].

    ``path`` names the region. ``evidence``: what an earlier call with such inputs has shown. ``is_watched``: whether a
    dispatch mode stays on inside saved modules. ``is_taped``: whether the region is replayed.
    """

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        settings: Settings,
        evidence: ModuleEvidence | None,
        *,
        is_watched: bool,
        is_taped: bool = False,
    ) -> None:
        self.is_taped = is_taped
        self.table = table
        self.path = path
        self.settings = settings
        self.is_watched = is_watched
        self.counts = evidence is None  # what autograd keeps in saved modules
        self.evidence = ModuleEvidence() if evidence is None else evidence
        self.calls: dict[CallKey, SavedModuleCall] = {}
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.inputs: frozenset[int] = frozenset()  # addresses of the storages of the region's inputs
        # Buffers of the region, and other tensors that it can reach; the addresses of those without a copy, and of
        # parameters, which a saved module may write to after the region has read them.
        self.reached: Sequence[torch.Tensor] = ()
        self.without_copy: frozenset[int] = frozenset()
        self.parameters: frozenset[int] = frozenset()
        self.owners: Sequence[nn.Module] = ()  # the region's modules
        self.reached_again: Any = None  # a survey's record of what these could reach when the forward began
        self._hooks: list[Any] = []  # in forward: hooks on the autograd nodes of results
        self._keepers: dict[int, SavedModuleCall] = {}  # in forward: by address of a storage

    def begin(self, inputs: RegionInputs) -> None:
        """The region is about to run on ``inputs``."""
        if self.is_watched:
            held = [kept for kept in inputs.tensors if kept.stored is None]
            self.inputs = frozenset(address for kept in held for address in kept.sizes())

    def set_start(self, module_state: ModuleState) -> None:
        """See ``Recorder.set_start``."""
        self.reached = module_state.watched()
        self.owners = module_state.owners
        self.reached_again, module_state.reached_again = module_state.reached_again, None  # some tensors have graphs
        if self.is_watched:
            self.parameters = module_state.parameter_addresses()
            self.without_copy = module_state.watched_without_copy() | self.parameters

    def add(self, call: SavedModuleCall) -> None:
        """A saved module has returned."""
        assert call.result is not None
        self.calls[call.call_key] = call
        self._keepers.update(dict.fromkeys(call.result.sizes(), call))
        if call.runs_again or call.call_key in self.evidence.differentiated:
            call.run_again()
        elif call.call_key in self.evidence.copies:
            self._copy(call)

    def watch_gradients(self, call: SavedModuleCall, out: Any) -> None:
        """Record whether a gradient passes through ``out``, the result of ``call``, before the forward is over."""

        def passes(grads: Any) -> None:
            self.evidence.differentiated.add(call.call_key)
            call.run_again()

        nodes = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._hooks += [node.register_prehook(passes) for node in nodes if node is not None]

    def addresses(self) -> set[int]:
        """Return the addresses of the held storages."""
        results = [call.result for call in self.calls.values() if call.result is not None]
        return {address for result in results for address in result.sizes()}

    def reached_addresses(self) -> set[int]:
        """Return the addresses of the storages of ``reached``."""
        return {address for one in self.reached for address in storage_sizes(one)}

    def before_write(self, address: int) -> None:
        """The region is about to write to the storage at ``address``."""
        call = self._keepers.pop(address, None)
        if call is not None:
            self._copy(call)
            self.evidence.copies.add(call.call_key)

    def _copy(self, call: SavedModuleCall) -> None:
        """The region writes to what ``call`` returned: hold a copy, unless that memory is in use under other names."""
        assert call.result is not None
        if call.result.returned & (call.given | self.reached_addresses()):
            call.run_again()
        else:
            call.result.copy()

    def close(self, last_missing: int, held: Iterable[int] = ()) -> None:
        """The forward is over: release what no recomputation up to ``last_missing`` needs.

        ``held``: addresses of other storages that are held, which are not counted here.
        """
        if self.counts and self.is_watched:
            self._count_inside({*self.addresses(), *held})
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._keepers, self.reached_again = [], {}, None
        for call in self.calls.values():
            if self.settings.early_stop and call.packs_before > last_missing:
                call.drop()
            elif call.result is not None:
                call.result.compact()

    def held(self) -> Held:
        """Yield each kept tensor, and what autograd holds inside of modules that are offloaded, with its rule."""
        for call in self.calls.values():
            for kept in call.result.tensors if call.result is not None else ():
                if not kept.is_external:
                    yield kept, call.rule.index
            for reference in call.handles:
                if (handle := reference()) is not None:
                    yield handle, call.rule.index

    def drop(self) -> None:
        """Release everything."""
        for call in self.calls.values():
            call.drop()

    def _count_inside(self, seen: set[int]) -> None:
        """Count what autograd keeps in saved modules: each storage once, without those that have been ``seen``."""
        found: defaultdict[int, int] = defaultdict(int)
        for call in self.calls.values():
            found[call.rule.index] += sum(size for address, size in call.inside.items() if address not in seen)
            seen.update(call.inside)
        self.evidence.bytes_inside = dict(found)


def saved_modules(owners: Iterable[nn.Module], table: DecisionTable) -> frozenset[int]:
    """Return the ids of the modules that recomputation never runs: saved modules and the modules inside them."""
    forwards = [(owner, getattr(owner.__dict__.get("forward"), "__self__", None)) for owner in owners]
    paths = {id(owner): forward.path for owner, forward in forwards if isinstance(forward, TrackedForward)}
    return frozenset(key for key, path in paths.items() if any(map(table.saves_whole, paths_up(path))))


# -- The passes that run saved modules in forward and serve them in recomputation


class Watcher(Protocol):
    """A region's dispatch mode in forward, as far as saved modules are concerned."""

    def passed_generators(self) -> list[torch.Generator]:
        """Return the generators that have been passed to ops of the region so far."""

    def watches(self, call: SavedModuleCall) -> AbstractContextManager[Any]:
        """Return the context in which the mode stays on in a saved module and decides nothing."""

    def returned(self, call: SavedModuleCall, forward: TrackedForward, given: list[Any], out: Any) -> None:
        """The module has returned ``out`` for the arguments ``given``; what is kept of it is not copied yet."""


class SavingPass:
    """The pass of a forward: runs saved modules outside the region, and keeps what they leave behind.

    ``count_packs`` returns how many tensors the region has packed so far. ``watcher`` is the active mode. ``hooks``:
    how many of the innermost saved-tensor hooks belong to the region.
    """

    def __init__(
        self, modules: SavedModules, count_packs: Callable[[], int], watcher: Watcher | None = None, *, hooks: int = 1
    ) -> None:
        self.modules = modules
        self.count_packs = count_packs
        self.watcher = watcher
        self._packs = active_packs(hooks)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._turns: defaultdict[int, int] = defaultdict(int)
        self._generators = generators_at(modules.settings)

    def call_key_of(self, path: str) -> tuple[CallKey, ResolvedRule] | None:
        """Return which call of the module at ``path`` begins, and the rule that saves it; None if none saves it."""
        modules = self.modules
        rule = modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        call_key = path, self._counts[path]
        self._counts[path] += 1
        if transform_is_active():
            return None  # `vmap` inside of the region: batched tensors cannot be kept
        modules.hits[rule.index] += 1
        if modules.table.saves_everything:
            return None
        if rule.rule.do == ALTERNATE:
            self._turns[rule.index] += 1
            if not rule.rule.keeps_turn(self._turns[rule.index] - 1):
                return None
        return call_key, rule

    def call(
        self,
        matched: tuple[CallKey, ResolvedRule],
        forward: TrackedForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a saved module."""
        modules, watcher = self.modules, self.watcher
        call = SavedModuleCall(*matched, self.count_packs())
        given = given_leaves(args, kwargs)
        if modules.is_taped:
            assert watcher is not None
            modules.calls[call.call_key] = call
            out = self._run(call, forward, args, kwargs)
            with without_mode(watcher):
                watcher.returned(call, forward, given, out)
            return out
        before = versions_of(given)
        passed = watcher.passed_generators() if watcher is not None else []
        generators, inside = [*self._generators, *passed], (*forward.module.modules(),)
        call.states = states = ModuleStates(
            inside, modules.owners, modules.reached, generators, modules.settings, modules.reached_again
        )
        arguments = argument_state(args, kwargs, given)
        try:
            out = self._run(call, forward, args, kwargs)
        except BaseException:
            states.close()
            call.runs_again, call.inside, modules.calls[call.call_key] = True, {}, call
            raise
        states.close()
        call.result = ModuleResult(out, given, before, _name(modules.path, forward))
        call.given = frozenset().union(*(storage_sizes(one) for one in given if isinstance(one, torch.Tensor)))
        if not (call.result.is_exact and states.are_restored) or (arguments is not None and arguments.has_changed(out)):
            call.runs_again = True
        if watcher is not None:
            watcher.returned(call, forward, given, out)
        modules.watch_gradients(call, out)
        with without_mode(watcher):  # copying a result is not an op of the region
            modules.add(call)
        return out

    def _inside(self, call: SavedModuleCall, module: nn.Module) -> AbstractContextManager[Any]:
        modules = self.modules
        sizes = call.inside if modules.counts and self.watcher is not None else None
        handles = call.handles if call.rule.decision is Decision.OFFLOAD else None
        if sizes is None and handles is None:
            return nullcontext()
        return handles_inside(module, modules.path, sizes=sizes, inputs=modules.inputs, handles=handles)

    def _run(
        self, call: SavedModuleCall, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        watched = self.watcher.watches(call) if self.watcher is not None else nullcontext()
        with without_hooks(self._packs), self._inside(call, forward.module), watched:
            return forward.run_unheard(args, kwargs)


class ServingPass:
    """The pass of a recomputation: serves what saved modules left behind instead of running them.

    ``undo`` is left when the recomputation ends. ``fetched`` is the result of ``fetch_recomputed``. ``mode`` is the
    active mode, ``labels`` are its value ids.
    """

    def __init__(
        self,
        modules: SavedModules,
        fetched: AtHand,
        undo: UndoStack,
        mode: Any = None,
        labels: ValueIds | None = None,
    ) -> None:
        self.modules = modules
        self._fetched = fetched
        self._undo = undo
        self._mode = mode
        self._labels = labels
        self._counts: defaultdict[str, int] = defaultdict(int)

    def call_key_of(self, path: str) -> CallKey | None:
        """Return which call of the module at ``path`` begins if forward saved that call; else None."""
        rule = self.modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        call_key = path, self._counts[path]
        self._counts[path] += 1
        return call_key if call_key in self.modules.calls else None

    def call(self, call_key: CallKey, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module returned in forward."""
        if self._mode is not None and self._mode.progress.done:
            self._mode.progress.stop_before(())  # results of modules after the last missing handle are freed
        if self.modules.is_taped:
            with saved_tensors_hooks(detached, unchanged), self._mode.inside(call_key[0]):
                return forward.run_unheard(args, kwargs)
        call = self.modules.calls[call_key]
        given = given_leaves(args, kwargs)
        result = call.result
        if result is not None and call.states is not None and not call.runs_again and result.serves(given):
            call.states.put_back(self._undo)
            with without_mode(self._mode):
                return result.build(Serving(given, self._name_again, self._fetched))
        if result is not None and result.was_changed:
            self.modules.evidence.copies.add(call_key)
        before = versions_of(given)
        try:
            out = self._run_again(forward, args, kwargs)
        finally:
            if call.states is not None:
                call.states.put_tensors_back(self._undo)
        if result is not None:
            again = ModuleResult(out, given, before, result.where)
            for kept, former in zip(again.tensors, result.tensors, strict=True):
                if isinstance(kept.value, torch.Tensor):
                    self._name_again(former, kept.value)
        return out

    def _name_again(self, kept: SavedLeaf, tensor: torch.Tensor) -> None:
        if self._labels is not None:
            self._labels.name_input_again(tensor, kept.indices)

    def _run_again(self, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module unseen by the region; its buffers do not advance."""
        buffers = [*forward.module.buffers()]
        storages = {one: one.untyped_storage() for one in buffers if plain_address(one) is not None}
        before_versions = {one: version_of(one) for one in (*storages, *self.modules.reached)}
        with without_mode(self._mode), saved_tensors_hooks(detached, unchanged):
            # Copy all of them: batch norms write to theirs without raising version counters.
            before = {one: copy_of(storage) for one, storage in storages.items()}
            try:
                out = forward.run_unheard(args, kwargs)
            finally:
                for one, storage in storages.items():
                    overwrite(storage, before[one])
                moved = {one: was for one, was in before_versions.items() if version_of(one) != was}
                if moved and set_version_counters is not None:  # autograd may have saved them inside of the module
                    set_version_counters((*moved,), (*moved.values(),))
        return out


def _name(region: str, forward: TrackedForward) -> str:
    return ".".join(filter(None, (region, forward.path))) or type(forward.module).__name__


# -- The recorder of a region in which only whole modules are saved: no dispatch mode in either pass


class ModuleRecorder(Recorder):
    """Saves whole modules in one region call, using the evidence of a watched call; the ``Recorder`` of a frame."""

    sees_ops = False

    def __init__(self, modules: SavedModules, not_recomputed: frozenset[int]) -> None:
        self.modules = modules
        self.offloads = modules.table.offloads
        self.not_recomputed = not_recomputed

    def begin(self, inputs: RegionInputs) -> None:
        """The region is about to run on ``inputs``."""
        self.modules.begin(inputs)

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """See ``Recorder``."""
        self._handles = handles
        self.modules.set_start(module_state)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which saved modules run outside the region."""
        return _active(SavingPass(self.modules, self._handles.__len__))

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether no module was saved."""
        self.modules.close(last_missing)
        return not self.modules.calls

    def held(self) -> Held:
        """See ``SavedModules.held``."""
        return self.modules.held()

    @contextmanager
    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> Iterator[None]:
        """Return the context in which saved modules are served."""
        with UndoStack() as undo, _active(ServingPass(self.modules, fetch_recomputed(self.modules.held()), undo)):
            yield

    def drop(self) -> None:
        """Release everything."""
        self.modules.drop()


@contextmanager
def _active(modules: SavingPass | ServingPass) -> Iterator[None]:
    outer = scope.enter(None, modules)
    try:
        yield
    finally:
        scope.leave(outer)
