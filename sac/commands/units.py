"""Numbers as people read them."""

from __future__ import annotations


def flops_text(count: int) -> str:
    """Return a count of floating-point operations in decimal units: ``3.2 GFLOP``."""
    size = float(count)
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP"):
        if abs(size) < 1000:
            return f"{count} FLOP" if unit == "FLOP" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TFLOP"


def time_text(milliseconds: float) -> str:
    """Return a duration: ``1.25 s``, ``12.5 ms``."""
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e3 else f"{milliseconds:.1f} ms"


def parameters_text(count: int) -> str:
    """Return a number of parameters: ``1.2 B``, ``243.3 M``."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
