"""The blocks that the benchmarks train: Llama-like ones of any size, with grouped queries or a mixture of experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import Attention, GatedMLP, LlamaLikeBlock, rotate

CHOSEN_EXPERTS = 2


@dataclass(frozen=True, slots=True)
class Case:
    """Some blocks and one input. 0 threads: torch's own choice; 0 kv_heads: as many as heads; 0 experts: one MLP."""

    key: str
    d: int
    heads: int
    hidden: int
    batch: int
    seq: int
    rounds: int
    warm_up: int
    threads: int = 0
    kv_heads: int = 0
    experts: int = 0
    layers: int = 1

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    @property
    def label(self) -> str:
        heads = f"{self.heads} heads" + (f" ({self.kv_heads} KV)" if self.kv_heads else "")
        mlp = f"{CHOSEN_EXPERTS} of {self.experts} experts of {self.hidden}" if self.experts else f"MLP {self.hidden}"
        layers = f"{self.layers} layers, " if self.layers > 1 else ""
        return f"{layers}d={self.d}, {heads}, {mlp}, batch {self.batch}, {self.seq} tokens"


class GroupedQueryAttention(Attention):
    """Causal attention with rotary positions, in which several heads share one key and one value."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__(width, heads)
        self.size = width // heads
        self.k_proj = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, tokens, width = x_BTD.shape
        q, k, v = (
            project(x_BTD).view(batch, tokens, -1, self.size).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.cos[:tokens], self.sin[:tokens]
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, width))


class MixtureOfExperts(nn.Module):
    """A router, the best experts of each token, and a loop over experts, as published models have it in eager."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        weights_NK, chosen_NK = self.router(x_ND).softmax(-1).topk(CHOSEN_EXPERTS, dim=-1)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        out_ND = torch.zeros_like(x_ND)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen_NK == index).nonzero(as_tuple=True)
            out_ND.index_add_(0, row, expert(x_ND[row]) * weights_NK[row, slot].unsqueeze(-1))
        return out_ND.view_as(x_BTD)


def build(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Tensor, Tensor]:
    """The blocks, their input, and the gradient of their output; both are (batch, seq, d)."""
    torch.manual_seed(0)
    shape = (case.batch, case.seq, case.d)
    with torch.device(device):
        blocks = nn.Sequential(*(_block(case) for _ in range(case.layers))).to(dtype)
        return blocks, torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def _block(case: Case) -> LlamaLikeBlock:
    block = LlamaLikeBlock(case.d, case.heads, case.hidden)
    if case.kv_heads:
        block.self_attn = GroupedQueryAttention(case.d, case.heads, case.kv_heads)
    if case.experts:
        block.mlp = MixtureOfExperts(case.d, case.hidden, case.experts)
    rotary = block.self_attn
    again = -(-case.seq // len(rotary.cos))
    rotary.cos, rotary.sin = rotary.cos.repeat(again, 1), rotary.sin.repeat(again, 1)  # positions start over: same cost
    return block
