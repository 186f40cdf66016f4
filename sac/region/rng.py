"""The states of random generators at the start of a region, put back for its recomputation."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch


class RngSnapshot:
    """States of the default generators that a region may draw from: the CPU's and those of the devices in use."""

    __slots__ = ("_current", "_states")

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._states = [(torch.default_generator, torch.default_generator.get_state())]
        for generator in _device_generators(tensors):
            self._states.append((generator, generator.get_state()))
        self._current: list[list[tuple[torch.Generator, torch.Tensor]]] = []

    def __enter__(self) -> None:
        # A list of lists: a region can be recomputed inside its own recomputation (a gradient taken in the region).
        self._current.append([(generator, generator.get_state()) for generator, _ in self._states])
        for generator, state in self._states:
            generator.set_state(state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for generator, state in self._current.pop():
            generator.set_state(state)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on ``device`` draw from when none is passed, or None if there is none yet."""
    if device.type == "cpu":
        return torch.default_generator
    generators: Any = getattr(_device_module(device.type), "default_generators", ())
    index = device.index if device.index is not None else 0
    return generators[index] if index < len(generators) else None


def _device_module(device_type: str) -> Any:
    return getattr(torch, device_type, None)


def _device_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Return the generators of the devices of ``tensors`` and of each accelerator's current device."""
    devices = {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        devices.add(torch.device("cuda", torch.cuda.current_device()))
    found = (default_generator(device) for device in sorted(devices, key=str))
    return [generator for generator in found if generator is not None]
