"""The profiles of the engine that is in use; goes with the old folders, then ``new_tracing.py`` gets this name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sac.engine.entry import IS_NEW

if TYPE_CHECKING or not IS_NEW:
    from sac.planner.old_tracing import CannotProfile, ProfiledRegion, earliest, merged, profile_regions
else:
    from sac.planner.new_tracing import CannotProfile, ProfiledRegion, earliest, merged, profile_regions

__all__ = ["CannotProfile", "ProfiledRegion", "earliest", "merged", "profile_regions"]
