"""A small Llama that can be sharded, cut into pipeline stages and given DTensors: whole, or some of its layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import GatedMLP, RootMeanSquareNorm, rotate

MAX_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """What one model is built from; `width` is in features, `head` in features per head."""

    vocab: int = 64
    width: int = 32
    heads: int = 4
    hidden: int = 64
    n_layers: int = 2
    dropout: float = 0.0

    @property
    def head(self) -> int:
        return self.width // self.heads


class Core(nn.Module):
    """Attention itself: a module, so that a plan can say what it is given."""

    def forward(self, q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)


class Attention(nn.Module):
    """Causal attention whose number of heads is what its projections give: a rank of a group may have some of them."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(sizes.width, sizes.width, bias=False))
        self.core = Core()

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        q, k, v = (
            project(x_BTD).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = self.core(rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK), v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """One pre-norm decoder block."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(sizes.width)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = RootMeanSquareNorm(sizes.width)
        self.mlp = GatedMLP(sizes.width, sizes.hidden)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
        h_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK))
        return h_BTD + self.dropout(self.mlp(self.post_attention_layernorm(h_BTD)))


class Llama(nn.Module):
    """Token numbers in, logits out. A part of it has some of the layers, under their own numbers, and may lack ends."""

    def __init__(self, sizes: Sizes, layers: Iterable[int] | None = None, *, first: bool = True, last: bool = True):
        super().__init__()
        self.sizes = self.args = sizes
        chosen = range(sizes.n_layers) if layers is None else layers
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.width) if first else None
        self.layers = nn.ModuleDict({str(number): DecoderLayer(sizes) for number in chosen})
        self.norm = RootMeanSquareNorm(sizes.width) if last else None
        self.output = nn.Linear(sizes.width, sizes.vocab, bias=False) if last else None
        angles = torch.outer(torch.arange(MAX_TOKENS), 1e4 ** -(torch.arange(0, sizes.head, 2) / sizes.head))
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h_BTD = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        tokens = self._tokens(x)
        cos_TK, sin_TK = self.cos[:tokens], self.sin[:tokens]
        for layer in self.layers.values():
            h_BTD = layer(h_BTD, cos_TK, sin_TK)
        h_BTD = self.norm(h_BTD) if self.norm is not None else h_BTD
        return self.output(h_BTD) if self.output is not None else h_BTD

    def _tokens(self, x: Tensor) -> int:
        return int(x.shape[1])


def built(sizes: Sizes, **part: Any) -> Llama:
    """A model, or the part of it that the same seed gives: its parameters are those of the whole model."""
    torch.manual_seed(7)
    whole = Llama(sizes)
    if not part:
        return whole
    model = Llama(sizes, **part)
    model.load_state_dict({name: whole.state_dict()[name] for name in model.state_dict()})
    return model


def batch(sizes: Sizes, rows: int = 2, tokens: int = 16, seed: int = 11) -> tuple[Tensor, Tensor]:
    """Token numbers and the ones to be predicted, the same on every rank that gives the same seed."""
    numbers = torch.randint(sizes.vocab, (rows, tokens + 1), generator=torch.Generator().manual_seed(seed))
    return numbers[:, :-1].contiguous(), numbers[:, 1:].contiguous()


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), labels_BT.flatten())
