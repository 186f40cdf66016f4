"""Regions without per-op decisions, and what they can be told: stores of inputs, random streams."""

from sac.full.full_config import FullConfig
from sac.full.rng_tracker import RngTracker
from sac.full.seeding import seed_model_parallel
from sac.region.stores.contiguous import ContiguousBuffer

__all__ = ["ContiguousBuffer", "FullConfig", "RngTracker", "seed_model_parallel"]
