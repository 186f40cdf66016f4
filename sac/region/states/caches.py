"""K/V caches that are handed to a region: a recomputation finds each as it was when the forward began."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

# Note [Caches as arguments]
#
# A block writes its keys and values into the cache that it is given (`use_cache=True`, or a prefix that is trained).
# Recomputed on that cache it would attend to its own keys twice. So a cache is no input that is kept, but state: what
# the forward changed of it is put back for the recomputation, and then what there is now. Keys and values that come
# from before the region keep their graph, so that a trained prefix has its gradient.
#
# What a cache holds is rebound, appended to or, for states of a fixed size, written in place. The first two are seen
# here, by identity; the recorder sees the third (Note [What is kept, and what is not]). What ops a block runs depends
# on what lies in the cache, so that no call with one is evidence for another.
#
# The cache itself is held until backward, with the keys and values of every layer that wrote to it.

_LEAVES = (torch.Tensor, nn.Module, type, str, bytes, int, float)


@lru_cache(maxsize=1024)
def _is_cache_class(kind: Any) -> bool:
    # By name: the classes are Hugging Face's (DynamicCache, EncoderDecoderCache, ...) and those of models' own files.
    return any(one.__name__.endswith("Cache") for one in kind.__mro__)


def _is_cache(value: object) -> bool:
    kind: Hashable = type(value)  # type: ignore[assignment]  # mypy takes a class's __hash__ for that of its objects
    return _is_cache_class(kind)


def caches_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    """Return the caches among the arguments of a call, by position or name."""
    found: dict[int | str, Any] = {place: one for place, one in enumerate(args) if _is_cache(one)}
    found.update({name: one for name, one in kwargs.items() if _is_cache(one)})
    return found


def without(
    caches: dict[int | str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with None in the place of each cache."""
    return _exchanged(dict.fromkeys(caches), args, kwargs)


class OnCaches:
    """A region's function with its caches put in again; each call after the first finds them as the first did."""

    def __init__(self, function: Callable[..., Any], caches: dict[int | str, Any]) -> None:
        self.function = function
        self.caches = caches
        self._forward: list[_Held] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, whose arguments are given ``without`` the caches."""
        args, kwargs = _exchanged(self.caches, args, kwargs)
        if self._forward is not None:
            with _as_it_was(self._forward):
                return self.function(*args, **kwargs)
        before = list(_held_by(self.caches))
        output = self.function(*args, **kwargs)
        self._forward = [one for one in before if one.was_changed]
        return output


class _Held:
    """What one object, list or dict of a cache held."""

    __slots__ = ("before", "owner")

    def __init__(self, owner: Any) -> None:
        self.owner = owner  # a list, or a dict: an object's own among them
        self.before = owner.copy()

    @property
    def was_changed(self) -> bool:
        """Whether anything was put there, taken away or exchanged; values are compared by identity."""
        now, before = self.owner, self.before
        if len(now) != len(before):
            return True
        if isinstance(now, list):
            return any(a is not b for a, b in zip(now, before, strict=True))
        return any(name not in now or now[name] is not value for name, value in before.items())

    def put_back(self) -> None:
        """Let it hold what it held."""
        self.owner.clear()
        self.owner.extend(self.before) if isinstance(self.owner, list) else self.owner.update(self.before)


@contextmanager
def _as_it_was(held: list[_Held]) -> Iterator[None]:
    now = [_Held(one.owner) for one in held]
    try:
        for one in held:
            one.put_back()
        yield
    finally:
        for one in now:
            one.put_back()


def _held_by(caches: dict[int | str, Any]) -> Iterator[_Held]:
    """Yield what each object, list and dict at or below the caches holds."""
    seen: set[int] = set()
    ahead = list(caches.values())
    while ahead:
        one = ahead.pop()
        if isinstance(one, _LEAVES) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, tuple):
            ahead += one
            continue
        owner = one if isinstance(one, (list, dict)) else getattr(one, "__dict__", None)
        if owner:
            ahead += owner if isinstance(owner, list) else owner.values()
        if owner is not None:
            yield _Held(owner)


def _exchanged(
    values: dict[int | str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    named = {name: value for name, value in values.items() if isinstance(name, str)}
    return tuple(values.get(place, one) for place, one in enumerate(args)), {**kwargs, **named}
