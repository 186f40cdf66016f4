"""Tiny models in plain torch, laid out as torchtitan, timm, DiT, ``nn.Transformer*`` and hand-written models are.

Those that a shipped policy names have the class and module names that it must find.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM = 32
HEADS = 4
WORDS = 32
TOKENS = 12


def mixed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Attention over heads that lie side by side in the last dimension."""
    heads = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (q, k, v))
    return F.scaled_dot_product_attention(*heads, is_causal=causal).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.wo(mixed(self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD), causal=True))


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, 3 * DIM, bias=False) for _ in range(2))
        self.w2 = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Experts(nn.Module):
    """A router over a ModuleList of experts, each token through its best one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 3, bias=False)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(3))

    def forward(self, x_BTD: Tensor) -> Tensor:
        weight, chosen = self.gate(x_BTD).softmax(-1).max(-1, keepdim=True)
        return sum(weight * (chosen == i) * expert(x_BTD) for i, expert in enumerate(self.experts))


class Block(nn.Module):
    """One pre-norm transformer block; ``dropout`` is on the residual branches."""

    def __init__(self, dropout: float = 0.0, mlp: Callable[[], nn.Module] = SwiGLU) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM)
        self.attention = Attention()
        self.ffn_norm = nn.RMSNorm(DIM)
        self.feed_forward = mlp()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self.dropout(self.feed_forward(self.ffn_norm(x_BTD)))


class Llama3Model(nn.Module):
    """Of torchtitan: layers in a ModuleDict by numbers; a pipeline stage holds only ``keys`` of ``n_layers``."""

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


class FusedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.proj(mixed(*self.qkv(x_BTD).chunk(3, -1), causal=False))


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
    """Of timm: a patch embedding and ``blocks`` in a Sequential."""

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


def _drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens() -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))}


def _hidden(*names: str) -> dict[str, Tensor]:
    return {name: _drawn(2, TOKENS, DIM) for name in names}


def _encoder(dropout: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder(dropout: float) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 2, 2 * DIM, dropout, batch_first=True), 2)


RECIPES: dict[str, tuple[Callable[[float], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "titan": (lambda p: Llama3Model(dropout=p), _tokens),
    "Llama3Model": (lambda p: Llama3Model(range(2), 2, p), _tokens),
    "VisionTransformer": (VisionTransformer, lambda: {"pixels": _drawn(2, 3, 16, 16)}),
    "DiT": (DiT, lambda: {"x_BTC": _drawn(2, TOKENS, 8), "c_BD": _drawn(2, DIM, seed=2)}),
    "staged": (lambda p: Staged(dropout=p), lambda: _hidden("x_BTD")),
    "sequential": (lambda p: nn.Sequential(*(Block(dropout=p) for _ in range(3))), lambda: _hidden("input")),
    "experts": (lambda p: nn.Sequential(*(Block(dropout=p, mlp=Experts) for _ in range(2))), lambda: _hidden("input")),
    "block": (lambda p: Block(dropout=p), lambda: _hidden("x_BTD")),
    "transformer_encoder": (_encoder, lambda: _hidden("src")),
    "transformer_decoder": (_decoder, lambda: _hidden("tgt", "memory")),
}


def plain(name: str, *, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a plain torch model in training mode and its inputs; ``model(**inputs)`` is one tensor."""
    build, inputs = RECIPES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(dropout)
    return model.train(), inputs()
