"""One call of a region: what both frames hold of it, and how they run its function in either pass."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import nn

from sac.errors import Problem, RegionError
from sac.region.advice import OTHER_KIND
from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks, surrounding_hooks
from sac.region.settings import PLAIN, Settings
from sac.region.surroundings import Surroundings

RETAIN = "pass retain_graph=True to the backward call before this one"


class Recorder(Protocol):
    """What a recomputation engine does for a frame. The frame works without one (full recomputation).

    ``sees_ops``: whether its modes see the ops of the region. ``apart``: modules that recomputation does not run, by
    id; what they write to their buffers is not written again.
    """

    sees_ops: bool
    apart: frozenset[int]

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the forward runs."""

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``; call ``handle.keep`` to hold it."""

    def close(self, handles: list[Handle], last_missing: int) -> bool:
        """The forward is over; return whether the region can be recomputed without this recorder."""

    def park(self, hooks: PackHooks) -> None:
        """Hand what is held to the saved-tensor hooks around the region."""

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], ending: Ending) -> AbstractContextManager[Any]:
        """Return the context in which the recomputation runs on ``inputs``, given with their positions."""

    def check_recomputed(self) -> None:
        """Raise if a value that had to be used was not."""

    def drop(self) -> None:
        """Let every held value go."""


class RegionCall(ABC):
    """One call of one checkpointed region.

    ``path`` names the region in messages. ``owners`` are its modules. ``compares``: a recorder that need not serve
    anything is still of use, to tell whether recomputation saves the same values.
    """

    compares = False

    def __init__(
        self,
        function: Callable[..., Any],
        path: str,
        recorder: Recorder | None,
        owners: tuple[nn.Module, ...] = (),
        settings: Settings = PLAIN,
    ) -> None:
        self.function = function
        self.path = path
        self.recorder = recorder
        self.owners = owners
        self.settings = settings
        self.input_bytes = (0, 0)  # on devices and on the host for them: held by this region, or else by its handles
        self.kept_whole: Problem | None = None  # after the forward: why its activations are kept after all
        self.is_evidence = False  # whether somebody will ask ``moved_host_rng``
        self.moved_host_rng = False  # after the forward: whether it drew from Python's or NumPy's generators
        self._lock = threading.RLock()
        self._dropped = False

    @abstractmethod
    def run(self, inputs: KeptInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the region's forward and keep what its backward needs; returns the function's result.

        ``inputs`` are made of the same ``args`` and ``kwargs``.
        """

    def _begin(self, inputs: KeptInputs) -> None:
        """Take note of all that the forward is about to see."""
        self.hooks = surrounding_hooks()
        self.inputs = inputs
        tensors = [kept.data for kept in inputs.tensors if isinstance(kept.data, torch.Tensor)]
        recorded = self.recorder is not None and self.recorder.sees_ops
        apart = self.recorder.apart if self.recorder is not None else frozenset()
        function = None if _is_of_module(self.function) else self.function
        held = inputs.tensors_in_objects()
        self.surroundings = Surroundings(
            tensors, self.owners, self.settings, function, held.values(), recorded=recorded, apart=apart
        )

    def _run_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder is None:
            return self.function(*args, **kwargs)
        with self.recorder.forward_mode():
            return self.function(*args, **kwargs)

    def _keep(self, kept: list[Handle], last_missing: int) -> None:
        """The forward is over: hold what a recomputation up to ``last_missing`` takes, nothing if it is -1."""
        if self.is_evidence and self.surroundings.host_rng is not None:
            self.moved_host_rng = self.surroundings.host_rng.has_moved()
        self.surroundings.close(self.path, needed=last_missing >= 0)
        idle = self.recorder is not None and self.recorder.close(kept, last_missing)
        if idle and not (self.compares and self.settings.checks_metadata):
            self.recorder = None
        self._hold_inputs(kept, needed=last_missing >= 0)
        if self.hooks is not None and self.recorder is not None:
            self.recorder.park(self.hooks)

    def _hold_inputs(self, kept: list[Handle], *, needed: bool) -> None:
        """Hold the inputs until backward, or nothing at all if no recomputation will come: autograd holds ``kept``."""
        if not needed:
            held = [one.value for one in kept if one.borrowed and isinstance(one.value, torch.Tensor)]
            self.input_bytes = self.inputs.bytes_among(held), 0
            self._drop()
            return
        self.input_bytes = self.inputs.bytes()
        self.inputs.close(self.hooks, self.path)

    def _drop(self) -> None:
        """Hold nothing any more that could run the region again."""
        self._dropped = True
        self.inputs.drop()
        self.surroundings.drop()
        if self.recorder is not None:
            self.recorder.drop()

    def _enter_forward_again(self, stack: ExitStack, inputs: list[tuple[int, torch.Tensor]], ending: Ending) -> None:
        """Enter all that the forward saw, with grad enabled, for a run of the function on the rebuilt ``inputs``.

        Raises ``RegionError`` if a parameter of the region was changed since.
        """
        bindings = self.surroundings.bindings
        if self.settings.checks_metadata and (problem := bindings.changed_parameter(self.path)) is not None:
            raise RegionError(problem)
        if self.settings.checks_metadata and (problem := bindings.changed_tensor(self.path)) is not None:
            raise RegionError(problem)
        stack.callback(bindings.note_parameters)
        self.surroundings.enter_on(stack)
        stack.enter_context(torch.enable_grad())
        if self.recorder is not None:
            stack.enter_context(self.recorder.recompute_mode(inputs, ending))

    def _problem(self, found: str, fix: str = OTHER_KIND) -> Problem:
        return Problem(where=self.path or "region", found=found, fix=fix)


def _is_of_module(function: Callable[..., Any]) -> bool:
    """Return whether ``function`` is a forward bound to one of the region's modules, which are looked at themselves."""
    if type(function) is partial and len(function.args) == 1 and not function.keywords:
        return isinstance(function.args[0], nn.Module)
    return type(function) is MethodType and isinstance(function.__self__, nn.Module)


def graph_is_retained() -> bool:
    """Return whether the backward that runs now keeps its graph for another one."""
    # Private name (torch 2.0 to 2.13); without it every backward is taken to retain its graph: memory then goes when
    # the graph does.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return bool(ask()) if ask is not None and torch._C._current_graph_task_id() != -1 else True
