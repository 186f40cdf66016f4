"""What a few families need to be told: a relation between fields, an input that no name explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .shrinking import Size


@dataclass(frozen=True)
class Hint:
    """How one family differs from what is done for all."""

    model: str = ""  # the class to take
    size: str = ""  # the only size that is tried
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration, by path
    config: Callable[[Size], Any] | None = None
    inputs: Callable[[nn.Module], dict[str, Any]] | None = None
    added: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    image: int = 0


# The widths of the two parts that a default configuration puts together are those of two releases.
_ONE_WIDTH = {"vision_config.hidden_size": 512}

HINTS: dict[str, Hint] = {
    "autoformer": Hint(changes={"prediction_length": 8}),
    "bamba": Hint(changes={"attn_layer_indices": [1]}),
    "informer": Hint(changes={"prediction_length": 8}),
    "qwen2_vl": Hint(changes=_ONE_WIDTH),
    "time_series_transformer": Hint(changes={"prediction_length": 8}),
}
