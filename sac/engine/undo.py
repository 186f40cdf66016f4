"""A stack of calls that undo what a recomputation has changed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import UntypedStorage

from sac.tensors import copy_of, overwrite


class UndoStack:
    """What ``contextlib.ExitStack`` does, in a fraction of its time: every recomputation has one.

    When it is left, the calls are made in reverse order. If one raises, the others are made all the same.
    """

    __slots__ = ("_calls",)

    def __init__(self) -> None:
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...] | None]] = []

    def callback(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)`` when the stack is left."""
        self._calls.append((function, args))

    def enter_context(self, context: AbstractContextManager[Any]) -> None:
        """Enter ``context``; exit it when the stack is left. It cannot suppress an exception."""
        context.__enter__()
        self._calls.append((context.__exit__, None))

    def overwrite(self, storage: UntypedStorage, data: UntypedStorage) -> None:
        """Copy ``data`` into ``storage``; give it back its present data when the stack is left."""
        self.callback(overwrite, storage, copy_of(storage))
        overwrite(storage, data)

    def pop_all(self) -> UndoStack:
        """Return a new stack with all calls; this one has none any more."""
        other = UndoStack()
        other._calls, self._calls = self._calls, other._calls
        return other

    def close(self) -> None:
        """Make the calls now."""
        self.__exit__(None, None, None)

    def __enter__(self) -> UndoStack:
        return self

    def __exit__(self, *error: Any) -> None:
        calls = self._calls
        try:
            while calls:
                function, args = calls.pop()
                if args is None:
                    function(*error)
                else:
                    function(*args)
        finally:
            if calls:  # Python adds this exception to the context of the next one
                self.__exit__(*error)
