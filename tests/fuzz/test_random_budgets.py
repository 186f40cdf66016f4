"""A budget in the config of random trainings that change: parameters, losses and gradients are those without sac."""

from __future__ import annotations

import contextlib
import random
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from tests.support.blocks import LlamaLikeBlock
from tests.support.layers import PreNormLayer

DIM = 32


class Experts(nn.Module):
    """A block that routes each row to two of three experts."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.router = nn.Linear(DIM, DIM), nn.Linear(DIM, 3)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.attention(x))
        weight, chosen = self.router(h).softmax(-1).topk(2)
        mixed = sum(
            (weight * (chosen == index)).sum(-1, keepdim=True) * expert(h).relu()
            for index, expert in enumerate(self.experts)
        )
        return x + F.dropout(mixed, 0.1, self.training)


class Network(nn.Module):
    """Blocks of one or two kinds between an embedding and a head, which fails when it is told to."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        kinds = draw.sample([LlamaLikeBlock, PreNormLayer, Experts], draw.choice([1, 1, 2]))
        self.embedding, self.head = nn.Embedding(16, DIM), nn.Linear(DIM, 16)
        self.layers = nn.ModuleList(kind() for kind in kinds for _ in range(draw.choice([2, 3])))
        self.fails = False

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)
        if self.fails:
            raise ArithmeticError
        return self.head(h)


def trained(seed: int, *, with_budget: bool) -> list[Tensor]:
    """Seven steps, of which each may change something; the losses, and at the end all parameters."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    model = Network(draw)
    value = {"mode": "selective", "budget": draw.choice(["10%", "30%", "50%", "70%", "90%", "1GiB"])}
    if with_budget:
        sac.apply(model, value)
    optimizer = draw.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=1e-2)
    lengths, losses = draw.choice([[8], [8], [8, 16], [4, 8, 16]]), []
    for _ in range(7):
        what = draw.choice(["plain", "plain", "autocast", "freeze", "fails", "eval", "losses", "accumulate", "skip"])
        batches = [torch.randint(16, (draw.choice([2, 2, 3]), draw.choice(lengths))) for _ in range(2)]
        model.train(what != "eval" or draw.random() < 0.5)
        model.fails = what == "fails"
        if what == "freeze":
            model.layers[0].requires_grad_(draw.random() < 0.5)
        around = torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast")
        with contextlib.suppress(ArithmeticError), around:
            if what == "losses":
                loss = sum(model(ids).float().square().mean() for ids in batches)
                loss.backward()
            else:
                for ids in batches[: 1 + (what == "accumulate")]:
                    with torch.set_grad_enabled(what != "eval"):
                        loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1).flatten())
                    if what != "eval":
                        loss.backward()
            losses.append(loss.detach())
        if what not in ("skip", "eval", "fails"):
            optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(parameter.detach() for parameter in model.parameters()), torch.get_rng_state()]


def differs(seed: int) -> bool:
    """Whether a training with a budget is another one than without sac."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, ours = (trained(seed, with_budget=given) for given in (False, True))
    return len(plain) != len(ours) or not all(map(torch.equal, plain, ours))


@pytest.mark.parametrize("first", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_a_budget_changes_nothing_but_memory(first: int) -> None:
    assert [seed for seed in range(first, first + 8) if differs(seed)] == []
