"""One module to be checkpointed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class Block:
    """One module to be checkpointed: a transformer block, or a sub-module of one."""

    path: str  # clean dotted path in the model: "model.layers.3", and "" for the model itself
    module: nn.Module
    layer: int  # its index within its stack
    stack: str  # path of the stack: "model.layers"
    stack_size: int  # what layer indices count up to
    tower: str  # language, vision, audio, or multimodal (projectors, resamplers)
