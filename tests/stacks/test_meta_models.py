"""Models without data: on the meta device first and made real later, run there, and run on fake tensors.

Sharded ones are in test_sharded_programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sac
from sac.tools.comparison import count_flops
from tests.stacks.composition import gradients_of
from tests.support.blocks import FULL, Stack, alternate, llama_stack, policy, save, selective
from tests.support.training import assert_same

VALUES: dict[str, Any] = {"full": FULL, "selective": selective(policy(save("attention"), alternate("matmul")))}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())


def real() -> Stack:
    torch.manual_seed(1)
    return llama_stack(2)


def copied_in(model: Stack) -> None:
    """Give memory to what is on the meta device, then the data."""
    model.to_empty(device="cpu")
    take_data(model, assign=False)


def assigned(model: Stack) -> None:
    """Put the data in its place, as a checkpoint is loaded without a copy."""
    take_data(model, assign=True)


def take_data(model: Stack, *, assign: bool) -> None:
    source = real()
    model.load_state_dict(source.state_dict(), assign=assign)
    for block, other in zip(model.blocks, source.blocks, strict=True):
        block.self_attn.cos, block.self_attn.sin = other.self_attn.cos, other.self_attn.sin


def on_meta() -> Stack:
    with torch.device("meta"):
        return llama_stack(2)


def step(model: nn.Module, device: str = "cpu") -> None:
    x = torch.randn(2, 8, 32, device=device)
    model(x).square().sum().backward()


def trained(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(2)
    seen: dict[str, Tensor] = {}
    for index in range(3):
        step(model)
        seen |= {f"{index} {name}": one for name, one in gradients_of(model).items()}
        model.zero_grad()
    return seen


@pytest.mark.parametrize("ran_before", [False, True], ids=["", "after a step on meta"])
@pytest.mark.parametrize("become_real", [copied_in, assigned])
@ON_EACH_VALUE
def test_apply_then_real_data(value: Any, become_real: Callable[[Stack], None], ran_before: bool) -> None:
    model, plain = sac.apply(on_meta(), value), real()
    if ran_before:
        step(model, "meta")
        model.zero_grad()
    become_real(model)
    assert_same(trained(plain), trained(model))
    assert count_flops(lambda: step(model)) > count_flops(lambda: step(plain))


@ON_EACH_VALUE
def test_steps_on_the_meta_device(value: Any) -> None:
    model = sac.apply(on_meta(), value)
    for _ in range(2):
        step(model, "meta")
    assert all(one.grad.is_meta and one.grad.shape == one.shape for one in model.parameters())


@ON_EACH_VALUE
def test_steps_on_fake_tensors_cost_what_real_ones_cost(value: Any) -> None:
    model = sac.apply(real(), value)
    step(model)
    expected = count_flops(lambda: step(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sac.apply(llama_stack(2), value)
        for _ in range(2):
            step(model)
        assert count_flops(lambda: step(model)) == expected
        assert all(one.grad.shape == one.shape for one in model.parameters())
