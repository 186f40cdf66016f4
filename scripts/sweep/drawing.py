"""What the inputs of parts of models are drawn with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, SIDE = 2, 32, 8

Inputs = Callable[[Any], dict[str, Any]]  # from a model


def floats(*shape: int) -> Tensor:
    """Return normal numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def drawn_ids(high: int, *shape: int) -> Tensor:
    """Return whole numbers from 0 to below ``high``, the same in every call."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def first_linear(model: nn.Module, name: str) -> int:
    """Return the width that the first linear layer with that ending of its path takes."""
    return int(next(m.in_features for n, m in model.named_modules() if n.endswith(name) and isinstance(m, nn.Linear)))
