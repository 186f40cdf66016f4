"""A router whose ties fall otherwise in recompute: the rows that each expert got in forward stay as they were.

torch's plain checkpoint raises on it or is wrong; saving the routing ops is our must-save tier, in `full` too.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from tests.support.blocks import APPLY, FULL, FunctionBlock, Stack, policy, save, selective, square, ways
from tests.support.custom_ops import Wobble, wobble
from tests.support.stock import install_stock
from tests.support.training import assert_same_training

EXPERTS = 4
IN_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does")


def _tied_scores(block: FunctionBlock, x: Tensor) -> Tensor:
    """Scores that differ between two runs by rounding alone, as those of a non-deterministic kernel."""
    scores = (x @ block.a)[:, :EXPERTS].softmax(-1)
    Wobble.sign = 1.0 if block.runs % 2 else -1.0
    return wobble(scores + (1 - scores.detach()))


def dense_mixture(block: FunctionBlock, x: Tensor) -> Tensor:
    """Shapes agree whatever the router says, so a wrong choice is silent."""
    weights, chosen = _tied_scores(block, x).topk(2, dim=-1)
    experts = torch.stack([(x @ block.b + index).sin() for index in range(EXPERTS)], 1)
    rows = experts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[1]))
    return (weights.unsqueeze(-1) * rows).sum(1) * x


def grouped_mixture(block: FunctionBlock, x: Tensor) -> Tensor:
    """Each expert sees its own rows, so a wrong choice changes shapes."""
    weights, chosen = _tied_scores(block, x).topk(2, dim=-1)
    out = torch.zeros_like(x)
    for expert in range(EXPERTS):
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        part = (x[row] @ block.b + expert).sin() * weights[row, slot].unsqueeze(-1)
        out = out.index_add(0, row, part)
    return out * x


def sorted_mixture(block: FunctionBlock, x: Tensor) -> Tensor:
    """Routing by sort."""
    weights, order = _tied_scores(block, x).sort(dim=-1, descending=True)
    rows = (x @ block.b).gather(1, order) * weights
    return (rows.sin() * weights).repeat(1, 2) * x


def listed_mixture(block: FunctionBlock, x: Tensor) -> Tensor:
    """Only Python reads the choice."""
    chosen = _tied_scores(block, x).argmax(-1).tolist()
    return torch.stack([(row @ block.b * (expert + 1)).sin() for row, expert in zip(x, chosen, strict=True)]) * x


def mixture_after_an_unseen_write(block: FunctionBlock, x: Tensor) -> Tensor:
    """Replay gives way here, and Python runs again."""
    h = x @ block.a
    h.detach().numpy()[:] *= 0.5
    return dense_mixture(block, h.sin())


def mixture_at_the_end_after_an_unseen_write(block: FunctionBlock, x: Tensor) -> Tensor:
    """As above; no replay starts from the choice."""
    h = (x @ block.a).sin()
    h.detach().numpy()[:] *= 0.5
    weights, chosen = _tied_scores(block, h).topk(2, dim=-1)
    experts = torch.stack([(h @ block.b + index).sin() for index in range(EXPERTS)], 1)
    rows = experts.gather(1, chosen.unsqueeze(-1).expand(-1, -1, h.shape[1]))
    return (weights.unsqueeze(-1) * rows).sum(1)


BODIES = [
    dense_mixture,
    grouped_mixture,
    sorted_mixture,
    listed_mixture,
    mixture_after_an_unseen_write,
    mixture_at_the_end_after_an_unseen_write,
]
VALUES = {
    "full": FULL,
    "nothing": selective(policy()),
    "matmuls": selective(policy(save("matmul"))),
    "everything": selective(policy(default="save")),
}


@pytest.mark.parametrize(("name", "entry"), ways(VALUES, (*APPLY, "context_fn")))
@pytest.mark.parametrize("body", BODIES)
def test_routing_of_forward_is_kept(body: Any, name: str, entry: str) -> None:
    assert_same_training(lambda: Stack(FunctionBlock(body)), VALUES[name], entry=entry, make_input=square)


@IN_2_13
@pytest.mark.parametrize("body", BODIES)
def test_plain_checkpoint_reroutes(body: Any) -> None:
    with pytest.raises((AssertionError, CheckpointError)):
        assert_same_training(lambda: Stack(FunctionBlock(body)), FULL, make_input=square, put=install_stock)
