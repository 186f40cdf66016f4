"""A model and its batches, and the sizes that both are built with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from sac.errors import ConfigError, Problem, listing, nearest

Inputs: TypeAlias = "tuple[Any, ...] | Mapping[str, Any]"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the model and its batch are built; None leaves what the config file says.

    ``layers`` counts per stack, ``seq`` in tokens, ``batch`` in rows, ``vocab`` in tokens.
    """

    layers: int | None = None
    seq: int = 128
    batch: int = 1
    vocab: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Refuse sizes and dtypes that no model can be built with; raises ``ConfigError`` with all of them."""
        sizes = {name: size for name, size in asdict(self).items() if isinstance(size, int)}
        problems = [
            Problem(f"--{name}", f"{size} is not a size", "1, 2, 3, …") for name, size in sizes.items() if size < 1
        ]
        if self.dtype not in DTYPES:
            found = f"unknown dtype '{self.dtype}'"
            problems.append(Problem("--dtype", found, listing(list(DTYPES)), nearest(self.dtype, DTYPES)))
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model in training mode, and the inputs of each step: ``model(*inputs)`` or ``model(**inputs)``."""

    model: nn.Module
    inputs_of_step: Callable[[int], Inputs]
    name: str
