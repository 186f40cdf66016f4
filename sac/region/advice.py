"""What to do about a recomputation that is not like its forward: one text per kind of difference."""

from __future__ import annotations

from dataclasses import replace

from sac.errors import RegionError
from sac.region.settings import Settings

OTHER_PATH = (
    "recomputation took another path through the region's Python than forward did: look for a branch that reads a "
    "counter, a cache or a global, and pass what it reads as an argument"
)
OTHER_KIND = (
    "the region found another tensor than in forward, or one of another shape, dtype or device: do not move, cast or "
    "exchange between forward and backward what it uses (modules, attributes, globals)"
)
OTHER_VALUE = (
    "the region computed with other tensors than in forward, or in another order: do not exchange between forward and "
    "backward what it uses (data of a weight, attributes, globals), or pass it as an argument"
)
OTHER_WRITE = "let the region write in both passes or in neither: look for a branch in front of the write"
OTHER_LAYOUT = "let the region make its results in the same way in both passes: look for a branch that decides how"
WRITTEN_LATER = "do not write to the region's result, nor to what it is a view of, before backward"
_NO_RANDOM_STATE = "; preserve_rng_state is off: turn it on if the region draws random numbers"


def advised(error: RegionError, path: str, settings: Settings) -> RegionError:
    """Return ``error`` of the region ``path`` with advice that fits the settings of the call."""
    general = (OTHER_PATH, OTHER_KIND, OTHER_VALUE)
    if settings.preserve_rng_state or not any(one.where == (path or "region") for one in error.problems):
        return error
    return type(error)(
        replace(one, fix=one.fix + _NO_RANDOM_STATE) if one.where == (path or "region") and one.fix in general else one
        for one in error.problems
    )
