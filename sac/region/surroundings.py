"""All that a region's forward saw beside its inputs, put back around its recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from sac.region.settings import Settings
from sac.region.states.ambient import AutocastState, FunctionModes
from sac.region.states.bindings import Bindings, UnseenWriteError
from sac.region.states.compiled_graphs import keep_order_of_graphs
from sac.region.states.host_rng import HostRandomState
from sac.region.states.process_flags import ProcessFlags
from sac.region.states.providers import ProvidedState
from sac.region.states.reachable import ReachableState
from sac.region.states.rng import RngSnapshot

# Dispatch modes are not among it: those that are on in backward stay on in recomputation, as torch's own do, so that
# what counts or traces the ops of a step sees all of them.


class Surroundings:
    """What was there at the start of one region call: random states, Python state, buffers, flags and modes.

    ``function``: what the region runs, beside the modules that own it. ``held``: tensors that objects among its
    arguments hold. ``recorded``: whether a recorder sees the ops of
    the forward. ``apart``: see ``Bindings``. ``beside_torch``: torch's checkpoint puts torch's random states back.
    """

    __slots__ = ("_recorded", "autocast", "bindings", "flags", "host_rng", "modes", "provided", "reachable", "rng")

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        owners: tuple[nn.Module, ...],
        settings: Settings,
        function: Any = None,
        held: Iterable[torch.Tensor] = (),
        *,
        recorded: bool = True,
        apart: frozenset[int] = frozenset(),
        beside_torch: bool = False,
    ) -> None:
        self._recorded = recorded
        self.reachable = reachable = ReachableState(owners, function)
        self.provided = ProvidedState(settings.providers) if settings.providers else None
        self.rng = self.host_rng = None
        if settings.preserve_rng_state and not beside_torch:
            self.rng = RngSnapshot(tensors, settings, reachable.generators)
        if settings.preserve_rng_state:
            self.host_rng = HostRandomState(reachable.others)
        self.bindings = Bindings(
            owners,
            (*reachable.tensors.values(), *held),
            freeze_buffers=settings.freeze_buffers,
            recorded=recorded,
            apart=apart,
        )
        self.flags = ProcessFlags()
        self.autocast = AutocastState(tensors)
        self.modes = FunctionModes()
        keep_order_of_graphs()

    def close(self, where: str, *, needed: bool = True) -> None:
        """The forward is over: hold nothing that has not changed. ``needed``: whether a recomputation may come.

        Raises ``UnseenWriteError``, which names the region as ``where``, if one may come and the forward wrote to a
        parameter or a large buffer without a recorder.
        """
        self.bindings.close()
        if needed and not self._recorded and (problem := self.bindings.unseen_write(where)) is not None:
            raise UnseenWriteError(problem)

    def enter_on(self, stack: ExitStack) -> None:
        """Put everything back as it was in the forward, and as it is now when ``stack`` is left.

        Torch-function modes come last, so that they hear what the region does, and not what we do for it.
        """
        if self.rng is not None:
            stack.enter_context(self.rng)
        if self.host_rng is not None:
            stack.enter_context(self.host_rng)
        if self.provided is not None:
            self.provided.enter_on(stack)
        self.reachable.enter_on(stack)
        self.bindings.enter_on(stack)
        self.flags.enter_on(stack)
        self.autocast.enter_on(stack)
        self.modes.enter_on(stack)

    def process_flags(self) -> ExitStack:
        """Return a context in which the flags of the process are those of the forward; all that bare ops look at."""
        stack = ExitStack()
        self.flags.enter_on(stack)
        return stack

    def drop(self) -> None:
        """No recomputation will come: hold nothing that is of any size."""
        self.rng = self.host_rng = self.provided = None
        self.reachable.drop()
        self.bindings.drop()
