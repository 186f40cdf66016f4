"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re
from decimal import Decimal

LEGAL_BYTES = 'a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"'
MAX_WHOLE = 2**63 - 1
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)}
_UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"([0-9]+\.?[0-9]*(?:[eE]\+?[0-9]{1,2})?)\s*([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Return the bytes that ``text`` writes: a number, then nothing, ``B``, ``kB`` … ``TB`` or ``KiB`` … ``TiB``.

    Units are case-insensitive. Raises ``ValueError`` with the reason when ``text`` is no whole number of bytes.
    """
    if text.startswith("-"):
        raise ValueError("it is below zero")
    found = _SIZE.fullmatch(text.strip())
    if not found or len(text) > 60:
        raise ValueError("it is not a number with a unit")
    number, unit = found.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(f'the unit "{unit}" is none of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB')
    size = Decimal(number) * _UNITS[unit.lower()]
    if size > MAX_WHOLE:
        raise ValueError("it is more than 2**63 - 1 bytes")
    if size != int(size):
        raise ValueError("it is not a whole number of bytes")
    return int(size)


def bytes_text(count: int) -> str:
    """Return a byte count in binary units: ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
