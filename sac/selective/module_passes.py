"""How modules that are saved as a whole run in forward, and are answered for in recomputation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from sac.errors import Problem, RegionError
from sac.policy.model import ALTERNATE
from sac.region.detach import copy_of, detached, overwrite
from sac.region.storages import plain_address, version_of
from sac.selective.around import hooks_off, mode_off, surrounding_packs
from sac.selective.bytes_inside import counted
from sac.selective.kept_leaf import KeptLeaf, Serving
from sac.selective.kept_result import KeptResult, given_leaves, versions_of
from sac.selective.kept_states import KeptStates, generators_at
from sac.selective.scope import ScopedForward
from sac.selective.table import BoundRule
from sac.selective.whole_modules import Place, SavedCall, SavedModules

if TYPE_CHECKING:
    from sac.selective.labels import Labels

_SMALL_BUFFER = 1 << 9  # bytes; of larger ones a region that runs without a recorder has no copy


class Watcher(Protocol):
    """A region's dispatch mode in forward, as far as saved modules are concerned."""

    def passed_generators(self) -> list[torch.Generator]:
        """Return the generators that ops of the region have been passed so far."""

    def watches(self, call: SavedCall) -> AbstractContextManager[Any]:
        """Return the context in which the mode stays on in a saved module, and decides nothing."""

    def returned(self, call: SavedCall, forward: ScopedForward, out: Any) -> None:
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
        self._packs = surrounding_packs(hooks)
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._turns: defaultdict[int, int] = defaultdict(int)
        self._generators = generators_at(modules.settings)

    def place_of(self, path: str) -> tuple[Place, BoundRule] | None:
        """Return which call of the module at ``path`` begins, and the rule that saves it; None if none does."""
        modules = self.modules
        rule = modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        place = path, self._counts[path]
        self._counts[path] += 1
        modules.hits[rule.index] += 1
        if modules.table.saves_everything:
            return None
        if rule.rule.do == ALTERNATE:
            self._turns[rule.index] += 1
            if self._turns[rule.index] % 2 == 0:
                return None
        return place, rule

    def call(
        self, place: tuple[Place, BoundRule], forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a saved module."""
        modules = self.modules
        call = SavedCall(*place, self.count_packs())
        given = given_leaves(args, kwargs)
        before = versions_of(given)
        passed = self.watcher.passed_generators() if self.watcher is not None else []
        states = KeptStates((*forward.module.modules(),), [*self._generators, *passed], modules.settings)
        with hooks_off(self._packs):
            out = self._run(call, forward, args, kwargs)
        states.close()
        call.states = states
        call.result = KeptResult(out, given, before, _name(modules.path, forward))
        if self.watcher is not None:
            self.watcher.returned(call, forward, out)
        if modules.is_watched:
            modules.watch_gradients(call, out)
        with mode_off(self.watcher):  # a copy that is made of a result is not an op of the region
            modules.add(call)
        return out

    def _run(self, call: SavedCall, forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.watcher is None:
            return forward.run_unheard(args, kwargs)
        if not self.modules.is_watched:
            with mode_off(self.watcher):
                return forward.run_unheard(args, kwargs)
        with self.watcher.watches(call), counted(call.inside, forward.module, self.modules.inputs):
            return forward.run_unheard(args, kwargs)


class ServingPass:
    """What a recomputation makes active: gives out what saved modules left behind, and does not run them.

    ``fetched``: what ``fetch_recomputed`` has returned. ``mode`` is the one that is on, ``labels`` are its labels.
    """

    def __init__(
        self, modules: SavedModules, fetched: dict[int, torch.Tensor], mode: Any = None, labels: Labels | None = None
    ) -> None:
        self.modules = modules
        self._fetched = fetched
        self._mode = mode
        self._labels = labels
        self._counts: defaultdict[str, int] = defaultdict(int)

    def place_of(self, path: str) -> Place | None:
        """Return which call of the module at ``path`` begins, if forward has saved that; else None."""
        rule = self.modules.table.whole_rule(path)
        if rule is None or not rule.saves:
            return None
        place = path, self._counts[path]
        self._counts[path] += 1
        return place if place in self.modules.calls else None

    def call(self, place: Place, forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the module returned in forward."""
        if self._mode is not None and self._mode.filling.done:
            self._mode.filling.settle(())  # what modules after the last missing handle left behind is let go
        call = self.modules.calls[place]
        given = given_leaves(args, kwargs)
        if call.result is None or call.states is None:
            return self._run_again(forward, args, kwargs)
        if call.result.serves(given):
            call.states.put_back()
            with mode_off(self._mode):
                return call.result.build(Serving(given, self._name_again, self._fetched))
        if call.result.was_changed:
            self.modules.learnt.copies.add(place)
        before = versions_of(given)
        out = self._run_again(forward, args, kwargs)
        again = KeptResult(out, given, before, call.result.where)
        for kept, former in zip(again.kept, call.result.kept, strict=True):
            if isinstance(kept.data, torch.Tensor):
                self._name_again(former, kept.data)
        return out

    def _name_again(self, kept: KeptLeaf, tensor: torch.Tensor) -> None:
        if self._labels is not None:
            self._labels.name_input_again(tensor, kept.places)

    def _run_again(self, forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module, unseen by the region; its buffers do not advance.

        Raises ``RegionError`` if it is seen to write to a large one: it may have read what it wrote there in forward.
        """
        buffers = [*forward.module.buffers()]
        storages = {one: one.untyped_storage() for one in buffers if plain_address(one) is not None}
        large = [one for one in buffers if one.nbytes > _SMALL_BUFFER]
        versions = [version_of(one) for one in large]
        with mode_off(self._mode), saved_tensors_hooks(detached, _same):
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


def _name(region: str, forward: ScopedForward) -> str:
    return ".".join(filter(None, (region, forward.path))) or type(forward.module).__name__
