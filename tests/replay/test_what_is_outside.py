"""Tensors that the region did not make: parameters, buffers, what closures and caches hold, what autocast has cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F

from sac.errors import RegionError, SacWarning
from tests.replay.programs import ON_EACH, POLICIES, applied, assert_replayed, block_of, python_runs, replay
from tests.semantics.blocks import FunctionBlock, Stack, selective
from tests.semantics.training import assert_same, built

Run = Callable[[Stack], dict[str, Tensor]]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def assert_same_run(build: Callable[[], Stack], chosen: dict[str, Any], run: Run, python: int, **more: Any) -> Stack:
    """`run` gives the same with us and without, and the bodies' Python has run `python` times with us."""
    model = applied(build, replay(chosen, **more))
    expected = run(built(build))
    assert_same(expected, run(model))
    assert python_runs(model) == python
    return model


# Parameters


def two_products(block: FunctionBlock, x: Tensor) -> Tensor:
    return F.dropout((x @ block.a).sin(), 0.3) @ block.b


def exchanged(model: Stack) -> dict[str, Tensor]:
    """The weights' data lie elsewhere in backward, as a sharding system lays them."""
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    out.square().sum().backward()
    return gradients(model)


def freed_and_filled(model: Stack) -> dict[str, Tensor]:
    """The weights' storages are empty between forward and backward."""
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    data = [parameter.detach().clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)

    def fill(grad: Tensor) -> None:
        for parameter, values in zip(model.parameters(), data, strict=True):
            parameter.untyped_storage().resize_(values.nbytes)
            parameter.data.copy_(values)

    out.register_hook(fill)
    out.square().sum().backward()
    return gradients(model)


@ON_EACH
@pytest.mark.parametrize("run", [exchanged, freed_and_filled])
def test_weights_whose_data_went_away_in_between(run: Run, chosen: dict[str, Any]) -> None:
    assert_same_run(block_of(two_products), chosen, run, 1)


@pytest.mark.filterwarnings("error")
def test_weights_whose_data_are_not_there_in_backward() -> None:
    """Inside a nested unit that gathers its weights again when its Python runs: so it does."""
    model = applied(block_of(two_products), replay(POLICIES["nothing"]))
    x = torch.randn(8, 8)
    model(x).sum().backward()
    model.zero_grad()
    block = model.blocks[0]
    data = block.a.detach().clone()

    def gathered(block: FunctionBlock, x: Tensor) -> Tensor:
        block.a.untyped_storage().resize_(data.nbytes)
        block.a.data.copy_(data)
        return two_products(block, x)

    torch.manual_seed(1)
    out = model(x)
    block.a.untyped_storage().resize_(0)
    block.body = gathered
    with pytest.warns(SacWarning) as said:
        out.sum().backward()
    assert [str(one.message).splitlines()[0] for one in said] == [
        "blocks.0: replay cannot be used here: the data of a parameter that an op read is elsewhere now"
    ]
    plain = built(block_of(two_products))
    torch.manual_seed(1)
    plain(x).sum().backward()
    assert_same(gradients(plain), gradients(model))


# What is changed


def reads_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a) * block.outside + block.outside.sin()).sin()


def with_outside() -> Stack:
    model = block_of(reads_outside)()
    model.blocks[0].outside = torch.arange(64.0).view(8, 8) / 64
    return model


def rebound(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    out = model(torch.randn(8, 8))
    model.blocks[0].outside = model.blocks[0].outside + 1
    out.square().sum().backward()
    return gradients(model)


@ON_EACH
def test_name_from_outside_that_means_something_else_in_backward(chosen: dict[str, Any]) -> None:
    """What it meant in forward is held by autograd, so that it is there."""
    assert_same_run(with_outside, chosen, rebound, 1)


@ON_EACH
@pytest.mark.parametrize("size", ["large", "small"])
def test_tensor_from_outside_that_is_written_to_after_the_forward(size: str, chosen: dict[str, Any]) -> None:
    model = applied(with_outside, replay(chosen))
    if size == "small":
        model.blocks[0].outside = torch.ones(8)
    out = model(torch.randn(8, 8))
    model.blocks[0].outside.add_(1)
    with pytest.raises(RegionError) as error:
        out.sum().backward()
    shape = "[8, 8]" if size == "large" else "[8]"
    assert str(error.value) == (
        f"blocks.0: a tensor from outside the region (float32{shape}) was changed in place after the forward: it is at "
        "version 1, backward expects version 0\n    fix: do not write to it between forward and backward, or pass it "
        "to the region as an argument"
    )


def advances(block: FunctionBlock, x: Tensor) -> Tensor:
    h = block.norm(x @ block.a)
    with torch.no_grad():
        block.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
    block.steps = block.steps + 1
    return (h - block.mean).sin() * block.steps


def with_buffers() -> Stack:
    blocks = []
    for _ in range(2):
        block = FunctionBlock(advances, norm=nn.BatchNorm1d(8))
        block.register_buffer("mean", torch.zeros(8))
        block.register_buffer("steps", torch.zeros(8, 8))
        blocks.append(block)
    return Stack(*blocks)


def three_forwards_first(model: Stack) -> dict[str, Tensor]:
    torch.manual_seed(0)
    outputs = [model(torch.randn(8, 8)) for _ in range(3)]
    for out in outputs:
        out.square().sum().backward()
    return gradients(model) | dict(model.named_buffers())


@ON_EACH
def test_buffers_that_the_region_writes_to(chosen: dict[str, Any]) -> None:
    assert_replayed(with_buffers, replay(chosen), steps=3)
    assert_same_run(with_buffers, chosen, three_forwards_first, 6)


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


def test_engine_rerun_is_the_same_without_a_tape() -> None:
    """These programs are what they say: only the count of Python's runs tells the engines apart."""
    model = applied(with_buffers, selective(POLICIES["matmuls"], engine="rerun"))
    assert_same(three_forwards_first(built(with_buffers)), three_forwards_first(model))
    assert python_runs(model) == 12
