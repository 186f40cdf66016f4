"""Settings of the forward that its recomputation must run under: autocast, and buffers as they were."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn


class AutocastState:
    """Autocast as it was in the forward, for the CPU and for the device types of the region's inputs."""

    __slots__ = ("_cache", "_settings")

    def __init__(self, device_types: Iterable[str]) -> None:
        self._cache = torch.is_autocast_cache_enabled()
        self._settings = tuple(
            (name, torch.is_autocast_enabled(name), torch.get_autocast_dtype(name))
            for name in {"cpu", *device_types}
            if torch.amp.is_autocast_available(name)
        )

    def enter_on(self, stack: ExitStack) -> None:
        """Enter the recorded autocast on ``stack``; nothing is entered where it was off and still is."""
        for name, enabled, dtype in self._settings:
            if enabled or torch.is_autocast_enabled(name):
                stack.enter_context(torch.autocast(name, dtype=dtype, enabled=enabled, cache_enabled=self._cache))


_BACKENDS = ("flash", "mem_efficient", "math", "cudnn")


class AttentionBackends:
    """Which backends ``scaled_dot_product_attention`` might choose from in the forward (``sdpa_kernel`` sets them)."""

    __slots__ = ("_current", "_forward")

    def __init__(self) -> None:
        self._forward = _allowed_backends()
        self._current: list[tuple[bool, ...]] = []

    def __enter__(self) -> None:
        self._current.append(_allowed_backends())
        if self._current[-1] != self._forward:
            _allow_backends(self._forward)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        current = self._current.pop()
        if current != self._forward:
            _allow_backends(current)


def _allowed_backends() -> tuple[bool, ...]:
    return tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in _BACKENDS)


def _allow_backends(allowed: tuple[bool, ...]) -> None:
    for name, on in zip(_BACKENDS, allowed, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


class Bindings:
    """Which tensor each buffer name of a region meant, so that rebinding (``self.n = self.n + 1``) happens once.

    The same for parameters, for which ``torch.func.functional_call`` puts others in place for one call only. (Wrapper
    subclasses are left alone: FSDP exchanges its sharded parameters between forward and backward.) ``owners`` are the
    region's modules that have either. A buffer changed in place is the recorder's part.
    """

    __slots__ = ("_before", "_buffered", "_current", "_parameters")

    def __init__(self, owners: tuple[nn.Module, ...]) -> None:
        self._buffered = tuple(owner for owner in owners if owner._buffers)
        self._before = [dict(owner._buffers) for owner in self._buffered]
        self._parameters = [(owner._parameters, dict(owner._parameters)) for owner in owners if owner._parameters]
        self._current: list[tuple[list[dict[str, Any]], list[tuple[dict[str, Any], dict[str, Any]]]]] = []

    def forget_if_unchanged(self) -> bool:
        """After the forward: return True, and keep nothing, if no buffer was rebound."""
        same = all(
            len(owner._buffers) == len(before) and all(owner._buffers[name] is before.get(name) for name in before)
            for owner, before in zip(self._buffered, self._before, strict=True)
        )
        if same:
            self._buffered, self._before = (), []
        return same

    def __enter__(self) -> None:
        buffers = [dict(owner._buffers) for owner in self._buffered]
        parameters = []
        for bound, before in self._parameters:
            other = {name: value for name, value in before.items() if _was_exchanged(value, bound.get(name))}
            if other:
                parameters.append((bound, {name: bound[name] for name in other}))
                bound.update(other)
        self._current.append((buffers, parameters))
        _bind(self._buffered, self._before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        buffers, parameters = self._current.pop()
        _bind(self._buffered, buffers)
        for bound, found in parameters:
            bound.update(found)


def _was_exchanged(before: Any, now: Any) -> bool:
    """Return whether a plain tensor or parameter stood where another one stands now."""
    plain = (torch.Tensor, nn.Parameter)
    return before is not now and type(before) in plain and type(now) in plain


def _bind(owners: tuple[nn.Module, ...], bindings: list[dict[str, Any]]) -> None:
    for owner, buffers in zip(owners, bindings, strict=True):
        owner._buffers.clear()
        owner._buffers.update(buffers)


def owners_of(module: nn.Module | None) -> tuple[nn.Module, ...]:
    """Return the modules of a region that have buffers or parameters."""
    seen: set[nn.Module | None] = {None}
    owners: list[nn.Module] = []
    waiting = [module]
    while waiting:  # by hand: module.modules() makes the names of all of them, in every call of a region
        owner = waiting.pop()
        if owner is None or owner in seen:
            continue
        seen.add(owner)
        if owner._buffers or owner._parameters:
            owners.append(owner)
        waiting.extend(owner._modules.values())
    return tuple(owners)
