"""The recorder of a region in which only whole modules are saved: no dispatch mode, in neither pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks
from sac.selective import scope
from sac.selective.module_passes import SavingPass, ServingPass
from sac.selective.whole_modules import SavedModules


class ModuleRecorder:
    """Saves whole modules in one region call, by what a watched call has learnt; the ``Recorder`` of a frame."""

    sees_ops = False

    def __init__(self, modules: SavedModules, apart: frozenset[int]) -> None:
        self.modules = modules
        self.apart = apart
        self._packs = 0

    def begin(self, inputs: KeptInputs) -> None:
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

    def park(self, hooks: PackHooks) -> None:
        """See ``SavedModules.park``."""
        self.modules.park(hooks)

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], ending: Ending) -> AbstractContextManager[Any]:
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
