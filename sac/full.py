"""Regions without per-op decisions, and what they can be told: stores of inputs, random streams."""

from sac.config import FullConfig
from sac.rng_tracker import RngTracker, seed_model_parallel
from sac.stores.contiguous import ContiguousBuffer

__all__ = ["ContiguousBuffer", "FullConfig", "RngTracker", "seed_model_parallel"]
