"""Megatron-Core's `CheckpointWithoutOutput`: what its own tests hold, but for the storages that it resizes."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import sac
from sac.compat import megatron
from sac.errors import ConfigError, RegionError, SacWarning
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, gradients_of

Program = Callable[[bool], dict[str, Tensor]]


def without_output(discards: bool, function: Any, *args: Any) -> tuple[Any, Callable[[Any], None]]:
    """Run a function as a region without output, or plainly; return its result and what discards it."""
    if not discards:
        return function(*args), lambda hook_tensor: None
    region = megatron.CheckpointWithoutOutput()
    return region.checkpoint(function, *args), region.discard_output_and_register_recompute


def activation(discards: bool) -> dict[str, Tensor]:
    """gelu(x) * x before a linear layer, as in its own test and in its experts."""
    up, down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)
    inner, discard = without_output(discards, lambda h: F.gelu(h) * h, up(x))
    out = down(inner)
    discard(out)
    return gradients_of(out.square().sum(), x, up, down)


def norm_and_attention(discards: bool) -> dict[str, Tensor]:
    """The norm before an attention, with another region inside its reach: the projections up."""
    norm = nn.LayerNorm(WIDTH)
    down, up, out_proj = nn.Linear(WIDTH, 2), nn.Linear(2, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    y, discard_norm = without_output(discards, norm, x)
    (q, k, v), discard_up = without_output(discards, lambda h: up(h).chunk(3, dim=-1), down(y))
    core = F.scaled_dot_product_attention(q, k, v)
    discard_up(core)
    out = F.dropout(out_proj(core) + y.sum(-1, keepdim=True), 0.2)
    discard_norm(out)
    return gradients_of((x + out).square().sum(), x, norm, down, up, out_proj)


def views(discards: bool) -> dict[str, Tensor]:
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, 2, WIDTH, requires_grad=True)
    y, discard = without_output(discards, lambda h: F.dropout(linear(h).tanh(), 0.3), x)
    left, right = torch.tensor_split(y.reshape(8, WIDTH), 2, dim=1)
    out = (left * right).sum() + (y.transpose(0, 1) ** 2).sum()
    discard(out)
    return gradients_of(out, x, linear)


def tuples(discards: bool) -> dict[str, Tensor]:
    linear = nn.Linear(WIDTH, 3 * WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)

    def region(h: Tensor) -> tuple[Tensor, ...]:
        one, two, three = linear(h).split(WIDTH, dim=-1)
        return one.exp(), two.tanh(), three

    (one, two, three), discard = without_output(discards, region, x)
    out = (one * two * three).sum()
    discard(out)
    return gradients_of(out, x, linear)


@pytest.mark.parametrize("program", [activation, norm_and_attention, views, tuples], ids=lambda one: one.__name__)
def test_gradients_are_those_of_the_plain_program(program: Program):
    results = []
    for discards in (False, True, True):
        torch.manual_seed(0)
        results.append(program(discards))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def test_dropout_in_a_fork_of_the_tracker():
    def program(discards: bool) -> dict[str, Tensor]:
        megatron.model_parallel_cuda_manual_seed(3, tp_rank=0)
        tracker = megatron.get_cuda_rng_tracker()
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)

        def region(h: Tensor) -> Tensor:
            with tracker.fork():
                return F.dropout(h.tanh(), 0.4)

        y, discard = without_output(discards, region, x)
        out = linear(y)
        discard(out)
        with tracker.fork():
            out = F.dropout(out, 0.3)
        return gradients_of(out.square().sum(), x, linear)

    assert_same(program(False), program(True))


def test_the_memory_is_free_between_the_discard_and_backward():
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    region = megatron.CheckpointWithoutOutput()
    y = region.checkpoint(lambda h: F.gelu(h) * h, x)
    out, memory = linear(y), StorageWeakRef(y.untyped_storage())
    del y
    assert not memory.expired()
    region.discard_output_and_register_recompute(out)
    assert memory.expired()
    out.sum().backward()
    assert x.grad is not None


def test_what_others_still_hold_stays_as_it_is():
    """Megatron resizes the storage: the caller's own tensor is empty until backward."""
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    region = megatron.CheckpointWithoutOutput()
    y = region.checkpoint(torch.sin, x)
    out = linear(y)
    region.discard_output_and_register_recompute(out)
    assert torch.equal(y, x.sin())
    (out.sum() + (y**2).sum()).backward()


def test_an_output_in_the_memory_of_the_input_is_retained():
    for retain in (False, True):
        x = torch.randn(4, requires_grad=True)
        h = x * 1
        region = megatron.CheckpointWithoutOutput(retain_input_tensors=retain)
        y = region.checkpoint(lambda t: t.view(2, 2), h)
        out = (y**2).sum()
        memory = StorageWeakRef(h.untyped_storage())
        region.discard_output_and_register_recompute(out)
        assert not memory.expired()
        out.backward()
        assert torch.equal(x.grad, 2 * x.detach())


@pytest.mark.parametrize("hook", ["none", "elsewhere", "frozen", "before"])
def test_a_wrong_hook_tensor_warns_and_changes_nothing(hook):
    """Megatron's backward computes with freed memory then, or ends the process."""
    torch.manual_seed(0)
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    linear(x.sin()).square().sum().backward()
    expected, x.grad = x.grad, None
    region = megatron.CheckpointWithoutOutput()
    h = x * 1
    y = region.checkpoint(torch.sin, h)
    out = linear(y)
    wrong = {"none": None, "elsewhere": linear(torch.ones(1, WIDTH)), "frozen": out.detach(), "before": h}[hook]
    with pytest.warns(SacWarning, match="does not depend on the region's output, which is therefore kept"):
        region.discard_output_and_register_recompute(wrong)
    out.square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_discard_that_never_comes_changes_nothing():
    x = torch.randn(4, requires_grad=True)
    region = megatron.CheckpointWithoutOutput()
    (region.checkpoint(torch.sin, x) ** 2).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach().sin() * x.detach().cos())


def test_a_discard_before_the_region_has_run_is_an_error():
    with pytest.raises(RegionError) as error:
        megatron.CheckpointWithoutOutput().discard_output_and_register_recompute(torch.ones(1))
    assert str(error.value) == (
        "megatron.CheckpointWithoutOutput.discard_output_and_register_recompute: there is no output to discard\n"
        "    fix: call checkpoint(run_function, *args) first"
    )


@pytest.mark.filterwarnings("error")
def test_one_object_serves_step_after_step_and_without_grad_mode():
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
    region = megatron.CheckpointWithoutOutput()
    gradients = []
    for grad_mode in (True, False, True):
        with torch.set_grad_enabled(grad_mode):
            out = linear(region.checkpoint(torch.sin, x))
            region.discard_output_and_register_recompute(out)
            region.discard_output_and_register_recompute(out)
        if grad_mode:
            x.grad = None
            out.sum().backward()
            gradients.append(x.grad)
    assert torch.equal(*gradients)


# Managers


def chained(manager: Any, stages: list[nn.Module], x: Tensor) -> tuple[Tensor, list[StorageWeakRef]]:
    """Run stages one after the other, each as a region of the manager, or plainly without one."""
    memories = []
    for stage in stages:
        x = megatron.CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(stage, x) if manager else stage(x)
        memories.append(StorageWeakRef(x.untyped_storage()))
    return x, memories


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_chain_of_regions_is_discarded_as_a_whole(dropout):
    def program(manager: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(3)]
        last, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        h, memories = chained(manager, stages, x)
        out = last(h)
        del h
        if manager is not None:
            assert len(manager.checkpoints) == 3
            manager.discard_all_outputs_and_register_unified_recompute(out)
            assert all(memory.expired() for memory in memories)
        return gradients_of(out.square().sum(), x, last, *stages)

    plain = program(None)
    for _ in range(2):
        assert_same(plain, program(megatron.CheckpointWithoutOutputManager()))


def test_a_stage_that_is_no_region_keeps_what_it_saved():
    def program(manager: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        first, middle, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        x = torch.randn(4, WIDTH, requires_grad=True)
        (h, _) = chained(manager, [nn.Sequential(first, nn.Tanh())], x)
        between = middle(h).exp()
        memory = StorageWeakRef(between.untyped_storage())
        (h, _) = chained(manager, [nn.Sequential(last, nn.Dropout(0.2))], between)
        out = (h**2).sum()
        del h, between
        if manager is not None:
            manager.discard_all_outputs_and_register_unified_recompute(out)
            assert not memory.expired()
        return gradients_of(out, x, first, middle, last)

    assert_same(program(None), program(megatron.CheckpointWithoutOutputManager()))


def test_regions_of_several_outputs_in_a_manager():
    def program(manager: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        x = torch.randn(4, WIDTH, requires_grad=True)

        def run(function: Any, *args: Any) -> Any:
            if manager is None:
                return function(*args)
            return megatron.CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(function, *args)

        one, two = run(lambda h: first(h).chunk(2, -1), x)
        three = run(lambda a, b: F.dropout(second(a * b), 0.3), one, two)
        out = (three * one).sum()
        del one, two, three
        if manager is not None:
            manager.discard_all_outputs_and_register_unified_recompute(out)
        return gradients_of(out, x, first, second)

    plain = program(None)
    for _ in range(2):
        assert_same(plain, program(megatron.CheckpointWithoutOutputManager()))


def test_with_a_manager_the_discard_of_one_region_does_nothing():
    manager = megatron.MHCBlockRecomputeManager()
    x = torch.randn(4, requires_grad=True)
    region = megatron.CheckpointWithoutOutput(ckpt_manager=manager)
    y = region.checkpoint(torch.sin, x)
    out, memory = (y**2).sum(), StorageWeakRef(y.untyped_storage())
    del y
    region.discard_output_and_register_recompute(out)
    assert not memory.expired()
    manager.discard_all_outputs_and_register_unified_recompute(out)
    assert memory.expired()
    out.backward()
    assert x.grad is not None


def test_what_a_manager_cannot_take():
    manager = megatron.CheckpointWithoutOutputManager()
    with pytest.raises(ConfigError) as error:
        manager.add_checkpoint("region")
    assert str(error.value) == (
        "megatron.CheckpointWithoutOutputManager.add_checkpoint: a str is not a CheckpointWithoutOutput\n"
        "    legal: a CheckpointWithoutOutput that has run"
    )
    with pytest.raises(ConfigError) as error:
        manager.add_checkpoint(megatron.CheckpointWithoutOutput())
    assert str(error.value) == (
        "megatron.CheckpointWithoutOutputManager.add_checkpoint: it has not run\n"
        "    fix: call its checkpoint(run_function, *args) first"
    )
    assert manager.checkpoints == []


def test_an_output_that_goes_into_a_checkpoint_is_not_held_by_it():
    """The norm before experts that are recomputed as a whole: the experts' region would hold the norm's output."""
    norm, experts = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(4, WIDTH, requires_grad=True)
    (experts(norm(x)) ** 2).sum().backward()
    expected, x.grad = x.grad, None
    region = megatron.CheckpointWithoutOutput()
    y = region.checkpoint(norm, x)
    out, memory = megatron.checkpoint(experts, False, y), StorageWeakRef(y.untyped_storage())
    del y
    assert not memory.expired()
    region.discard_output_and_register_recompute(out)
    assert memory.expired()
    (out**2).sum().backward()
    assert torch.equal(x.grad, expected)


def test_nothing_is_left_when_a_model_has_trained():
    gc.collect()
    gc.disable()
    try:
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True)
        region = megatron.CheckpointWithoutOutput()
        h = x * 2
        out = linear(region.checkpoint(torch.sin, h))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            region.discard_output_and_register_recompute(out)
        memory = StorageWeakRef(h.untyped_storage())
        del h
        out.sum().backward()
        assert memory.expired()
    finally:
        gc.enable()


class Layer(nn.Module):
    """A layer of which the norm and the activation are regions without output, or plain calls."""

    def __init__(self, *, discards: bool) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.discards = discards

    def forward(self, x: Tensor) -> Tensor:
        y, discard_norm = without_output(self.discards, self.norm, x)
        inner, discard_activation = without_output(self.discards, self.activate, self.up(y))
        out = self.down(inner)
        discard_activation(out)
        discard_norm(out)
        return x + out

    def activate(self, h: Tensor) -> Tensor:
        return F.dropout(F.gelu(h) * h, 0.2)


AROUND = {
    "sac": sac.checkpoint,
    "sac reentrant": partial(sac.checkpoint, use_reentrant=True),
    "torch": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "torch reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "compiled": lambda function, x: torch.compile(function, backend="aot_eager")(x),
}


@pytest.mark.parametrize("around", AROUND)
def test_inside_regions_of_all_sorts(around):
    def program(discards: bool, call: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        layers = [Layer(discards=discards) for _ in range(2)]
        x = torch.randn(4, WIDTH, requires_grad=True)
        h = x
        for layer in layers:
            h = call(layer, h)
        return gradients_of(h.square().sum(), x, *layers)

    plain = program(False, lambda layer, h: layer(h))
    for _ in range(2):
        assert_same(plain, program(True, AROUND[around]))
