"""The engine that is in use: the old one, or the one in this folder if ``SAC_ENGINE=new``.

The switch goes with the old folders.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

IS_NEW = os.environ.get("SAC_ENGINE") == "new"

if TYPE_CHECKING or not IS_NEW:
    from sac.recompute.module_tracker import TrackedForward, class_forward, takes_module, traced_forward
    from sac.recompute.regions import FULL, FULL_TABLE, Region, RegionGroup, run_as_region, run_modules
    from sac.recompute.torch_checkpoint import checkpoint_contexts, run_in_eager, run_traced
else:
    from sac.engine.region import FULL, FULL_TABLE, Region, RegionGroup, run_as_region, run_modules
    from sac.engine.tracker import TrackedForward, class_forward, takes_module, traced_forward
    from sac.recompute.torch_checkpoint import checkpoint_contexts, run_in_eager, run_traced

__all__ = [
    "FULL",
    "FULL_TABLE",
    "IS_NEW",
    "Region",
    "RegionGroup",
    "TrackedForward",
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
