"""Conditions: questions to one call of an op, for ops that a save-set means only in some of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

Condition = Callable[[tuple[Any, ...], Mapping[str, Any], Any], bool]  # (args, kwargs, out)


def device_to_host(args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> bool:
    """Whether the call copies a tensor from an accelerator to the host; ``out`` may be None before the call."""
    source = args[0] if args else kwargs.get("self")
    if not isinstance(source, torch.Tensor) or source.device.type in ("cpu", "meta"):
        return False
    target = out.device if isinstance(out, torch.Tensor) else kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu"


def _absent(places: tuple[str, ...]) -> Condition:
    return lambda args, kwargs, out: all(_argument(args, kwargs, place) is None for place in places)


def _truthy(places: tuple[str, ...]) -> Condition:
    return lambda args, kwargs, out: all(bool(_argument(args, kwargs, place)) for place in places)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: str) -> Any:
    position, _, name = place.partition("/")
    return args[int(position)] if position and int(position) < len(args) else kwargs.get(name)


_PLAIN: Mapping[str, Condition] = {"device_to_host": device_to_host}
_WITH_PLACES: Mapping[str, Callable[[tuple[str, ...]], Condition]] = {"absent": _absent, "truthy": _truthy}


class _Conditions(Mapping[str, Condition]):
    """Conditions by name; see ``CONDITIONS``."""

    def __getitem__(self, name: str) -> Condition:
        return _read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_PLAIN)

    def __len__(self) -> int:
        return len(_PLAIN)


@cache
def _read(name: str) -> Condition:
    both, _, rest = name.partition(" & ")
    if rest:
        first, second = _read(both), _read(rest)
        return lambda args, kwargs, out: first(args, kwargs, out) and second(args, kwargs, out)
    if name in _PLAIN:
        return _PLAIN[name]
    kind, _, places = name.partition(":")
    return _WITH_PLACES[kind](tuple(places.split(",")))


CONDITIONS: Mapping[str, Condition] = _Conditions()
"""By name, a function of ``(args, kwargs, out)``. Besides the plain names it understands ``absent:3/out,4/mask`` (each
of these arguments, at this position or under this keyword, was left out or None), ``truthy:…`` (each of them is true)
and ``one & other``. An unknown name raises ``KeyError``."""
