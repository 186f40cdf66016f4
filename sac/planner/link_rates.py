"""The link to host memory that a plan may use: as written, as measured, or as listed for the device."""

from __future__ import annotations

import re

from sac.errors import PlanError, Problem
from sac.planner.cost import Calibration
from sac.planner.devices import Device
from sac.planner.transfer_clock import Link
from sac.policy.read import LEGAL_BYTES, parse_bytes
from sac.stores.transfers import LIMITS

LEGAL_LINK = 'bytes per second, "55GB/s"; to the host and back, "295GB/s,342GB/s"; or "listed"'
LISTED = "listed"
_RATE = re.compile(r"(.+?)\s*/\s*s", re.IGNORECASE)


def link_of(
    device: Device,
    calibration: Calibration | None = None,
    *,
    link: str | None = None,
    share: str | None = None,
    host: int | str | None = None,
) -> Link | None:
    """Return the link of a request to plan; None if it asks for none: then nothing is offloaded.

    ``link``: rates as text, or ``listed``: what was measured, else the figures of ``device``, as without it. ``share``:
    of these rates, such as ``"50%"``. ``host``: the most bytes that may wait on the host, as a number or text. Raises
    ``PlanError`` that lists every problem.
    """
    if link is None and share is None and host is None:
        return None
    problems: list[Problem] = []
    rates = _rates(link, problems) if link is not None and link != LISTED else _known(device, calibration, problems)
    part = _share(share, problems) if share is not None else 1.0
    room = _bytes(host, problems) if host is not None else None
    if problems:
        raise PlanError(problems)
    return Link(rates[0] * part, rates[1] * part, room, LIMITS.smallest)


def _known(device: Device, calibration: Calibration | None, problems: list[Problem]) -> tuple[float, float]:
    if calibration is not None and calibration.link is not None:
        return calibration.link
    if not device.to_host_bytes_per_s:
        found = f"{device.name} has no memory besides host memory: nothing would be gained"
        problems.append(Problem("link", found, fix='name a GPU, or say how fast its link is: "55GB/s"'))
    return device.to_host_bytes_per_s, device.from_host_bytes_per_s


def _rates(text: str, problems: list[Problem]) -> tuple[float, float]:
    try:
        found = [_RATE.fullmatch(part.strip()) for part in text.split(",")]
        rates = [float(parse_bytes(part[1])) for part in found if part is not None]
        if len(rates) == len(found) in (1, 2) and min(rates) > 0:
            return rates[0], rates[-1]
    except ValueError:
        pass
    problems.append(Problem("link", f'"{text}" is not the rate of a link', LEGAL_LINK))
    return 1.0, 1.0


def _share(text: str, problems: list[Problem]) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
        if text.strip().endswith("%") and 0 < share <= 1:
            return share
    except ValueError:
        pass
    problems.append(Problem("link_share", f'"{text}" is not a share of the link', '"1%" to "100%"'))
    return 1.0


def _bytes(value: int | str, problems: list[Problem]) -> int:
    try:
        count = parse_bytes(str(value))
        if count and not isinstance(value, bool):
            return count
    except ValueError:
        pass
    problems.append(Problem("host_memory", f"{value!r} is not an amount of memory", LEGAL_BYTES))
    return 0
