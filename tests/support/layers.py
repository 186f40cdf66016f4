"""The transformer layer on which costs of full recomputation are counted: pre-norm, with an MLP four times as wide."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PreNormLayer(nn.Module):
    """LayerNorm, attention, LayerNorm, MLP with GELU; no dropout."""

    def __init__(self, d: int = 32, heads: int = 4, hidden: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, hidden or 4 * d), nn.Linear(hidden or 4 * d, d)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.out(mixed(self.qkv(self.attention_norm(x_BTD)), self.heads))
        return h_BTD + self.down(F.gelu(self.up(self.mlp_norm(h_BTD))))


def mixed(qkv_BTE: Tensor, heads: int) -> Tensor:
    """Causal attention; queries, keys and values lie side by side in the last dimension, each (heads * size) wide."""
    batch, tokens, width = qkv_BTE.shape
    q, k, v = qkv_BTE.view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    mixed_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mixed_BHTK.transpose(1, 2).reshape(batch, tokens, width // 3)


def stack(layers: int, d: int = 32, heads: int = 4) -> nn.Sequential:
    """Layers one after the other, from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(PreNormLayer(d, heads) for _ in range(layers)))
