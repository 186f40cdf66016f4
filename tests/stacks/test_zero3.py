"""Weights that hold nothing between their uses, as DeepSpeed's ZeRO-3 has them, frozen ones among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, noop_context_fn

import sac
from sac.tools.comparison import count_flops
from tests.stacks.zero3 import Sharded, its_linear
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.training import assert_same, built

WIDTH = 16
VALUES: dict[str, Any] = {
    "full": FULL,
    "reentrant": {**FULL, "use_reentrant": True},
    "selective": selective(policy(save("matmul", module="up"))),
    "save all": selective(policy(default="save")),
}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
TRAINED = {"all": "", "adapters": "post", "nothing before the last": "blocks.2.post"}
ON_EACH_PART = pytest.mark.parametrize("trained", TRAINED.values(), ids=TRAINED.keys())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.post(x + self.dropout(self.down(self.up(self.norm(x)).tanh())))


def model_of(value: Any, trained: str, *, sharded_first: bool) -> tuple[nn.Module, Sharded]:
    model = built(lambda: Stack(*(Block() for _ in range(3))))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    if sharded_first:
        sharded = Sharded(model)
    if value is not None:
        sac.apply(model, value)
    return model, sharded if sharded_first else Sharded(model)


def step(model: nn.Module) -> None:
    x = torch.randn(2, 4, WIDTH, requires_grad=True)
    model(x).square().sum().backward()


def gradients(model: nn.Module, steps: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(2)
    found = {}
    for index in range(steps):
        step(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[f"step {index} {name}"], parameter.ds_grad = parameter.ds_grad, None
    return found


@pytest.mark.parametrize("sharded_first", [False, True], ids=["sharded after", "sharded before"])
@ON_EACH_PART
@ON_EACH_VALUE
def test_gradients_are_those_without_us(value: Any, trained: str, sharded_first: bool) -> None:
    plain, _ = model_of(None, trained, sharded_first=sharded_first)
    ours, _ = model_of(value, trained, sharded_first=sharded_first)
    with its_linear():
        assert_same(gradients(plain), gradients(ours))
        recomputed = count_flops(lambda: step(ours)) - count_flops(lambda: step(plain))
    assert (recomputed > 0) == (value is not VALUES["save all"])


def test_torch_fails_where_weights_are_frozen() -> None:
    model, _ = model_of(None, "post", sharded_first=False)
    model.context_fns = [noop_context_fn] * 3
    with its_linear(), pytest.raises(CheckpointError, match="different metadata"):
        step(model)
