"""Small decoders to shard: dense, with experts, with branches; equal weights in every call and every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import Attention, LlamaLikeBlock, with_dropout

WIDTH, HEADS, TOKENS, BLOCKS = 32, 4, 8, 2
DROPOUT = 0.1


class ExpertsBlock(nn.Module):
    """Experts that can be sharded units inside the block, with ops that save after them.

    So recomputation begins before their own pre-backward. Each expert runs on every token: no path depends on ties.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.self_attn = Attention(WIDTH, HEADS)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.post_norm = nn.LayerNorm(WIDTH)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = x_BTD + self.self_attn(self.norm(x_BTD))
        gates = self.router(h_BTD).softmax(-1).unbind(-1)
        mixed = [gate[..., None] * expert(h_BTD) for gate, expert in zip(gates, self.experts, strict=True)]
        return h_BTD + self.post_norm(F.dropout(mixed[0] + mixed[1], DROPOUT, self.training))


class TwoWaysBlock(nn.Module):
    """A block that uses one of two branches, by its input, and has a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.unused, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        branch = self.left if x_BTD.detach().sum() > 0 else self.right
        return x_BTD + self.out(F.dropout(branch(x_BTD).tanh(), DROPOUT, self.training))


BLOCK_OF: dict[str, type[nn.Module]] = {"dense": LlamaLikeBlock, "experts": ExpertsBlock, "two ways": TwoWaysBlock}


class Decoder(nn.Module):
    """Blocks between two linear maps; parameters with a part of their name in `frozen` need no gradient."""

    def __init__(self, block: str, frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BLOCK_OF[block]() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTD = self.embed(x_BTD)
        for block in self.blocks:
            h_BTD = block(h_BTD)
        return self.head(h_BTD)


def decoder(block: str, frozen: Sequence[str] = ()) -> Decoder:
    """The same model in every call and every rank."""
    torch.manual_seed(1)
    model = Decoder(block, frozen)
    with_dropout(model, DROPOUT)
    return model
