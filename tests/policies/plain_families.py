"""Models in plain torch with the class and module names of torchtitan, timm and DiT: what their policies must find."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 32
HEADS = 4
WORDS = 32
TOKENS = 12


def _mixed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)


class SeparateAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.wo(_mixed(self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD), causal=True))


class GatedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class TransformerBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.attention, self.feed_forward = SeparateAttention(), GatedMlp()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.feed_forward(self.ffn_norm(x_BTD)))


class Llama3Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleDict({str(key): TransformerBlock(dropout) for key in range(2)})
        self.norm, self.output = nn.RMSNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTD = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.output(self.norm(x_BTD))


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.proj(_mixed(*self.qkv(x_BTD).chunk(3, -1), causal=False))


class Mlp(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.drop = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(x_BTD))))


class VisionBlock(nn.Module):
    """In a DiT each half is shifted, scaled and gated by what a vector per image says."""

    def __init__(self, dropout: float, *, modulated: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(DIM, elementwise_affine=not modulated) for _ in range(2))
        self.attn, self.mlp = FusedAttention(), Mlp(dropout)
        if modulated:
            self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x_BTD: Tensor, c_BD: Tensor | None = None) -> Tensor:
        if c_BD is None:
            x_BTD = x_BTD + self.attn(self.norm1(x_BTD))
            return x_BTD + self.mlp(self.norm2(x_BTD))
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c_BD).unsqueeze(1).chunk(6, -1)
        x_BTD = x_BTD + gate1 * self.attn(self.norm1(x_BTD) * (1 + scale1) + shift1)
        return x_BTD + gate2 * self.mlp(self.norm2(x_BTD) * (1 + scale2) + shift2)


class VisionTransformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 4, 4)
        self.blocks = nn.Sequential(*(VisionBlock(dropout) for _ in range(2)))
        self.head = nn.Linear(DIM, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch_embed(pixels).flatten(2).transpose(1, 2)).mean(1))


class DiT(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(8, DIM)
        self.blocks = nn.ModuleList(VisionBlock(dropout, modulated=True) for _ in range(2))
        self.final_layer = nn.Linear(DIM, 8)

    def forward(self, x_BTC: Tensor, c_BD: Tensor) -> Tensor:
        x_BTD = self.x_embedder(x_BTC)
        for block in self.blocks:
            x_BTD = block(x_BTD, c_BD)
        return self.final_layer(x_BTD)


def build(kind: type[nn.Module], dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    """Return one of these models, and its inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(dropout).train()
    generator = torch.Generator().manual_seed(1)
    if kind is Llama3Model:
        return model, {"tokens": torch.randint(WORDS, (2, TOKENS), generator=generator)}
    if kind is VisionTransformer:
        return model, {"pixels": torch.randn(2, 3, 16, 16, generator=generator)}
    x_BTC = torch.randn(2, TOKENS, 8, generator=generator)
    return model, {"x_BTC": x_BTC, "c_BD": torch.randn(2, DIM, generator=generator)}
