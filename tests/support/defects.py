"""The regions on which torch 2.13's own selective checkpointing is wrong or breaks, one body per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.blocks import FunctionBlock, Stack, policy, save
from tests.support.custom_ops import SquareByAccumulation, TanhByOutVariant, noisy_attention

EVERYTHING = policy(default="save")
NOTHING = policy()


@dataclass(frozen=True)
class Defect:
    """One row: the region, the policy that shows the defect, and what torch 2.13 does under it on CPU."""

    id: str
    body: Callable[..., Any]
    policy: dict[str, Any]
    stock: str  # "wrong": other gradients and no error; else a part of the error's text
    children: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)

    def build(self) -> Stack:
        """A stack of two such regions."""
        return Stack(*(self._block(seed) for seed in (11, 12)))

    def _block(self, seed: int) -> FunctionBlock:
        block = FunctionBlock(self.body, **{name: make() for name, make in self.children.items()})
        block.generator = torch.Generator().manual_seed(seed)
        return block


def dropout_twice(block: FunctionBlock, x: Tensor) -> Tensor:
    """The first is saved, so a replay that does not advance the generator gives the second another mask."""
    first, _ = torch.native_dropout(x @ block.a, 0.5, True)
    second = F.dropout(first.sin(), 0.5, True)
    return second * second


def random_like(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout((x @ block.a) * torch.rand_like(x), 0.3, True)
    return h * h


def sampled(block: FunctionBlock, x: Tensor) -> Tensor:
    index = torch.multinomial((x @ block.a).softmax(-1), 4)
    h = F.dropout((x @ block.b).gather(1, index).repeat(1, 2), 0.3, True)
    return h * h * x


def attention_with_dropout(block: FunctionBlock, x: Tensor) -> Tensor:
    mixed, _ = noisy_attention(x @ block.a, x @ block.b, x, 0.4)
    h = x + F.dropout(mixed, 0.3, True)
    return h * h.sin()


def explicit_generator(block: FunctionBlock, x: Tensor) -> Tensor:
    noise = torch.rand(x.shape, generator=block.generator).to(x.device)
    h = (x @ block.a) * noise
    kept = torch.empty(x.shape).bernoulli_(0.7, generator=block.generator).to(x.device)
    return F.dropout(h.sin() * kept, 0.3, True) * h


def randomized_relu_last(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.rrelu(F.dropout(x @ block.a, 0.3, True), training=True)


def relu_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    return F.dropout(h.relu_() @ block.b, 0.3, True).sin() * x


def add_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.add_(x)
    return F.dropout(h.sin(), 0.3, True) @ block.b * h


def add_in_place_through_view(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    h.view(-1).add_(0.5)
    return F.dropout(h.sin(), 0.3, True) @ block.b * h


def fused_norm(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.dropout(block.get_submodule("norm")(x @ block.a), 0.3, True) @ block.b


def out_variant(block: FunctionBlock, x: Tensor) -> Tensor:
    return TanhByOutVariant.apply(torch.native_dropout(x @ block.a, 0.3, True)[0]) * x


def kept_accumulator(block: FunctionBlock, x: Tensor) -> Tensor:
    return SquareByAccumulation.apply(torch.native_dropout(x @ block.a, 0.3, True)[0]) * x


def build_rms_norm() -> nn.Module:
    return nn.RMSNorm(8)


def build_batch_norm() -> nn.Module:
    return nn.BatchNorm1d(8)


FIRST_DROPOUT = policy(save("aten.native_dropout", call={"index": [0]}))
MATMUL = policy(save("matmul"))
DEFECTS = (
    Defect("saved dropout, then dropout", dropout_twice, FIRST_DROPOUT, "wrong"),
    Defect("saved rand_like, then dropout", random_like, policy(save("aten.rand_like")), "wrong"),
    Defect("saved multinomial, then dropout", sampled, policy(save("aten.multinomial")), "wrong"),
    Defect(
        "saved untagged attention with dropout, then dropout",
        attention_with_dropout,
        policy(save("sactest::noisy_attention")),
        "wrong",
    ),
    Defect("explicit generator", explicit_generator, MATMUL, "wrong"),
    Defect("saved explicit generator", explicit_generator, policy(save("aten.rand.generator")), "wrong"),
    Defect("rrelu as the last op", randomized_relu_last, MATMUL, "wrong"),
    Defect("saved mm, then relu_", relu_in_place, MATMUL, "has been mutated"),
    Defect("saved mm, then add_", add_in_place, MATMUL, "has been mutated"),
    Defect("saved mm, then view().add_", add_in_place_through_view, MATMUL, "has been mutated"),
    Defect("save everything, RMSNorm", fused_norm, EVERYTHING, "has been mutated", {"norm": build_rms_norm}),
    Defect("save everything, BatchNorm", fused_norm, EVERYTHING, "has been mutated", {"norm": build_batch_norm}),
    Defect("save all custom ops, out-variant op", out_variant, policy(save("sactest::*", optional=True)), "wrong"),
    Defect("save everything, raw kernel into zeros_like", kept_accumulator, EVERYTHING, "wrong"),
)
