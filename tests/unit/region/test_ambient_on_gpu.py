"""The state of the forward on a GPU: autocast, attention kernels, TF32, and statistics that live there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.blocks import FULL, Stack
from tests.support.training import assert_same_training

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": partial(torch.autocast, "cuda", torch.bfloat16),
    "math": partial(sdpa_kernel, SDPBackend.MATH),
    "order": partial(sdpa_kernel, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "cudnn off": partial(torch.backends.cudnn.flags, enabled=False),
    "device": partial(torch.device, "cuda"),
}


class Block(nn.Module):
    """Attention in half precision, a convolution, statistics, a counter; a tensor made where the surroundings say."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(64, 192), nn.BatchNorm1d(64)
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += torch.ones(()).to(self.calls)
        q, k, v = self.project(x_BTD).to(torch.bfloat16).unflatten(-1, (3, 1, 64)).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        h_BDT = self.convolution(mixed.squeeze(1).to(x_BTD.dtype).transpose(1, 2))
        return F.dropout(self.norm(h_BDT).transpose(1, 2).float().sin(), 0.2) * x_BTD


@pytest.mark.gpu
@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_recomputation_on_a_gpu_meets_the_state_of_forward(
    surrounding: Callable[[], AbstractContextManager[Any]],
) -> None:
    def inputs(device: str) -> tuple[Tensor, ...]:
        return (torch.randn(4, 32, 64, device=device),)

    training: dict[str, Any] = {"make_input": inputs, "steps": 3, "around_forward": surrounding}
    assert_same_training(lambda: Stack(Block()), FULL, device="cuda", **training)
