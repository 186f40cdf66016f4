"""The clock of a step whose values wait in host memory: when copies run, what waits for them, and what is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sac.policy.read import bytes_text

# Note [The clock of transfers]
#
# A simulation of one step, region by region, that follows the calls of a real one (Note [Transfers]). There are three
# engines: the computing stream, and one for copies in each direction. Each runs its work in order.
#
#   forward    A region's input, if it goes to the host, starts down with the region, and the region's end waits for it.
#              What the region offloads starts down at its end, as one copy. While more than `in_flight` bytes are on
#              their way, the computing stream waits for the oldest.
#   backward   What a region needs and is not there starts up when its backward begins, as one copy, and is waited for.
#              Then the next regions' values start up, in the order in which backward needs them, while less than
#              `ahead` bytes are there ahead of their use or are still on their way down.
#
# The simulation is of time alone: what is on the device in a step does not depend on time, and is measured
# (Note [Transfers without data]). `early` and `flying` estimate it for the search.


@dataclass(frozen=True, slots=True)
class Link:
    """The link between a device and host memory: bytes per second in each direction, both at once.

    ``host``: the most bytes that may wait there, None without a limit; ``smallest``: the least size of a storage.
    """

    down: float
    up: float
    host: int | None = None
    smallest: int = 1 << 20

    def has_room(self, size: int) -> bool:
        """Return whether so many bytes may wait on the host."""
        return self.host is None or size <= self.host

    def __str__(self) -> str:
        room = "" if self.host is None else f", {bytes_text(self.host)} of host memory"
        return f"{self.down / 1e9:.4g} GB/s down, {self.up / 1e9:.4g} GB/s up{room}"


@dataclass(frozen=True, slots=True)
class Windows:
    """The limits of a policy's key ``offload``, in bytes."""

    in_flight: int
    ahead: int


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step without checkpointing: of each region's two passes, and around the loss (``pause``)."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    pause: float = 0.0
    rest: float = 0.0  # before the first region, and after its backward

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return sum(self.forward) + sum(self.backward) + self.pause + self.rest


@dataclass(frozen=True, slots=True)
class RegionLoad:
    """What a region runs again, in seconds; the bytes of each storage that it offloads, and of its input there."""

    again: float
    sent: tuple[int, ...] = ()
    input: int = 0


@dataclass(frozen=True, slots=True)
class Clocked:
    """The seconds of a step, those of them in which it waits for copies down and up, and the bytes on the host.

    ``flying``, ``early``: bytes on the device in addition to the regions' own, while a region's forward runs (and at
    the end of all), and while its backward runs. ``busy``: the share of the forward in which the link down is busy.
    """

    seconds: float
    stall_down: float
    stall_up: float
    host: int
    flying: tuple[int, ...]
    early: tuple[int, ...]
    busy: float

    @property
    def stall(self) -> float:
        """The seconds in which the step waits for copies."""
        return self.stall_down + self.stall_up


def clock(times: StepTimes, loads: Sequence[RegionLoad], link: Link, windows: Windows) -> Clocked:
    """Return what a step takes; see Note [The clock of transfers]."""
    now = down = up = stall_down = stall_up = busy = 0.0
    sent: list[deque[int]] = []  # of each region: what is on the host alone
    waiting: deque[tuple[int, int, float]] = deque()  # region, bytes, when they are down
    held = host = 0
    flying: list[int] = []
    for region, load in enumerate(loads):
        flying.append(held)
        input_down = 0.0
        if load.input:
            down = max(down, now) + load.input / link.down
            input_down, busy = down, busy + load.input / link.down
        now += times.forward[region]
        size = sum(load.sent)
        sent.append(deque([load.input] if load.input else []))
        host += size + load.input
        if size:
            down = max(down, now) + size / link.down
            busy += size / link.down
            waiting.extend((region, one, down) for one in load.sent)
            held += size
        while held > windows.in_flight:
            oldest, one, done = waiting.popleft()
            held -= one
            sent[oldest].append(one)
            stall_down, now = stall_down + max(0.0, done - now), max(now, done)
        if input_down > now:
            stall_down, now = stall_down + input_down - now, input_down
    flying.append(held)
    share = min(1.0, busy / now) if now else 0.0
    now += times.pause
    there: dict[int, list[tuple[int, float]]] = {}  # of a region ahead: bytes, when they are up
    ahead = 0
    left = [0] * len(loads)  # still flying, by region
    for region, one, _ in waiting:
        left[region] += one
    early = [0] * len(loads)
    for region in range(len(loads) - 1, -1, -1):
        mine = there.pop(region, ())
        ahead -= sum(one for one, _ in mine)
        ready = max((done for _, done in mine), default=0.0)
        if sent[region]:
            up = max(up, now) + sum(sent[region]) / link.up
            ready = up
            sent[region].clear()
        stall_up, now = stall_up + max(0.0, ready - now), max(now, ready)
        room = windows.ahead - held - ahead
        for following in range(region - 1, max(-1, region - 17), -1):
            batch: list[int] = []
            while sent[following] and room >= sent[following][-1]:
                batch.append(sent[following].pop())
                room -= batch[-1]
            if batch:
                up = max(up, now) + sum(batch) / link.up
                there.setdefault(following, []).extend((one, up) for one in batch)
                ahead += sum(batch)
            if sent[following]:
                break
        early[region] = ahead + held - left[region]
        now += loads[region].again + times.backward[region]
        held -= left[region]
    now += times.rest
    return Clocked(now, stall_down, stall_up, host, tuple(flying), tuple(early), share)
