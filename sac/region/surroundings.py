"""All that a region's forward saw beside its inputs, put back around its recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn

from sac.region.rng import RngSnapshot
from sac.region.settings import Settings
from sac.region.state import AttentionBackends, AutocastState, Bindings


class Surroundings:
    """Random states, autocast, attention backends and buffers at the start of one region call."""

    __slots__ = ("attention", "autocast", "bindings", "rng")

    def __init__(self, tensors: Sequence[torch.Tensor], owners: tuple[nn.Module, ...], settings: Settings) -> None:
        self.rng = RngSnapshot(tensors, settings) if settings.preserve_rng_state else None
        self.autocast = AutocastState(tensor.device.type for tensor in tensors)
        self.attention = AttentionBackends()
        self.bindings = Bindings(owners)

    def close(self) -> None:
        """The forward is over: hold nothing that has not changed."""
        self.bindings.forget_if_unchanged()

    def enter_on(self, stack: ExitStack) -> None:
        """Put everything back as it was in the forward, and as it is now when ``stack`` is left."""
        if self.rng is not None:
            stack.enter_context(self.rng)
        self.autocast.enter_on(stack)
        stack.enter_context(self.attention)
        stack.enter_context(self.bindings)
