"""Kernels of every SDPA backend, and a real mixture of experts, under policies that stock cannot carry out."""

from __future__ import annotations

from typing import Any

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
from tests.support.pairs import in_pairs
from tests.support.training import assert_same_training, deterministic

VALUES = {
    "full": FULL,
    "nothing": selective(policy()),
    "attention and alternating matmuls": selective(policy(save("attention", optional=True), alternate("matmul"))),
    "every second op": selective(policy(alternate("*"))),
    "everything": selective(policy(default="save")),
}
WAYS = ways(VALUES, (*APPLY, "context_fn"))
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), WAYS)
ON_CUDA = ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")


class OnBackend(nn.Module):
    """A block whose attention runs on one backend; half precision where the backend wants it."""

    def __init__(self, block: nn.Module, backend: SDPBackend, half: bool) -> None:
        super().__init__()
        self.block, self.backend, self.half_precision = block, backend, half

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend), torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
            return self.block(x).float()


@pytest.mark.gpu
@ON_EACH_WAY
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("backend", ON_CUDA)
def test_every_attention_backend_of_a_gpu(backend: str, dropout: float, name: str, entry: str) -> None:
    assert_same_on_backend("cuda", backend, dropout, name, entry)


@in_pairs(  # the CPU's fused attention has no dropout
    kernel={"math": ("MATH", 0.0), "math with dropout": ("MATH", 0.2), "fused": ("FLASH_ATTENTION", 0.0)},
    name=VALUES.keys(),
    entry=(*APPLY, "context_fn"),
    unless=lambda kernel, name, entry: (name, entry) not in WAYS,
)
def test_every_attention_backend(kernel: tuple[str, float], name: str, entry: str) -> None:
    assert_same_on_backend("cpu", *kernel, name, entry)


def assert_same_on_backend(device: str, backend: str, dropout: float, name: str, entry: str) -> None:
    def build() -> Stack:
        blocks = with_dropout(llama_stack(2, d=64), attention=dropout).blocks
        return Stack(*(OnBackend(block, getattr(SDPBackend, backend), device != "cpu") for block in blocks))

    with deterministic(device):
        assert_same_training(
            build, VALUES[name], entry=entry, device=device, steps=2, make_input=lambda device: tokens(device, d=64)
        )


@ON_EACH_WAY
def test_backend_chosen_around_forward_only_is_used_again(name: str, entry: str) -> None:
    """The choice is a state of the thread, like autocast: recomputation must not fall to another kernel."""

    class AroundForward(Stack):
        def forward(self, *values: Tensor) -> Any:
            with sdpa_kernel(SDPBackend.MATH):
                return super().forward(*values)

    assert_same_training(lambda: AroundForward(*llama_stack().blocks), VALUES[name], entry=entry, steps=2)
