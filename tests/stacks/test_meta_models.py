"""Models without data: on the meta device first and made real later, and run on fake tensors.

Sharded ones are in test_sharded_programs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sac
from sac.tools.comparison import count_flops
from tests.support.blocks import FULL, Stack, llama_stack, policy, save, selective
from tests.support.training import assert_same, built, train

VALUES: dict[str, Any] = {"full": FULL, "selective": selective(policy(save("matmul", module="mlp.gate_proj")))}
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())


def step(model: nn.Module, device: str = "cpu") -> None:
    model(torch.randn(2, 8, 32, device=device)).square().sum().backward()


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
@ON_EACH_VALUE
def test_apply_then_a_step_on_meta_then_real_data(value: Any, assign: bool) -> None:
    plain: Stack = built(llama_stack)
    with torch.device("meta"):
        model = sac.apply(llama_stack(), value)
    step(model, "meta")
    assert all(one.grad.is_meta and one.grad.shape == one.shape for one in model.parameters())
    model.zero_grad()
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(built(llama_stack).state_dict(), assign=assign)
    for block, other in zip(model.blocks, plain.blocks, strict=True):
        block.self_attn.cos, block.self_attn.sin = other.self_attn.cos, other.self_attn.sin
    assert_same(train(plain, steps=3), train(model, steps=3))
    assert count_flops(lambda: step(model)) > count_flops(lambda: step(plain))


@ON_EACH_VALUE
def test_steps_on_fake_tensors_cost_what_real_ones_cost(value: Any) -> None:
    model = sac.apply(built(llama_stack), value)
    step(model)
    expected = count_flops(lambda: step(model))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = sac.apply(llama_stack(), value)
        for _ in range(2):
            step(model)
        assert count_flops(lambda: step(model)) == expected
        assert all(one.grad.shape == one.shape for one in model.parameters())
