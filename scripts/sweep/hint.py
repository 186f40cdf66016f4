"""What one family needs to be told, and what several hints have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .drawing import Inputs
from .shrinking import Size, small_config


@dataclass(frozen=True)
class Hint:
    """How one family differs from what is done for all."""

    model: str = ""  # the class to take
    size: str = ""  # the only size that is tried
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration, by path
    config: Callable[[Size], Any] | None = None
    inputs: Inputs | None = None
    added: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    image: int = 0


def pair(wrapper: str, method: str, first: str, second: str) -> Callable[[Size], Any]:
    """A configuration that has no default: it is made of two others."""

    def config(size: Size) -> Any:
        import transformers

        halves = [small_config(transformers.CONFIG_MAPPING[name], size, {}) for name in (first, second)]
        whole = getattr(getattr(transformers, wrapper), method)(*halves)
        whole.decoder_start_token_id, whole.pad_token_id = 1, 0
        return whole

    return config


# The defaults of these rotate other shares of a head than their sections say.
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
GLM = Hint(size="whole heads", changes={"rope_parameters": HALF_ROTARY})
GLM_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": HALF_ROTARY}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}  # of the 16 pairs of a small head
