"""Whether TransformerEngine runs in FP8 now."""

from __future__ import annotations

import sys

from sac.errors import Problem

# Where TransformerEngine keeps the state of its autocast: the newer and the older module (1.x to 2.x).
_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")


def fp8_problem(where: str) -> list[Problem]:
    """Return what is wrong if TransformerEngine, where it is loaded, has FP8 on: its state is not put back."""
    for name in _MODULES:
        state = getattr(sys.modules.get(name), "FP8GlobalStateManager", None)
        if state is not None and state.is_fp8_enabled():
            return [
                Problem(
                    where,
                    "FP8 is on around the region, and its scales and histories are not put back for recomputation",
                    fix="run this region without FP8, or call TransformerEngine's own checkpoint for it",
                )
            ]
    return []
