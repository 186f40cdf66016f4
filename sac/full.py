"""Options of regions without per-op decisions: input stores and named random streams."""

from sac.config import FullConfig
from sac.rng_tracker import RngTracker, seed_model_parallel
from sac.stores.contiguous import ContiguousBuffer

__all__ = ["ContiguousBuffer", "FullConfig", "RngTracker", "seed_model_parallel"]
