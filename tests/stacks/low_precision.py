"""Llama-like stacks whose linear layers are in low precision, by torchao; all run on a CPU, emulated if need be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchao", reason="torchao is in the extra `stacks`")

from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from tests.support.blocks import GatedMLP, Stack, llama_stack, tokens
from tests.support.recording import Recorder

WIDTH, LINEARS = 64, 7  # of each block: four of attention, three of the MLP
SCALING = ("aten.max.default", "aten.amax.default")


def float8(recipe: str) -> Callable[[Stack], nn.Module]:
    """Convert by a recipe of torchao, with products emulated in float32."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return lambda model: convert_to_float8_training(model, config=config)


def int8(model: Stack) -> nn.Module:
    """Weights in int8."""
    quantize_(model, int8_weight_only_quantized_training())
    return model


class NF4Linear(nn.Module):
    """A frozen weight in 4 bits, and a trained adapter of rank 4."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(linear.weight.detach(), 64, 4), requires_grad=False)
        self.down = nn.Linear(linear.in_features, 4, bias=False)
        self.up = nn.Linear(4, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight) + self.up(self.down(x))


def nf4(model: Stack) -> nn.Module:
    """Every linear layer in NF4 with an adapter: QLoRA by torchao."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, NF4Linear(child))
    return model


CONVERSIONS: dict[str, Callable[[Stack], nn.Module]] = {
    "float8 tensorwise": float8("tensorwise"),
    "float8 rowwise": float8("rowwise"),
    "int8 weights": int8,
    "nf4": nf4,
}


def build(name: str, *, small: bool = False) -> nn.Module:
    """Some blocks, converted by `CONVERSIONS[name]`; `small`: of few ops, since compiling takes time for each."""
    torch.manual_seed(0)
    return CONVERSIONS[name](Stack(GatedMLP(WIDTH, 2 * WIDTH)) if small else llama_stack(2, d=WIDTH))


def inputs(length: int = 32) -> tuple[Tensor, ...]:
    """Hidden states and the rotary tables."""
    return tokens(length=length, d=WIDTH)


def loss(given: tuple[Tensor, ...], model: nn.Module) -> Tensor:
    """The mean square of the output."""
    return model(*given).square().mean()


def scaling_reductions(model: nn.Module) -> int:
    """How many reductions to a largest magnitude one step runs, after a first one."""
    given = inputs()
    loss(given, model).backward()
    with Recorder() as seen_in_step:
        loss(given, model).backward()
    return sum(Counter(seen_in_step.ops)[name] for name in SCALING)
