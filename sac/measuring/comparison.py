"""What a comparison of modes found: numbers only, ready for a table, a picture or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sac.memory_timeline import MemoryTimeline


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One mode's row. A mode that failed has ``error`` and none of the numbers."""

    mode: str
    error: str = ""
    memory: MemoryTimeline | None = None
    kept_bytes: int = 0  # live at the end of forward, by the profiler
    region_kept_bytes: Mapping[str, int] = field(default_factory=dict)  # by the profiler, around each block
    step_flops: int = 0
    recompute_flops: int | None = None  # this mode's step minus that of `none`
    step_ms: tuple[float, ...] = ()  # without the first step, which warms up
    losses: tuple[float, ...] = ()  # one per step
    max_gradient_difference: float | None = None  # to `none` after the first step's backward, over all parameters
    report: Mapping[str, Any] | None = None  # what sac itself says it kept

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive during one forward and backward, relative to its start."""
        return self.memory.peak_bytes if self.memory else 0

    @property
    def median_step_ms(self) -> float:
        """The middle step time."""
        return median(self.step_ms) if self.step_ms else 0.0

    @property
    def typical_region_bytes(self) -> int | None:
        """The middle of what the regions kept, or None when no blocks were found."""
        return int(median(self.region_kept_bytes.values())) if self.region_kept_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return the row's numbers for JSON."""
        if self.error:
            return {"mode": self.mode, "error": self.error}
        return {
            "mode": self.mode,
            "kept_bytes": self.kept_bytes,
            "region_kept_bytes": dict(self.region_kept_bytes),
            "peak_bytes": self.peak_bytes,
            "step_flops": self.step_flops,
            "recompute_flops": self.recompute_flops,
            "median_step_ms": self.median_step_ms,
            "step_ms": list(self.step_ms),
            "losses": list(self.losses),
            "max_gradient_difference": self.max_gradient_difference,
            "report": self.report,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The rows of all modes, ``none`` first, and what they were measured on."""

    model: str
    parameters: int
    device: str
    torch_version: str
    steps: int
    rows: tuple[ModeResult, ...]

    @property
    def failed(self) -> bool:
        """True when a mode could not be run."""
        return any(row.error for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON; the curves of the picture are left out."""
        return {
            "model": self.model,
            "parameters": self.parameters,
            "device": self.device,
            "torch": self.torch_version,
            "steps": self.steps,
            "modes": [row.to_dict() for row in self.rows],
        }
