"""The rerun of a region's Python if its tape cannot be replayed, with the forward's routing and random numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sac.checksums import Sums, same, sums_of
from sac.errors import Problem, RegionError
from sac.recompute.forward_state import WriteGuard
from sac.recompute.module_tracker import RegionMode
from sac.recompute.rerun import overwritten_problem, written_tensors
from sac.recompute.table import CallSite, DecisionTable, run_op
from sac.recompute.whole_modules import SavedModules, ServingPass
from sac.region.frame import OTHER_KIND, NoEarlyStop, Progress
from sac.region.undo import UndoStack
from sac.stores.saved_tensor import AtHand, SavedResult, fetch_recomputed
from sac.tensors import describe, detached, map_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class SavedRoutingResult:
    """A call of an op that may return another result the second time, and its results in forward."""

    site: CallSite
    outputs: list[SavedResult]
    sums: Sums  # checksums of the results, if the call is verified


class PythonRecomputeMode(RegionMode):
    """Runs a region again from its start. It serves only the results that must not be chosen anew, call by call."""

    def __init__(
        self,
        table: DecisionTable,
        path: str,
        snapshots: WriteGuard,
        routed: list[SavedRoutingResult],
        progress: Progress,
        modules: SavedModules | None,
    ) -> None:
        super().__init__(table)
        self._region = path
        self.progress = progress
        self._modules = modules
        self._snapshots, self._undo = snapshots, UndoStack()
        self._waiting: defaultdict[Any, deque[SavedRoutingResult]] = defaultdict(deque)
        for one in routed:
            self._waiting[one.site].append(one)

    def whole_modules(self) -> ServingPass | None:
        """Return the pass that runs modules that are saved as a whole, unseen by the hooks of the region."""
        return ServingPass(self._modules, {}, self._undo, self) if self._modules is not None else None

    def __enter__(self) -> PythonRecomputeMode:
        routed = (one for waiting in self._waiting.values() for call in waiting for one in call.outputs)
        self._fetched = fetch_recomputed((one, None) for one in routed)
        self._snapshots.enter_on(self._undo)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.progress = NoEarlyStop()
        self._undo.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        site: CallSite | None = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path)
        if site.is_bookkeeping:
            return site.run(*args, **kwargs)
        if self.progress.done:
            self.progress.stop_before(written_tensors(site, args, kwargs) if site.writes else ())
        out = run_op(site, args, kwargs)
        if self._waiting.get(site):
            out = in_place_of(self._region, self._waiting[site].popleft(), out, self._fetched)
        self.progress.after_op()
        return out


def in_place_of(region: str, one: SavedRoutingResult, out: Any, fetched: AtHand) -> Any:
    """Return the saved results of ``one`` in place of ``out``, the present result; ``region`` is the region's name.

    ``fetched``: the result of ``fetch_recomputed``.
    """
    saved = [result.fetch(fetched) for result in one.outputs]
    # The op has run, so that generators have advanced as in forward; its result of the forward replaces the new one.
    for found, kept in zip(tensors_of(out), saved, strict=True):
        if found.shape != kept.shape or found.dtype != kept.dtype:
            raise RegionError(
                Problem(
                    region or "region",
                    f"{one.site.op} gave {describe(kept)} in forward and gives {describe(found)} in recomputation",
                    fix=OTHER_KIND,
                )
            )
    if one.sums and not same(one.sums, sums_of(saved)):
        if not same(one.sums, sums_of(out)):
            raise RegionError(overwritten_problem(region, one.site.op))
        return out
    storages: dict[int, torch.UntypedStorage] = {}
    outputs = iter(zip(one.outputs, saved, strict=True))

    def own(_: Tensor) -> Tensor:
        result, data = next(outputs)
        return result.own(detached(data), storages)

    return map_tensors(out, own)
