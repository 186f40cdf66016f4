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
from tests.support.stock import install_stock
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


class ExpertLayer(nn.Module):
    """A decoder layer of a tiny Qwen3-MoE, with the rotary tables that its model would hand in."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

        config = Qwen3MoeConfig(
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            num_hidden_layers=1,
            vocab_size=32,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            attn_implementation="sdpa",
            experts_implementation=implementation,
        )
        self.layer = qwen.Qwen3MoeDecoderLayer(config, 0)
        self.rotary = qwen.Qwen3MoeRotaryEmbedding(config)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                if parameter.dim() > 1:  # some are left uninitialised for the model to fill
                    parameter.normal_(0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        out = self.layer(x, position_embeddings=self.rotary(x, places), position_ids=places)
        return out[0] if isinstance(out, tuple) else out


@in_pairs(
    implementation=["eager", "grouped_mm"],
    name=VALUES.keys(),
    entry=(*APPLY, "context_fn"),
    unless=lambda implementation, name, entry: (name, entry) not in WAYS,
)
def test_mixture_of_experts(implementation: str, name: str, entry: str) -> None:
    assert_same_training(
        lambda: Stack(ExpertLayer(implementation), ExpertLayer(implementation)), VALUES[name], entry=entry, steps=2
    )


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
def test_stock_cannot_save_everything_of_a_mixture_of_experts() -> None:
    with pytest.raises(RuntimeError, match="has been mutated"):
        assert_same_training(lambda: Stack(ExpertLayer("eager")), VALUES["everything"], put=install_stock)
