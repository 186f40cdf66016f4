"""Modules that a rule saves as a whole: what one region call keeps of them, and how its recomputation goes without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from sac.region.parking import PackHooks, Parked
from sac.region.settings import Settings
from sac.region.storages import storage_sizes
from sac.selective.kept_leaf import KeptLeaf
from sac.selective.kept_result import KeptResult
from sac.selective.kept_states import KeptStates
from sac.selective.scope import ScopedForward
from sac.selective.table import BoundRule, Table, paths_up

if TYPE_CHECKING:
    from sac.region.inputs import KeptInputs
    from sac.selective.stats import KeptFigures

# Note [Whole modules]
#
# A rule with `module` and without `ops` decides on calls of modules. What it saves runs in forward as if there were no
# region: the region's saved-tensor hooks and its dispatch mode are off, those of others stay on. So autograd keeps what
# it would keep, and nobody counts it. Recomputation is given what the call left behind (Note [What a saved module
# leaves behind]), by the module's path and the number of the call of that path. Modules inside a saved one are part of
# it, and no rule reaches them. The forwards that tell which module runs (`ScopedForward`) ask the pass that is active.
#
# The first call of a region on a sort of inputs is *watched*: the region's dispatch mode stays on inside saved modules,
# and decides nothing there. It sees what they write to, copies it before if it is kept or an input of the region, and
# counts FLOPs; hooks count what autograd keeps. What it has seen (`Learnt`) holds for later calls on such inputs. If no
# rule of a region speaks of ops, those enter no dispatch mode at all (Note [Evidence]).
#
# A recomputation that is stopped early never comes to the modules after the last missing handle: what they have left
# behind is let go when forward is over.

Place = tuple[str, int]  # path of a module, and which call of it in the region


@dataclass(slots=True)
class Learnt:
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
    figures: KeptFigures | None = None
    apart: frozenset[int] = frozenset()
    keeps_watching: bool = False


class SavedCall:
    """One call of a saved module: its rule, and what it left behind. ``flops``: of a call that was watched."""

    __slots__ = ("flops", "inside", "packs_before", "place", "result", "rule", "states")

    def __init__(self, place: Place, rule: BoundRule, packs_before: int) -> None:
        self.place = place
        self.rule = rule
        self.packs_before = packs_before
        self.result: KeptResult | None = None
        self.states: KeptStates | None = None
        self.inside: dict[int, int] = {}
        self.flops = 0

    def result_sizes(self) -> dict[int, int]:
        """Return the bytes of each storage that is kept of its result, by its address."""
        kept = self.result.kept if self.result is not None else []
        tensors = [one.data for one in kept if isinstance(one.data, torch.Tensor) and not one.is_borrowed]
        return {address: size for tensor in tensors for address, size in storage_sizes(tensor).items()}

    def drop(self) -> None:
        """Let go what it left behind."""
        self.result = self.states = None


class SavedModules:
    """What one call of a region keeps of the modules that its rules save as a whole; see Note [Whole modules].

    ``path`` names the region. ``learnt``: what an earlier call on such inputs has shown; None: this one is watched.
    """

    def __init__(self, table: Table, path: str, settings: Settings, learnt: Learnt | None) -> None:
        self.table = table
        self.path = path
        self.settings = settings
        self.is_watched = learnt is None or learnt.keeps_watching
        self.learnt = Learnt() if learnt is None else learnt
        self.calls: dict[Place, SavedCall] = {}
        self.hits: defaultdict[int, int] = defaultdict(int)
        self.inputs: frozenset[int] = frozenset()  # addresses of the storages of the region's inputs
        self._hooks: list[Any] = []  # in forward: on the nodes of results
        self._owners: dict[int, SavedCall] = {}  # in forward: address of a storage that is kept -> by which call

    def begin(self, inputs: KeptInputs) -> None:
        """The region is about to run on ``inputs``."""
        if self.is_watched:
            held = [kept.data for kept in inputs.tensors if isinstance(kept.data, torch.Tensor) and kept.stored is None]
            self.inputs = frozenset(address for tensor in held for address in storage_sizes(tensor))

    def add(self, call: SavedCall) -> None:
        """A saved module has returned."""
        assert call.result is not None
        self.calls[call.place] = call
        self._owners.update(dict.fromkeys(call.result.addresses(), call))
        if call.place in self.learnt.differentiated:
            call.result.drop()
        elif call.place in self.learnt.copies:
            call.result.copy()

    def watch_gradients(self, call: SavedCall, out: Any) -> None:
        """Notice if a gradient passes through ``out``, the result of ``call``, before the forward is over."""

        def passes(grads: Any) -> None:
            self.learnt.differentiated.add(call.place)
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
            self.learnt.copies.add(call.place)

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

    def held(self) -> Iterable[tuple[KeptLeaf, BoundRule]]:
        """Yield each kept tensor with the rule that keeps it."""
        for call in self.calls.values():
            for kept in call.result.kept if call.result is not None else ():
                yield kept, call.rule

    def fetch_recomputed(self) -> dict[int, torch.Tensor]:
        """Return, by the id of each kept leaf, what an outer region runs again to give back.

        Called before a recomputation makes anything of its own active: the ops and modules of the outer region are not
        those of this one.
        """
        parked = [(kept, kept.data) for kept, _ in self.held() if isinstance(kept.data, Parked)]
        return {id(kept): data.fetch() for kept, data in parked if data.is_recomputed}

    def park(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""
        for kept, _ in self.held():
            kept.park(hooks)

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
        self.learnt.bytes_inside = dict(found)


def saved_modules(owners: Iterable[nn.Module], table: Table) -> frozenset[int]:
    """Return, by id, which of a region's modules never run in its recomputation: those saved, and those inside them."""
    forwards = [(owner, getattr(owner.__dict__.get("forward"), "__self__", None)) for owner in owners]
    paths = {id(owner): forward.path for owner, forward in forwards if isinstance(forward, ScopedForward)}
    return frozenset(key for key, path in paths.items() if any(map(table.saves_whole, paths_up(path))))
