"""Parameters that a module makes in its first call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

# Note [Lazy modules]
#
# A lazy module draws its parameters in its first call, from the shapes that it sees there. A recomputation finds them
# made, and would draw other numbers than the forward did after that. So the call of a region in which any are to be
# made runs without checkpointing: it is one step.


def has_uninitialized(owners: Iterable[nn.Module]) -> bool:
    """Return whether any parameter or buffer of these modules is still to be made."""
    tables = (held for owner in owners for held in (owner._parameters, owner._buffers))
    return any(one is not None and is_lazy(one) for held in tables for one in held.values())
