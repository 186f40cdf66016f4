"""Tiny models in plain torch, laid out as torchtitan, timm, ``nn.Transformer*`` and hand-written models are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 16
WORDS = 32


class Attention(nn.Module):
    def __init__(self, dim: int = DIM, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, -1))
        mixed_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.proj(mixed_BTD)


class SwiGLU(nn.Module):
    def __init__(self, dim: int = DIM, hidden: int = 2 * DIM) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Experts(nn.Module):
    """A router over a ModuleList of experts, each token through its best one."""

    def __init__(self, dim: int = DIM, count: int = 3) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, count, bias=False)
        self.experts = nn.ModuleList(SwiGLU(dim) for _ in range(count))

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight, chosen = self.gate(x_BTD).softmax(-1).max(-1, keepdim=True)
        return sum(weight * (chosen == i) * expert(x_BTD) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    """One pre-norm transformer block; ``dropout`` is on the residual branches."""

    def __init__(self, dim: int = DIM, dropout: float = 0.0, mlp: Callable[[], nn.Module] = SwiGLU) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward = mlp()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.feed_forward(self.ffn_norm(x_BTD)))


class TitanStyle(nn.Module):
    """Layers in a ModuleDict with numbers as keys; a pipeline stage holds only ``keys`` of ``n_layers``."""

    def __init__(self, keys: range = range(3), n_layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.model_args = SimpleNamespace(n_layers=n_layers)
        self.tok_embeddings = nn.Embedding(WORDS, DIM)
        self.layers = nn.ModuleDict({str(key): Block(dropout=dropout) for key in keys})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x_BTD = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x_BTD = layer(x_BTD)
        return self.output(self.norm(x_BTD))


class TimmStyle(nn.Module):
    """A patch embedding and ``blocks`` in a Sequential."""

    def __init__(self, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, DIM, 4, 4)
        self.blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(depth)))
        self.head = nn.Linear(DIM, 4)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch_embed(pixels).flatten(2).transpose(1, 2)).mean(1))


class Stage(nn.Module):
    """A patch merger and its own stack of blocks, as in hierarchical vision models."""

    def __init__(self, depth: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.downsample = nn.Linear(DIM, DIM)
        self.blocks = nn.Sequential(*(Block(dropout=dropout) for _ in range(depth)))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.blocks(self.downsample(x_BTD))


class Staged(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (1, 2), dropout: float = 0.0) -> None:
        super().__init__()
        self.stages = nn.ModuleList(Stage(depth, dropout) for depth in depths)

    def forward(self, x_BTD: Tensor) -> Tensor:
        for stage in self.stages:
            x_BTD = stage(x_BTD)
        return x_BTD


def _tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(1))}


def _hidden(name: str) -> dict[str, Tensor]:
    return {name: torch.randn(2, 8, DIM, generator=torch.Generator().manual_seed(1))}


def _pixels() -> dict[str, Tensor]:
    return {"pixels": torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


def _encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder(dropout: float) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 2, 2 * DIM, dropout, batch_first=True), 2)


RECIPES: dict[str, tuple[Callable[[float], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "titan": (lambda p: TitanStyle(dropout=p), _tokens),
    "timm": (lambda p: TimmStyle(dropout=p), _pixels),
    "staged": (lambda p: Staged(dropout=p), lambda: _hidden("x_BTD")),
    "sequential": (lambda p: nn.Sequential(*(Block(dropout=p) for _ in range(3))), lambda: _hidden("input")),
    "experts": (
        lambda p: nn.Sequential(*(Block(dropout=p, mlp=Experts) for _ in range(2))),
        lambda: _hidden("input"),
    ),
    "block": (lambda p: Block(dropout=p), lambda: _hidden("x_BTD")),
    "transformer_encoder": (_encoder, lambda: _hidden("src")),
    "transformer_decoder": (_decoder, lambda: {**_hidden("tgt"), **_hidden("memory")}),
}

PLAIN: tuple[str, ...] = tuple(RECIPES)


def plain(name: str, *, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a plain torch model in training mode and its inputs; ``model(**inputs)`` is one tensor."""
    build, inputs = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(dropout)
    return model.train(), inputs()
