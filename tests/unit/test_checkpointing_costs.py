"""What full recomputation costs, counted: FLOPs of matrix products, and all-reduces under tensor parallelism.

TransformerEngine, Megatron and DeepSpeed run the whole forward again, as torch's reentrant mode does: 100 % of a
forward's FLOPs, and 6 all-reduces a layer. By default a region stops when backward has all it needs: before the last
matrix product, and so before the all-reduce behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.layers import mixed, stack
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder

Step = Callable[[Tensor], Tensor]
CALLS = 3  # the first under the recorder, the others without a mode


def applied(layer: nn.Module, **settings: Any) -> Step:
    return sac.apply(nn.Sequential(layer), {"mode": "full", "blocks": ["0"], **settings})


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    "none": lambda layer: layer,
    "torch": lambda layer: partial(checkpoint, layer, use_reentrant=False),
    "torch reentrant": lambda layer: partial(checkpoint, layer, use_reentrant=True),
    "sac.checkpoint": lambda layer: partial(sac.checkpoint, layer),
    "sac.checkpoint reentrant": lambda layer: partial(sac.checkpoint, layer, use_reentrant=True),
    "sac.apply": applied,
    "sac.apply to the end": lambda layer: applied(layer, early_stop=False),
}
EARLY = ["torch", "sac.checkpoint", "sac.apply"]
TO_THE_END = ["torch reentrant", "sac.checkpoint reentrant", "sac.apply to the end"]


def gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    found = [one.grad for one in (x, *layer.parameters())]
    x.grad = None
    layer.zero_grad()
    assert None not in found
    return found  # type: ignore[return-value]


# FLOPs


def recomputed(way: str, tokens: int = 8) -> list[float]:
    """The FLOPs that backward runs more than without recomputation, as a share of a forward's, for each call."""
    layer = stack(1)[0]
    x = torch.randn(2, tokens, 32, requires_grad=True)
    with Recorder() as forward:
        out = layer(x)
    with Recorder() as backward:
        out.sum().backward()
    expected = gradients(layer, x)
    run, shares = WAYS[way](layer), []
    for _ in range(CALLS):
        out = run(x)
        with Recorder() as seen:
            out.sum().backward()
        shares.append((seen.product_flops - backward.product_flops) / forward.product_flops)
        assert all(map(torch.equal, gradients(layer, x), expected))
    return shares


@pytest.mark.parametrize(("way", "share"), [*((way, 2 / 3) for way in EARLY), *((way, 1.0) for way in TO_THE_END)])
def test_two_thirds_of_a_forward_are_recomputed_by_default_and_all_without_early_stop(way: str, share: float) -> None:
    assert recomputed(way) == [share] * CALLS


# All-reduces


class _Copied(torch.autograd.Function):
    """Into the tensor-parallel region: each rank has the input, and its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class _Reduced(torch.autograd.Function):
    """Out of the tensor-parallel region: the sum of what the ranks have, written in place as Megatron does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class TensorParallelLayer(nn.Module):
    """`PreNormLayer` with heads and MLP split over the ranks of the default group."""

    def __init__(self, d: int = 32, heads: int = 4) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.heads = heads // ranks
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d // ranks), nn.Linear(d // ranks, d, bias=False)
        self.up, self.down = nn.Linear(d, 4 * d // ranks), nn.Linear(4 * d // ranks, d, bias=False)
        self.out_bias, self.down_bias = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x: Tensor) -> Tensor:
        h = mixed(self.qkv(_Copied.apply(self.attention_norm(x))), self.heads)
        x = x + _Reduced.apply(self.out(h)) + self.out_bias
        h = F.gelu(self.up(_Copied.apply(self.mlp_norm(x))))
        return x + _Reduced.apply(self.down(h)) + self.down_bias


def all_reduces(way: str) -> list[int]:
    """In one rank: the all-reduces of a forward and backward, for each call."""
    torch.manual_seed(0)  # weights differ only in how they are read: that does not matter to what is counted
    layer = TensorParallelLayer()
    x = torch.randn(2, 8, 32, requires_grad=True)
    layer(x).square().sum().backward()
    expected = gradients(layer, x)
    run, counts = WAYS[way](layer), []
    for _ in range(CALLS):
        with Recorder() as seen:
            run(x).square().sum().backward()
        counts.append(seen.count("allreduce"))
        assert all(map(torch.equal, gradients(layer, x), expected))
    return counts


COUNTS = {"none": 4, **dict.fromkeys(EARLY, 5), **dict.fromkeys(TO_THE_END, 6)}


@pytest.mark.parametrize("way", COUNTS)
def test_the_all_reduce_behind_the_last_product_is_not_run_again_by_default(way: str) -> None:
    assert run_ranks(2, all_reduces, way) == [[COUNTS[way]] * CALLS] * 2
