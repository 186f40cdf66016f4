"""Kernels of every SDPA backend under policies that stock cannot carry out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support.blocks import (
    APPLY,
    FULL,
    Stack,
    alternate,
    llama_stack,
    policy,
    save,
    selective,
    tokens,
    ways,
    with_dropout,
)
from tests.support.training import assert_same_training, deterministic

VALUES = {
    "full": FULL,
    "attention and alternating matmuls": selective(policy(save("attention", optional=True), alternate("matmul"))),
    "every second op": selective(policy(alternate("*"))),
}
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), ways(VALUES, (*APPLY, "context_fn")))
ON_CUDA = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


class OnBackend(nn.Module):
    """A block whose attention runs on one backend; half precision where the backend wants it."""

    def __init__(self, block: nn.Module, backend: str, half: bool) -> None:
        super().__init__()
        self.block, self.backend, self.half_precision = block, getattr(SDPBackend, backend), half

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend), torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
            return self.block(x).float()


@ON_EACH_WAY
@pytest.mark.parametrize(
    ("device", "backend", "dropout"),
    [
        ("cpu", "MATH", 0.2),
        ("cpu", "FLASH_ATTENTION", 0.0),  # it has no dropout there
        *(pytest.param("cuda", backend, 0.2, marks=pytest.mark.gpu) for backend in ON_CUDA),
    ],
)
def test_every_attention_backend(device: str, backend: str, dropout: float, name: str, entry: str) -> None:
    def build() -> Stack:
        blocks = with_dropout(llama_stack(2, d=64), attention=dropout).blocks
        return Stack(*(OnBackend(block, backend, device != "cpu") for block in blocks))

    with deterministic(device):
        assert_same_training(
            build, VALUES[name], entry=entry, device=device, steps=2, make_input=lambda device: tokens(device, d=64)
        )
