"""Stalls: how long streams have waited for the copies of one region call, as the device has timed it."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

# Note [Stalls]
#
# Where a device has events with times (CUDA, XPU), two of them are recorded on a stream around its wait for a copy. The
# stream reaches the first when its work before is done, and the second when the copy is done as well; in between it was
# idle. During a step, events are only recorded: the host waits for nothing and asks for nothing. A report reads them,
# and waits for the device then.
#
# A stream waits for a copy once. A call forgets all but its last waits, for graphs through which backward runs again
# and again.

_MOST = 1024  # waits of one call that are timed


class Stalls:
    """The waits of streams for the copies of one region call; see Note [Stalls]."""

    __slots__ = ("_timed",)

    def __init__(self) -> None:
        self._timed: deque[_Timed] = deque(maxlen=_MOST)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stalls, ()  # events belong to this process

    def around(self, stream: Any, new_event: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context in which ``stream`` is to wait for a copy; ``new_event`` makes an event with a time."""
        found = _Timed(stream, new_event(), new_event())
        self._timed.append(found)
        return found

    def milliseconds(self) -> float | None:
        """Wait for the device, and return the sum of all waits; None if none was timed."""
        timed = [one for one in [*self._timed] if one.is_over]
        return sum(one.milliseconds() for one in timed) if timed else None


class _Timed(contextlib.AbstractContextManager[None]):
    """One wait, between two events."""

    __slots__ = ("_after", "_before", "_stream", "is_over")

    def __init__(self, stream: Any, before: Any, after: Any) -> None:
        self._stream, self._before, self._after = stream, before, after
        self.is_over = False

    def __enter__(self) -> None:
        self._stream.record_event(self._before)

    def __exit__(self, *error: object) -> None:
        self._stream.record_event(self._after)
        self.is_over = True

    def milliseconds(self) -> float:
        self._after.synchronize()
        return float(self._before.elapsed_time(self._after))


def timed_events(module: Any) -> Any:
    """Return what makes an event with a time, of torch's ``module`` for a device; None if that has none."""
    with contextlib.suppress(AttributeError, TypeError, RuntimeError):
        module.Event(enable_timing=True)
        return lambda: module.Event(enable_timing=True)
    return None
