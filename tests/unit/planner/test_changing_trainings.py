"""A budget changes no result of trainings that change from step to step: sizes, precision, failed forwards."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.unit.planner.small_training import within


class Block(nn.Module):
    """A block of one kind out of eight, which the training may exchange for another."""

    def __init__(self, width: int, kind: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.kind, self.calls = kind, 0
        self.memory: Tensor | None = None
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, x_BTD: Tensor, scale: Tensor | None = None) -> Tensor:
        self.calls += 1
        h_BTF = self.up(self.norm(x_BTD))
        if self.kind == 1:
            h_BTF = h_BTF * (1 + 0.01 * self.calls)
        h_BTF = h_BTF.tanh() if self.kind == 2 and self.calls % 2 else nn.functional.gelu(h_BTF)
        if self.kind == 3:
            self.seen.add_(h_BTF.detach().mean((0, 1))[: len(self.seen)])
            h_BTF = h_BTF + self.seen.sum() * 1e-3
        elif self.kind == 4:
            h_BTF = nn.functional.dropout(h_BTF, 0.1)
        elif self.kind == 5:
            weights, chosen = h_BTF.topk(4, -1)
            h_BTF = h_BTF.clone().scatter_(-1, chosen, weights.softmax(-1) + 0.1 * torch.rand_like(weights))
        elif self.kind == 6:
            if self.memory is not None and self.memory.shape == h_BTF.shape:
                h_BTF = h_BTF + 0.1 * self.memory
            self.memory = h_BTF.detach()
        elif self.kind == 7:
            h_BTF.mul_(1.01)
        if scale is not None:
            h_BTF = h_BTF * scale
        return x_BTD + self.down(h_BTF)


class Model(nn.Module):
    def __init__(self, width: int, kinds: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, kind) for kind in kinds)

    def forward(self, x_BTD: Tensor, scale: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x_BTD = block(x_BTD) if scale is None else block(x_BTD, scale=scale)
        return x_BTD


def _trained(seed: int, value: Any) -> list[Tensor]:
    """Return what a random training of six steps computes: losses, gradients, parameters, buffers, random numbers."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.choice([16, 32])
    model = Model(width, [draw.randrange(8) for _ in range(draw.choice([2, 4]))])
    if value is not None:
        sac.apply(model, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    results = []
    for _ in range(6):
        rows, length = draw.choice([2, 4, 4, 6]), draw.choice([8, 16])
        if draw.random() < 0.2:
            model.eval()
            with torch.no_grad():
                results.append(model(torch.randn(rows, length, width)))
            model.train()
        if draw.random() < 0.2:
            for parameter in model.blocks[0].parameters():
                parameter.requires_grad_(not parameter.requires_grad)
        if draw.random() < 0.2:
            model.blocks[0].kind = draw.randrange(8)
        if draw.random() < 0.2:
            with pytest.raises(RuntimeError):
                model(torch.randn(rows, length, width + 1))
        is_mixed, has_scale, has_two, again = (draw.random() < 0.25 for _ in range(4))
        for _ in range(draw.choice([1, 1, 2, 3])):
            x_BTD = torch.randn(rows, length, width)
            scale = torch.tensor(0.5, requires_grad=True) if has_scale else None
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                loss = model(x_BTD, scale).float().pow(2).mean()
                if has_two:
                    loss = loss + model(2 * x_BTD, scale).float().abs().mean()
            if again:
                loss.backward(retain_graph=True)
            loss.backward()
            results += [loss.detach(), *([scale.grad] if scale is not None else [])]
        results += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    counts = torch.tensor([block.calls for block in model.blocks])
    return [*results, *model.state_dict().values(), counts, torch.rand(3)]


@pytest.mark.parametrize("seed", range(8))
def test_training_is_the_same(seed: int) -> None:
    expected = _trained(seed, None)
    for value in (within("50%"), within("10%")):
        found = _trained(seed, value)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
