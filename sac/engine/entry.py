"""The engine that is in use: the old one, or the one in this folder if ``SAC_ENGINE=new``.

The switch goes with the old folders.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

IS_NEW = os.environ.get("SAC_ENGINE") == "new"

if TYPE_CHECKING or not IS_NEW:
    from sac.recompute.module_tracker import BareMode, TrackedForward, class_forward, takes_module, traced_forward
    from sac.recompute.regions import FULL, FULL_TABLE, Region, RegionGroup, run_as_region, run_modules
    from sac.recompute.torch_checkpoint import checkpoint_contexts, run_in_eager, run_traced
    from sac.region.ambient import BackendFlags, attention_choice
    from sac.region.fp8_state import check_fp8
else:
    from sac.engine.compiled import checkpoint_contexts, run_in_eager, run_traced
    from sac.engine.flags import BackendFlags, attention_choice
    from sac.engine.fp8 import check_fp8
    from sac.engine.region import FULL, FULL_TABLE, Region, RegionGroup, run_as_region, run_modules
    from sac.engine.tracker import BareMode, TrackedForward, class_forward, takes_module, traced_forward

__all__ = [
    "FULL",
    "FULL_TABLE",
    "IS_NEW",
    "BackendFlags",
    "BareMode",
    "Region",
    "RegionGroup",
    "TrackedForward",
    "attention_choice",
    "check_fp8",
    "checkpoint_contexts",
    "class_forward",
    "run_as_region",
    "run_in_eager",
    "run_modules",
    "run_traced",
    "takes_module",
    "traced_forward",
]


def why_not_replayed(group: RegionGroup) -> str:
    """Return why a call of the group could not be replayed, empty if each could."""
    reason: str = getattr(group, "not_replayable", "") if IS_NEW else group.evidence.not_replayable
    return reason


def recomputing_functions() -> dict[CodeType, Callable[[dict[str, Any]], str]]:
    """Return the code of the functions that run while a region is recomputed; a region's path from their variables."""
    if IS_NEW:
        from sac.engine.frame import Frame
        from sac.engine.reentrant import _Node
        from sac.engine.taped import TapedFrame

        of_frame = {one._recompute.__code__: lambda variables: variables["self"].where for one in (Frame, TapedFrame)}
        return {**of_frame, _Node.backward.__code__: lambda variables: variables["ctx"].call.where}
    from sac.recompute.replay import ReplayFrame
    from sac.region.frame import Frame as OldFrame
    from sac.region.reentrant import ReentrantFrame

    functions: tuple[Any, ...] = (OldFrame._recompute, ReplayFrame._recompute, ReentrantFrame._run_again)
    return {function.__code__: lambda variables: variables["self"].path for function in functions}
