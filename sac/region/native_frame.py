"""The frame with the optional native library: handles are made, filled and read in C++."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from sac.region.frame import Frame, Handle, RecomputeProgress
from sac.stores.saved_tensor import SavedTensor

AnyFrame = TypeVar("AnyFrame", bound="WithNativeHandles")


class WithNativeHandles(Frame):
    """A frame whose handles are in C++, and are read there; ``for_library`` says in which library."""

    _library: Any
    _handle_type: Any
    _handles: Any

    def _new_handles(self) -> Any:
        return self._library.Handles()

    def _close(self) -> None:
        super()._close()
        self._handles.may_be_read = True

    def _recompute(self, wanted: Handle, task: int, *, last: bool) -> None:
        handles = self._handles
        handles.may_be_read = False  # another thread waits for the lock until all values have been checked
        try:
            super()._recompute(wanted, task, last=last)
        finally:
            handles.may_be_read = self._forward_over


class NativeFrame(WithNativeHandles):
    """A frame whose hooks are in C++."""

    def _saved_tensor_hooks(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        recorder = self.recorder if self._sees_ops else None
        hooks = self._library.FrameHooks(self._handles, self._handle_type, self, recorder)
        self._packed = hooks if recorder is None else None
        return hooks.pack, hooks.unpack

    def _close(self) -> None:
        packed = self._packed
        if packed is not None and self.recorder is not None:
            self.recorder.settle(packed)
        super()._close()
        if packed is not None:
            packed.forget()


@cache
def for_library(frame: type[AnyFrame], library: Any) -> type[AnyFrame]:
    """Return ``frame`` for this library."""
    types = native_types(library)
    found = {"_library": library, "_handle_type": types.handle, "_progress": types.progress}
    return type(frame.__name__, (frame,), found)


class NativeTypes(NamedTuple):
    """Classes that derive from the library's."""

    handle: Any
    progress: Any


@cache
def native_types(library: Any) -> NativeTypes:
    """Return the classes that derive from the library's."""

    class NativeHandle(library.Handle, SavedTensor):  # type: ignore[misc]
        """See ``Handle``."""

        __slots__ = ("__weakref__",)
        keep = Handle.keep
        waits = Handle.waits
        kept_value = Handle.kept_value
        watches_packed = Handle.watches_packed

    class NativeProgress(library.Progress):  # type: ignore[misc]
        """See ``RecomputeProgress``."""

        __slots__ = ("__weakref__",)
        refuse_surplus = RecomputeProgress.refuse_surplus
        refuse_other = RecomputeProgress.refuse_other
        stop = RecomputeProgress.stop
        stop_before = RecomputeProgress.stop_before

    return NativeTypes(NativeHandle, NativeProgress)
