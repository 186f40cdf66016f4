"""Modules that are saved as a whole: their results stand in for the module in recomputation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.outer_hooks import OuterPacked, PackHooks, active_packs, without_hooks, without_mode
from sac.policy.model import ALTERNATE
from sac.recompute import module_tracker as scope
from sac.recompute.module_tracker import TrackedForward
from sac.recompute.saved_results import (
    ModuleResult,
    ModuleStates,
    SavedLeaf,
    Serving,
    counted,
    generators_at,
    given_leaves,
    versions_of,
)
from sac.recompute.table import DecisionTable, ResolvedRule, paths_up
from sac.region.frame import Handle, Progress
from sac.region.inputs import RegionInputs
from sac.region.settings import Settings
from sac.tensors import copy_of, detached, overwrite, plain_address, storage_sizes, version_of
from sac.torch_private import tree_leaves

if TYPE_CHECKING:
    from sac.recompute.op_trace import SavedFigures
    from sac.recompute.value_ids import ValueIds


# -- Modules that a rule saves as a whole: what one region call keeps of them, and how its recomputation goes
#    without

# Note [Whole modules]
#
# A rule with `module` and without `ops` decides on calls of modules. What it saves runs in forward as if there were no
# region: the region's saved-tensor hooks and its dispatch mode are off, those of others stay on. So autograd keeps what
# it would keep, and nobody counts it. Recomputation is given what the call left behind (Note [What a saved module
# leaves behind]), by the module's path and the number of the call of that path. Modules inside a saved one are part of
# it, and no rule reaches them. The forwards that tell which module runs (`TrackedForward`) ask the pass that is active.
#
# The first call of a region on a sort of inputs is *watched*: the region's dispatch mode stays on inside saved modules,
# and decides nothing there. It sees what they write to, copies it before if it is kept or an input of the region, and
# counts FLOPs; hooks count what autograd keeps. What it has seen (`ModuleEvidence`) holds for later such calls. If no
# rule of a region speaks of ops, those enter no dispatch mode at all (Note [Evidence]).
#
# A recomputation that is stopped early never comes to the modules after the last missing handle: what they have left
# behind is let go when forward is over.

Place = tuple[str, int]  # path of a module, and which call of it in the region


@dataclass(slots=True)
class ModuleEvidence:
    """What a watched call of a region has shown of its saved modules; holds for inputs of one sort.

    ``copies``: calls of modules to whose results the region writes. ``bytes_inside``: what autograd keeps in saved
    modules, by rule. ``figures``: what such a call keeps in all. ``apart``: modules that recomputation never runs, by
    id. ``keeps_watching``: a saved module writes to what the region keeps for itself, so that every call is watched.
    ``differentiated``: calls through which the region's own forward takes a gradient. Recomputation takes it again,
    through a graph of its own: it has to run those modules.
    """

    copies: set[Place] = field(default_factory=set)
    differentiated: set[Place] = field(default_factory=set)
    bytes_inside: dict[int, int] = field(default_factory=dict)
    figures: SavedFigures | None = None
    not_recomputed: frozenset[int] = frozenset()
    keeps_watching: bool = False


class SavedModuleCall:
    """One call of a saved module: its rule, and what it left behind. ``flops``: of a call that was watched."""

    __slots__ = ("call_key", "flops", "inside", "packs_before", "result", "rule", "states")

    def __init__(self, call_key: Place, rule: ResolvedRule, packs_before: int) -> None:
        self.call_key = call_key
        self.rule = rule
        self.packs_before = packs_before
        self.result: ModuleResult | None = None
        self.states: ModuleStates | None = None
        self.inside: dict[int, int] = {}
        self.flops = 0

    def result_sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that is kept of its result, by its address."""
        kept = self.result.kept if self.result is not None else []
        tensors = [one.data for one in kept if isinstance(one.data, torch.Tensor) and not one.is_external]
        return {address: size for tensor in tensors for address, size in storage_sizes(tensor).items()}

    def drop(self) -> None:
        """Let go what it left behind."""
        self.result = self.states = None


class SavedModules:
    """What one call of a region keeps of the modules that its rules save as a whole; see Note [Whole modules].

    ``path`` names the region. ``learnt``: what an earlier call on such inputs has shown; None: this one is watched.
    """

    def __init__(self, table: DecisionTable, path: str, settings: Settings, evidence: ModuleEvidence | None) -> None:
        self.table = table
        self.path = path
        self.settings = settings
        self.is_watched = evidence is None or evidence.keeps_watching
        self.evidence = ModuleEvidence() if evidence is None else evidence
        self.calls: dict[Place, SavedModuleCall] = {}
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.inputs: frozenset[int] = frozenset()  # addresses of the storages of the region's inputs
        self._hooks: list[Any] = []  # in forward: on the nodes of results
        self._owners: dict[int, SavedModuleCall] = {}  # in forward: address of a storage that is kept -> by which call

    def begin(self, inputs: RegionInputs) -> None:
        """The region is about to run on ``inputs``."""
        if self.is_watched:
            held = [kept.data for kept in inputs.tensors if isinstance(kept.data, torch.Tensor) and kept.stored is None]
            self.inputs = frozenset(address for tensor in held for address in storage_sizes(tensor))

    def add(self, call: SavedModuleCall) -> None:
        """A saved module has returned."""
        assert call.result is not None
        self.calls[call.call_key] = call
        self._owners.update(dict.fromkeys(call.result.addresses(), call))
        if call.call_key in self.evidence.differentiated:
            call.result.drop()
        elif call.call_key in self.evidence.copies:
            call.result.copy()

    def watch_gradients(self, call: SavedModuleCall, out: Any) -> None:
        """Notice if a gradient passes through ``out``, the result of ``call``, before the forward is over."""

        def passes(grads: Any) -> None:
            self.evidence.differentiated.add(call.call_key)
            if call.result is not None:
                call.result.drop()

        nodes = [leaf.grad_fn for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self._hooks += [node.register_prehook(passes) for node in nodes if node is not None]

    def addresses(self) -> set[int]:
        """Return the addresses of the storages that are held."""
        results = [call.result for call in self.calls.values() if call.result is not None]
        return {address for result in results for address in result.addresses()}

    def before_write(self, address: int) -> None:
        """The region is about to write to the storage at ``address``."""
        call = self._owners.pop(address, None)
        if call is not None and call.result is not None:
            call.result.copy()
            self.evidence.copies.add(call.call_key)

    def close(self, last_missing: int) -> None:
        """The forward is over: let go what no recomputation up to ``last_missing`` asks for."""
        if self.is_watched:
            self._count_inside()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._owners = [], {}
        for call in self.calls.values():
            if self.settings.early_stop and call.packs_before > last_missing:
                call.drop()
            elif call.result is not None:
                call.result.compact()

    @property
    def holds(self) -> bool:
        """Whether there is something that a recomputation has to be given."""
        return any(call.result is not None for call in self.calls.values())

    def held(self) -> Iterable[tuple[SavedLeaf, ResolvedRule]]:
        """Yield each kept tensor with the rule that keeps it."""
        for call in self.calls.values():
            for kept in call.result.kept if call.result is not None else ():
                yield kept, call.rule

    def fetch_recomputed(self) -> dict[int, torch.Tensor]:
        """Return, by the id of each kept leaf, what an outer region runs again to give back.

        Called before a recomputation makes anything of its own active: the ops and modules of the outer region are not
        those of this one.
        """
        parked = [(kept, kept.data) for kept, _ in self.held() if isinstance(kept.data, OuterPacked)]
        return {id(kept): data.fetch() for kept, data in parked if data.is_recomputed}

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""
        for kept, _ in self.held():
            kept.pack_with_outer_hooks(hooks)

    def drop(self) -> None:
        """Let everything go."""
        for call in self.calls.values():
            call.drop()

    def _count_inside(self) -> None:
        """Add up what autograd keeps in saved modules, each storage once, and no result that is counted by itself."""
        seen = self.addresses()
        found: defaultdict[int, int] = defaultdict(int)
        for call in self.calls.values():
            found[call.rule.index] += sum(size for address, size in call.inside.items() if address not in seen)
            seen.update(call.inside)
        self.evidence.bytes_inside = dict(found)


def saved_modules(owners: Iterable[nn.Module], table: DecisionTable) -> frozenset[int]:
    """Return, by id, which of a region's modules never run in its recomputation: those saved, and those inside them."""
    forwards = [(owner, getattr(owner.__dict__.get("forward"), "__self__", None)) for owner in owners]
    paths = {id(owner): forward.path for owner, forward in forwards if isinstance(forward, TrackedForward)}
    return frozenset(key for key, path in paths.items() if any(map(table.saves_whole, paths_up(path))))


# -- How modules that are saved as a whole run in forward, and are answered for in recomputation

_SMALL_BUFFER = 1 << 9  # bytes; of larger ones a region that runs without a recorder has no copy


class Watcher(Protocol):
    """A region's dispatch mode in forward, as far as saved modules are concerned."""

    def passed_generators(self) -> list[torch.Generator]:
        """Return the generators that ops of the region have been passed so far."""

    def watches(self, call: SavedModuleCall) -> AbstractContextManager[Any]:
        """Return the context in which the mode stays on in a saved module, and decides nothing."""

    def returned(self, call: SavedModuleCall, forward: TrackedForward, out: Any) -> None:
        """The module has returned ``out``; what is kept of it is no copy yet."""


class SavingPass:
    """What a forward makes active: runs saved modules outside of the region, and keeps what they leave behind.

    ``count_packs`` tells how many tensors the region has packed so far, ``watcher`` is the mode that is on. ``hooks``:
    how many of the innermost saved-tensor hooks are the region's.
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

    def call_key_of(self, path: str) -> tuple[Place, ResolvedRule] | None:
        """Return which call of the module at ``path`` begins, and the rule that saves it; None if none does."""
        modules = self.modules
        rule = modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        call_key = path, self._counts[path]
        self._counts[path] += 1
        modules.hits[rule.index] += 1
        if modules.table.saves_everything:
            return None
        if rule.rule.do == ALTERNATE:
            self._turns[rule.index] += 1
            if self._turns[rule.index] % 2 == 0:
                return None
        return call_key, rule

    def call(
        self,
        call_key: tuple[Place, ResolvedRule],
        forward: TrackedForward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a saved module."""
        modules = self.modules
        call = SavedModuleCall(*call_key, self.count_packs())
        given = given_leaves(args, kwargs)
        before = versions_of(given)
        passed = self.watcher.passed_generators() if self.watcher is not None else []
        states = ModuleStates((*forward.module.modules(),), [*self._generators, *passed], modules.settings)
        with without_hooks(self._packs):
            out = self._run(call, forward, args, kwargs)
        states.close()
        call.states = states
        call.result = ModuleResult(out, given, before, _name(modules.path, forward))
        if self.watcher is not None:
            self.watcher.returned(call, forward, out)
        if modules.is_watched:
            modules.watch_gradients(call, out)
        with without_mode(self.watcher):  # a copy that is made of a result is not an op of the region
            modules.add(call)
        return out

    def _run(
        self, call: SavedModuleCall, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.watcher is None:
            return forward.run_unheard(args, kwargs)
        if not self.modules.is_watched:
            with without_mode(self.watcher):
                return forward.run_unheard(args, kwargs)
        with self.watcher.watches(call), counted(call.inside, forward.module, self.modules.inputs):
            return forward.run_unheard(args, kwargs)


class ServingPass:
    """What a recomputation makes active: gives out what saved modules left behind, and does not run them.

    ``fetched``: what ``fetch_recomputed`` has returned. ``mode`` is the one that is on, ``labels`` are its labels.
    """

    def __init__(
        self, modules: SavedModules, fetched: dict[int, torch.Tensor], mode: Any = None, labels: ValueIds | None = None
    ) -> None:
        self.modules = modules
        self._fetched = fetched
        self._mode = mode
        self._labels = labels
        self._counts: defaultdict[str, int] = defaultdict(int)

    def call_key_of(self, path: str) -> Place | None:
        """Return which call of the module at ``path`` begins, if forward has saved that; else None."""
        rule = self.modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        call_key = path, self._counts[path]
        self._counts[path] += 1
        return call_key if call_key in self.modules.calls else None

    def call(self, call_key: Place, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module returned in forward."""
        if self._mode is not None and self._mode.progress.done:
            self._mode.progress.stop_before(())  # what modules after the last missing handle left behind is let go
        call = self.modules.calls[call_key]
        given = given_leaves(args, kwargs)
        if call.result is None or call.states is None:
            return self._run_again(forward, args, kwargs)
        if call.result.serves(given):
            call.states.put_back()
            with without_mode(self._mode):
                return call.result.build(Serving(given, self._name_again, self._fetched))
        if call.result.was_changed:
            self.modules.evidence.copies.add(call_key)
        before = versions_of(given)
        out = self._run_again(forward, args, kwargs)
        again = ModuleResult(out, given, before, call.result.where)
        for kept, former in zip(again.kept, call.result.kept, strict=True):
            if isinstance(kept.data, torch.Tensor):
                self._name_again(former, kept.data)
        return out

    def _name_again(self, kept: SavedLeaf, tensor: torch.Tensor) -> None:
        if self._labels is not None:
            self._labels.name_input_again(tensor, kept.indices)

    def _run_again(self, forward: TrackedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, unseen by the region; its buffers do not advance.

        Raises ``RegionError`` if it is seen to write to a large one: it may have read what it wrote there in forward.
        """
        buffers = [*forward.module.buffers()]
        storages = {one: one.untyped_storage() for one in buffers if plain_address(one) is not None}
        large = [one for one in buffers if one.nbytes > _SMALL_BUFFER]
        versions = [version_of(one) for one in large]
        with without_mode(self._mode), saved_tensors_hooks(detached, _same):
            # Of each: batch norms write to theirs unseen by version counters.
            before = {one: copy_of(storage) for one, storage in storages.items()}
            out = forward.run_unheard(args, kwargs)
            for one, storage in storages.items():
                overwrite(storage, before[one])
        if [version_of(one) for one in large] != versions:
            raise RegionError(
                Problem(
                    where=_name(self.modules.path, forward),
                    found="what this saved module returned was changed in place after it, as in no call before, and "
                    "the module cannot be run again: it writes to its buffers",
                    fix="clone the result before writing to it",
                )
            )
        return out


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _name(region: str, forward: TrackedForward) -> str:
    return ".".join(filter(None, (region, forward.path))) or type(forward.module).__name__


# -- The recorder of a region in which only whole modules are saved: no dispatch mode, in neither pass


class ModuleRecorder:
    """Saves whole modules in one region call, by what a watched call has learnt; the ``Recorder`` of a frame."""

    sees_ops = False

    def __init__(self, modules: SavedModules, not_recomputed: frozenset[int]) -> None:
        self.modules = modules
        self.not_recomputed = not_recomputed
        self._packs = 0

    def begin(self, inputs: RegionInputs) -> None:
        """The region is about to run on ``inputs``."""
        self.modules.begin(inputs)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which saved modules are run outside of the region."""
        return _active(SavingPass(self.modules, lambda: self._packs))

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``."""
        self._packs += 1

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether no module was saved."""
        self.modules.close(last_missing)
        return not self.modules.calls

    def pack_with_outer_hooks(self, hooks: PackHooks) -> None:
        """See ``SavedModules.park``."""
        self.modules.pack_with_outer_hooks(hooks)

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], progress: Progress) -> AbstractContextManager[Any]:
        """Return the context in which saved modules are not run."""
        return _active(ServingPass(self.modules, self.modules.fetch_recomputed()))

    def check_recomputed(self) -> None:
        """Nothing: what is kept is asked for by path and call."""

    def drop(self) -> None:
        """Let everything go."""
        self.modules.drop()


@contextmanager
def _active(modules: SavingPass | ServingPass) -> Iterator[None]:
    outer = scope.enter(None, modules)
    try:
        yield
    finally:
        scope.leave(outer)
