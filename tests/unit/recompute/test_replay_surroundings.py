"""What is around a region: caches of keys, autocast, hooks that keep tensors elsewhere, fake tensors, exceptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from tests.support.blocks import FunctionBlock, Stack
from tests.support.replay_programs import (
    ON_EACH,
    Run,
    applied,
    assert_same_run,
    block_of,
    gradients,
    python_runs,
    replay,
)

# Caches


def grows_a_cache(block: FunctionBlock, x: Tensor) -> Tensor:
    key = x @ block.a
    block.cache.append(key)
    keys = torch.cat(block.cache)
    return (x @ keys.t()).softmax(-1) @ keys @ block.b


def fills_a_cache(block: FunctionBlock, x: Tensor) -> Tensor:
    key = x @ block.a
    with torch.no_grad():
        block.keys[block.filled : block.filled + 8].copy_(key)
    block.filled += 8
    keys = block.keys[: block.filled].clone()
    return (x @ keys.t()).softmax(-1) @ keys @ block.b + key


def cached(body: Callable[[FunctionBlock, Tensor], Tensor]) -> Callable[[], Stack]:
    def build() -> Stack:
        cache: list[Tensor] = []
        model = Stack(FunctionBlock(body), FunctionBlock(body))
        for block in model.blocks:
            block.cache, block.filled = cache, 0
            block.register_buffer("keys", torch.zeros(32, 8))
        return model

    return build


def three_tokens(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    outputs = [model(torch.randn(8, 8, requires_grad=True)) for _ in range(3)]
    torch.stack(outputs).square().sum().backward()
    sizes = {"cached": torch.tensor(len(model.blocks[0].cache)), "filled": torch.tensor(model.blocks[1].filled)}
    return gradients(model) | dict(model.named_buffers()) | sizes


@ON_EACH
@pytest.mark.parametrize("body", [grows_a_cache, fills_a_cache])
def test_caches_of_keys_are_written_once(body: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    """Rerun would add each key to the cache twice."""
    assert_same_run(cached(body), chosen, three_tokens, 6)


# Autocast


def one_weight_in_two_blocks() -> Stack:
    model = Stack(*(FunctionBlock(lambda block, x: (F.linear(x, block.a).sin() @ block.b).cos()) for _ in range(2)))
    model.blocks[1].b = model.blocks[0].b
    return model


def micro_batches_in_one_autocast(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(torch.randn(8, 8)).float().square().sum() for _ in range(2))
        loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            model(torch.randn(8, 8)).float().square().sum().backward()
    return gradients(model)


@ON_EACH
@pytest.mark.filterwarnings("error")
def test_weights_that_autocast_has_cast_in_an_earlier_call(chosen: dict[str, Any]) -> None:
    assert_same_run(one_weight_in_two_blocks, chosen, micro_batches_in_one_autocast, 12)


def backward_in_autocast(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    loss = model(torch.randn(8, 8)).square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    return gradients(model)


@ON_EACH
def test_autocast_in_backward_is_not_that_of_the_forward(chosen: dict[str, Any]) -> None:
    """Without us autograd's own formulas run under it, and nothing else does."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return ((x @ block.a).sin() @ block.b).sin() * x

    assert_same_run(block_of(body), chosen, backward_in_autocast, 1)


# Around the region


def written_and_dropped(block: FunctionBlock, x: Tensor) -> Tensor:
    part = x.view(-1)[8:].view(7, 8)
    return F.dropout((x @ block.a).relu_().sin(), 0.3) @ block.b * x + x.data[1:2] * part.sum()


def on_the_host(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for _ in range(3):
        with save_on_cpu():
            out = model(torch.randn(2, 8, 8, requires_grad=True)[1] * 1.5)
        out.square().sum().backward()
    return gradients(model)


def as_arrays(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            out = model(torch.randn(2, 8, 8, requires_grad=True)[1] * 1.5)
        out.square().sum().backward()
    return gradients(model)


@ON_EACH
@pytest.mark.parametrize("run", [on_the_host, as_arrays])
def test_hooks_around_that_keep_tensors_elsewhere(run: Run, chosen: dict[str, Any]) -> None:
    assert_same_run(block_of(written_and_dropped), chosen, run, 3)


def with_constants(block: FunctionBlock, x: Tensor) -> Tensor:
    zeros, ones = torch.zeros(8, 8, device=x.device), torch.ones(8, 8, device=x.device)
    return ((x @ block.a + zeros).sin() + ones.tril()) @ block.b


@ON_EACH
def test_tensors_without_data(chosen: dict[str, Any]) -> None:
    """What estimates memory runs a step on these."""
    model = applied(block_of(with_constants), replay(chosen, "always"))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.randn(8, 8))).sum().backward()
    model.zero_grad()
    model.to("meta")
    model(torch.randn(8, 8, device="meta")).sum().backward()
    assert python_runs(model) == 2


# Errors


class Broken(Exception):
    pass


def fails_at_times(block: FunctionBlock, x: Tensor) -> Tensor:
    h = F.dropout(x @ block.a, 0.3)
    block.count.add_(1)
    if block.calls == 2:
        raise Broken
    return h.sin() * block.count


def counted() -> Stack:
    model = block_of(fails_at_times)()
    model.blocks[0].register_buffer("count", torch.zeros(8))
    return model


def past_an_error(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    for number in range(4):
        if number == 1:
            with pytest.raises(Broken):
                model(torch.randn(8, 8))
        else:
            model(torch.randn(8, 8)).square().sum().backward()
    return gradients(model) | dict(model.named_buffers()) | {"random": torch.rand(2)}


@ON_EACH
def test_exception_in_forward(chosen: dict[str, Any]) -> None:
    assert_same_run(counted, chosen, past_an_error, 4)
