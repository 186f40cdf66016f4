"""A generator that sac does not find in the code of the regions that draw from it.

Up to torch 2.12 a generator has no weak references, so each call of a region whose code names one is recorded.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE = torch.Generator()


def noise_of(h: Tensor) -> Tensor:
    """Return noise in the shape of ``h``."""
    return torch.randn(h.shape, generator=NOISE)
