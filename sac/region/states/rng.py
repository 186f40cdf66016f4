"""The states of random generators at the start of a region, put back for its recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from sac.errors import Problem, RegionError
from sac.region.settings import Settings
from sac.region.states.rng_trackers import NamedStates, States, put_back, put_trackers_back, states_of, tracker_of

# Note [Random states]
#
# A region's recomputation has to draw what its forward drew. So the state of each generator that the forward may draw
# from is taken at its start: the CPU's, those of the inputs' devices and of the accelerator's current device, those
# that the caller names, and the named streams of trackers. For the recomputation they are put back; when it ends, by an
# error too, all are again as it found them. If putting them back fails half-way, what was changed so far is undone.
#
# A tracker's fork exchanges the state of a default generator. So trackers come first and default generators last, both
# when states are put back and when that is undone.


class RngSnapshot:
    """States of the generators that a region may draw from; a context that puts them back. See Note [Random states].

    ``tensors``: whose devices' default generators are taken, beside those of the CPU and of the current device.
    ``also``: generators that the region's modules and arguments hold.

    Raises ``ConfigError`` if a function in ``settings.trackers`` returns no tracker, and ``RegionError`` while a CUDA
    graph is captured: torch lets nobody read or set a generator's state then.
    """

    __slots__ = ("_accelerators", "_entered", "_states", "_trackers")

    def __init__(
        self, tensors: Iterable[torch.Tensor], settings: Settings, also: Iterable[torch.Generator] = ()
    ) -> None:
        self._accelerators = _accelerator_generators(tensors)
        usual = (torch.default_generator, *self._accelerators)
        # Where a module holds a default generator, that one is put back last, as ever: see above.
        others = {one._cdata: one for one in (*settings.generators, *also)}  # type: ignore[attr-defined]
        for one in usual:
            others.pop(one._cdata, None)  # type: ignore[attr-defined]
        try:
            self._states = states_of((*usual, *others.values()))
            self._trackers = [
                (getter, NamedStates(tracker_of(getter), self._accelerators)) for getter in settings.trackers
            ]
        except RuntimeError as error:
            _blame_capture(error)
            raise
        # A list: a region can be recomputed inside its own recomputation (a gradient taken in the region).
        self._entered: list[tuple[States, ExitStack | None]] = []

    @property
    def states(self) -> States:
        """The default generators' and those that the caller names; not the trackers'."""
        return self._states

    def put_back(self) -> None:
        """Let all generators stand where they stood when this was made, for good."""
        if self._trackers:
            put_trackers_back([(tracker_of(getter), states) for getter, states in self._trackers])
        put_back(self._states)

    def __enter__(self) -> None:
        try:
            present = states_of([generator for generator, _ in self._states])
            undo = None
            if self._trackers:
                undo = put_trackers_back([(tracker_of(getter), states) for getter, states in self._trackers])
            self._entered.append((present, undo))
            try:
                put_back(self._states)
            except BaseException:
                self.__exit__(None, None, None)
                raise
        except RuntimeError as error:
            _blame_capture(error)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        present, undo = self._entered.pop()
        try:
            if undo is not None:
                undo.close()
        finally:
            put_back(present)


def generators_now(settings: Settings) -> list[torch.Generator]:
    """Return the generators that ops may draw from on the CPU and on the current device, and those of ``settings``."""
    return [torch.default_generator, *_accelerator_generators(()), *settings.generators]


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on ``device`` draw from when none is passed, or None if there is none yet.

    A device without an index is the current one of its type.
    """
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())
    if generators:  # empty until the device type is initialised
        index = device.index if device.index is not None else module.current_device()
        return generators[index] if index < len(generators) else None
    # Private to torch (2.11 to 2.13): MPS has one generator, and no tuple of them.
    only = getattr(module, "_get_default_mps_generator", None)
    return only() if only is not None and torch.backends.mps.is_available() else None


def _accelerator_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Return the generators of the devices of ``tensors`` and of the accelerator's current device, not the CPU's."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None and not devices:
        return []
    found = [default_generator(device) for device in sorted(devices, key=str)]
    # To ask for the current device initialises it, which a forked process must not do. MPS is always ready.
    if accelerator is not None and getattr(getattr(torch, accelerator.type, None), "is_initialized", lambda: True)():
        found.append(default_generator(accelerator))
    return list({generator: None for generator in found if generator is not None})


def _blame_capture(error: RuntimeError) -> None:
    """Raise what a user can act on, if ``error`` came of a CUDA graph that is being captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RegionError(
            Problem(
                where="preserve_rng_state",
                found="random states can be neither read nor put back while a CUDA graph is captured",
                fix="pass preserve_rng_state=False if the region draws no random numbers, or capture it without "
                "checkpointing",
            )
        ) from error
