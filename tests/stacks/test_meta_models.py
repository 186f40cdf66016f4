"""Models without data: on the meta device first and made real later, run there, and run on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sac
from sac.tools.comparison import count_flops
from tests.stacks.composition import gradients_of
from tests.support.blocks import FULL, LlamaLikeBlock, Stack, alternate, llama_stack, policy, save, selective
from tests.support.ranks import run_ranks
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


def sharded_from_meta(value: Any, apply_first: bool) -> tuple[list[str], int, int]:
    """FSDP2's way: build on meta, shard, give memory, initialise. Compares with the same run without us."""
    from torch.distributed.fsdp import fully_shard

    runs = []
    for on in (False, True):
        model = on_meta()
        if on and apply_first:
            sac.apply(model, value)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if on and not apply_first:
            sac.apply(model, value)
        model.to_empty(device="cpu")
        source = LlamaLikeBlock()
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.full_like(parameter, 0.1) + torch.ones_like(parameter) * len(parameter.shape))
            for block in model.blocks:
                block.self_attn.cos.copy_(source.self_attn.cos)
                block.self_attn.sin.copy_(source.self_attn.sin)
        seen = trained(model)
        runs.append((seen, count_flops(lambda model=model: step(model))))
    (plain, plain_flops), (ours, our_flops) = runs
    dist.barrier()
    return [name for name in plain if not torch.equal(plain[name], ours[name])], plain_flops, our_flops


@pytest.mark.parametrize("apply_first", [True, False], ids=["apply first", "shard first"])
@ON_EACH_VALUE
def test_sharded_while_on_meta(value: Any, apply_first: bool) -> None:
    for differ, plain_flops, our_flops in run_ranks(2, sharded_from_meta, value, apply_first):
        assert differ == []
        assert our_flops > plain_flops
