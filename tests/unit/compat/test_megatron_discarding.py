"""Megatron-Core's `CheckpointWithoutOutput`: outputs are freed until backward, and all gradients stay the same."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sac
from sac.compat import megatron, output_discarding
from sac.errors import ConfigError, RegionError, SacWarning
from tests.support.runs import Noted
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, gradients_of


class Runner:
    """Runs functions as regions without output, or plainly."""

    def __init__(self, *, discards: bool) -> None:
        self.discards = discards
        self.regions: list[megatron.CheckpointWithoutOutput] = []

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.discards:
            return function(*args)
        self.regions.append(megatron.CheckpointWithoutOutput())
        return self.regions[-1].checkpoint(function, *args)

    def discard(self, *hook_tensors: Tensor) -> None:
        """Discard the output of the last region."""
        if self.discards:
            self.regions.pop().discard_output_and_register_recompute(hook_tensors)


Program = Callable[[Runner], dict[str, Tensor]]


def assert_discarding_changes_nothing(program: Program) -> None:
    results = []
    for discards in (False, True, True):
        torch.manual_seed(0)
        results.append(program(Runner(discards=discards)))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


def linears(count: int = 2) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def expected(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x).sum(), x)[0]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Programs


def dropout_inside(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    inner = runner.run(lambda h: F.dropout(F.gelu(h) * h, 0.4), first(x))
    out = F.dropout(second(inner), 0.2)
    runner.discard(out)
    return gradients_of(out.square().sum(), x, first, second)


def norm_and_attention(runner: Runner) -> dict[str, Tensor]:
    """The norm before an attention, with another region inside its reach: the projections up."""
    norm, x = nn.LayerNorm(WIDTH), leaf(2, 5, WIDTH)
    down, up, out_proj = nn.Linear(WIDTH, 2), nn.Linear(2, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
    y = runner.run(norm, x)
    q, k, v = runner.run(lambda h: up(h).chunk(3, dim=-1), down(y))
    core = F.scaled_dot_product_attention(q, k, v)
    runner.discard(core)
    out = F.dropout(out_proj(core) + y.sum(-1, keepdim=True), 0.2)
    runner.discard(out)
    return gradients_of((x + out).square().sum(), x, norm, down, up, out_proj)


def views_saved_by_the_consumers(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(6, WIDTH)
    y = runner.run(lambda h: first(h).exp(), x)
    left, right = y.tensor_split(2, dim=1)
    out = (left * right.flip(0)).sum() + second(y.t().reshape(-1, WIDTH)).sum() + (y[1:4, ::2] ** 2).sum()
    runner.discard(out)
    return gradients_of(out, x, first, second)


def several_outputs(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)

    def both(h: Tensor) -> tuple[Any, ...]:
        hidden = first(h)
        return hidden.tanh(), {"same": hidden.sigmoid(), "none": None}, 3, hidden.argmax(-1)

    one, rest, number, places = runner.run(both, x)
    out = (one * rest["same"]).sum() * number + F.embedding(places, second.weight).square().sum() + second(one).sum()
    runner.discard(out)
    return gradients_of(out, x, first, second)


def outputs_in_one_storage(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    left, right = runner.run(lambda h: first(h).exp().chunk(2, dim=-1), x)
    out = (left * right).sum() + second(torch.cat([right, left], -1)).square().sum()
    runner.discard(out)
    return gradients_of(out, x, first, second)


def nothing_in_the_region_needs_a_gradient(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    first.requires_grad_(False)
    out = second(runner.run(lambda h: F.dropout(first(h), 0.5), torch.randn(4, WIDTH)))
    runner.discard(out)
    return gradients_of(out.square().sum(), second)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return tensor @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensor, weight = ctx.saved_tensors
        return grad @ weight.t(), tensor.t() @ grad


def an_autograd_function_as_consumer(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    out = Scaled.apply(runner.run(F.gelu, first(x)), second.weight)
    runner.discard(out)
    return gradients_of(out.square().sum(), x, first, second.weight)


def mixed_precision(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        out = second(runner.run(lambda h: F.silu(first(h)), x))
        runner.discard(out)
    return gradients_of(out.float().square().sum(), x, first, second)


def complex_numbers(runner: Runner) -> dict[str, Tensor]:
    x = leaf(4, 6, dtype=torch.complex64)
    y = runner.run(lambda h: h.sin(), x)
    out = (y * y.conj() * y).abs().sum()
    runner.discard(out)
    return gradients_of(out, x)


def as_other_dtype(runner: Runner) -> dict[str, Tensor]:
    x = leaf(4, 6)
    out = torch.view_as_complex(runner.run(torch.sin, x).view(4, 3, 2)).square().abs().sum()
    runner.discard(out)
    return gradients_of(out, x)


def empty_output(runner: Runner) -> dict[str, Tensor]:
    (first,), x = linears(1), leaf(0, WIDTH)
    out = first(runner.run(torch.sin, x)).sum()
    runner.discard(out)
    return gradients_of(out, x, first)


def dropout_in_a_fork_of_the_tracker(runner: Runner) -> dict[str, Tensor]:
    megatron.model_parallel_cuda_manual_seed(3, tp_rank=0)
    tracker = megatron.get_cuda_rng_tracker()
    (linear,), x = linears(1), leaf(4, WIDTH)

    def region(h: Tensor) -> Tensor:
        with tracker.fork():
            return F.dropout(h.tanh(), 0.4)

    out = linear(runner.run(region, x))
    runner.discard(out)
    with tracker.fork():
        out = F.dropout(out, 0.3)
    return gradients_of(out.square().sum(), x, linear)


def gradients_of_gradients(runner: Runner) -> dict[str, Tensor]:
    x = leaf(5)
    out = (runner.run(lambda h: h.sin().exp(), x) ** 3).sum()
    runner.discard(out)
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    return gradients_of(first.square().sum(), x)


def two_losses_one_after_the_other(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    one, two = first(y).square().sum(), second(y).square().sum()
    runner.discard(one, two)
    one.backward()
    two.backward(inputs=list(second.parameters()))
    return gradients_of(x.sum() * 0, x, first, second)


def backward_twice(runner: Runner) -> dict[str, Tensor]:
    (linear,), x = linears(1), leaf(4, WIDTH)
    out = linear(runner.run(torch.sin, x)).square().sum()
    runner.discard(out)
    out.backward(retain_graph=True)
    return gradients_of(out, x, linear)


def a_consumer_that_does_not_lead_to_the_tensor(runner: Runner) -> dict[str, Tensor]:
    (first, second), x = linears(), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    one, two = first(y), second(y)
    runner.discard(one)
    return gradients_of((one * two).sum(), x, first, second)


def a_consumer_whose_saved_tensors_are_on_the_host(runner: Runner) -> dict[str, Tensor]:
    (linear,), x = linears(1), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    with torch.autograd.graph.save_on_cpu():
        out = linear(y)
    runner.discard(out)
    return gradients_of(out.square().sum(), x, linear)


def an_output_that_is_changed_after_the_discard(runner: Runner) -> dict[str, Tensor]:
    (linear,), x = linears(1), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    out = linear(y)
    runner.discard(out)
    if runner.discards:  # without us torch refuses this backward
        with torch.no_grad():
            y.zero_()
    return gradients_of(out.square().sum(), x, linear)


def an_output_in_memory_of_others(runner: Runner) -> dict[str, Tensor]:
    cache, x = torch.arange(6.0), leaf(3)
    out = (x * runner.run(lambda h: cache[:3], x)).sum()
    runner.discard(out)
    return gradients_of(out, x)


def a_discard_that_never_comes(runner: Runner) -> dict[str, Tensor]:
    x = leaf(4)
    y = runner.run(torch.sin, x)
    out = megatron.checkpoint(lambda t: t.exp().exp(), False, y) if runner.discards else y.exp().exp()
    del y
    runner.regions.clear()
    return gradients_of(out.sum(), x)


PROGRAMS = [
    dropout_inside, norm_and_attention, views_saved_by_the_consumers, several_outputs, outputs_in_one_storage,
    nothing_in_the_region_needs_a_gradient, an_autograd_function_as_consumer, mixed_precision, complex_numbers,
    as_other_dtype, empty_output, dropout_in_a_fork_of_the_tracker, gradients_of_gradients,
    two_losses_one_after_the_other, backward_twice, a_consumer_that_does_not_lead_to_the_tensor,
    a_consumer_whose_saved_tensors_are_on_the_host, an_output_that_is_changed_after_the_discard,
    an_output_in_memory_of_others, a_discard_that_never_comes,
]  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_gradients_are_those_of_the_plain_program(program: Program) -> None:
    assert_discarding_changes_nothing(program)


class Layer(nn.Module):
    """A layer of which the norm and the activation are regions without output, or plain calls."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.discards = runner.discards

    def forward(self, x: Tensor) -> Tensor:
        runner = Runner(discards=self.discards)
        y = runner.run(self.norm, x)
        out = self.down(runner.run(self.activate, self.up(y)))
        runner.discard(out)
        runner.discard(out)
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
def test_inside_regions_of_all_sorts(around: str) -> None:
    def program(runner: Runner) -> dict[str, Tensor]:
        layers, x = [Layer(runner) for _ in range(2)], leaf(4, WIDTH)
        h = x
        for layer in layers:
            h = AROUND[around](layer, h) if runner.discards else layer(h)
        return gradients_of(h.square().sum(), x, *layers)

    assert_discarding_changes_nothing(program)


# Memory and repetition


def test_the_memory_is_free_between_the_discard_and_backward() -> None:
    runner, (linear,), x = Runner(discards=True), linears(1), leaf(4, WIDTH)
    y = runner.run(lambda h: F.gelu(h) * h, x)
    out, memory = linear(y), StorageWeakRef(y.untyped_storage())
    del y
    assert not memory.expired()
    runner.discard(out)
    assert memory.expired()
    out.sum().backward()
    assert x.grad is not None


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("runs_backward", [True, False])
def test_everything_is_free_without_the_cycle_collector(runs_backward: bool) -> None:
    runner, (linear,), x = Runner(discards=True), linears(1), leaf(4, WIDTH)
    h = x * 2
    out, memory = linear(runner.run(torch.sin, h)), StorageWeakRef(h.untyped_storage())
    runner.discard(out)
    del h
    if runs_backward:
        out.sum().backward()
    else:
        del out
    assert memory.expired()


def test_what_others_still_hold_stays_as_it_is() -> None:
    """Megatron resizes the storage: the caller's own tensor is empty until backward."""
    runner, (linear,), x = Runner(discards=True), linears(1), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    out = linear(y)
    runner.discard(out)
    assert torch.equal(y, x.sin())
    (out.sum() + (y**2).sum()).backward()


def test_the_region_runs_once_more_for_all_consumers_and_its_own_backward() -> None:
    runner, runs, x = Runner(discards=True), Noted(), leaf(4)

    def region(h: Tensor) -> Tensor:
        runs.append(h)
        return h.sin().exp()

    y = runner.run(region, x)
    out = (y * y.cos()).sum() + (y**3).sum()
    runner.discard(out)
    out.backward()
    assert len(runs) == 2


def test_what_nobody_saved_does_not_make_recomputation_run_to_its_end() -> None:
    runner, ends, x = Runner(discards=True), Noted(), leaf(4)

    def region(h: Tensor) -> Tensor:
        out = h.sin() + 1
        ends.append(out)
        return out

    for _ in range(2):  # with the recorder and without
        ends.clear()
        out = runner.run(region, x).sum()
        runner.discard(out)
        out.backward()
        assert len(ends) == 1


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, h: Tensor) -> Tensor:
        self.modes.append(_get_current_dispatch_mode() is not None)
        return h.sin()


def test_repeated_calls_run_without_a_dispatch_mode() -> None:
    runner, region, x = Runner(discards=True), Watching(), leaf(4)
    for _ in range(3):
        runner.discard((runner.run(region, x) ** 2).sum())
    assert region.modes == [True, False, False]


@pytest.mark.filterwarnings("error")
def test_one_object_serves_step_after_step_and_without_grad_mode() -> None:
    region, (linear,), x = megatron.CheckpointWithoutOutput(), linears(1), leaf(4, WIDTH)
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


def test_threads_discard_independently() -> None:
    def train(seed: int, results: dict[int, Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        (linear,) = linears(1)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
        for _ in range(20):
            x.grad, runner = None, Runner(discards=True)
            out = linear(runner.run(torch.sin, x))
            runner.discard(out)
            out.square().sum().backward()
        results[seed] = (x.grad, expected(lambda one: linear(one.sin()).square(), x))

    results: dict[int, Any] = {}
    threads = [threading.Thread(target=train, args=(seed, results)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(ours, plain) for ours, plain in results.values())


# What is kept, and what is an error


@pytest.mark.parametrize("retain", [False, True])
def test_an_output_in_the_memory_of_the_input_is_retained(retain: bool) -> None:
    def results(t: Tensor) -> tuple[Tensor, ...]:
        return t, t[1:], t.sin()

    x, region = leaf(4), megatron.CheckpointWithoutOutput(retain_input_tensors=retain)
    h = x * 2
    same, view, new = region.checkpoint(results, h)
    out, kept, gone = (same**2).sum() + (view**2).sum() + (new**2).sum(), h.untyped_storage(), new.untyped_storage()
    kept, gone = StorageWeakRef(kept), StorageWeakRef(gone)
    del h, same, view, new
    region.discard_output_and_register_recompute(out)
    assert (kept.expired(), gone.expired()) == (False, True)
    out.backward()
    assert torch.equal(x.grad, expected(lambda one: sum((part**2).sum() for part in results(one * 2)), x))


@pytest.mark.parametrize("hook", ["none", "elsewhere", "frozen", "before"])
def test_a_wrong_hook_tensor_warns_and_changes_nothing(hook: str) -> None:
    """Megatron's backward computes with freed memory then, or ends the process."""
    runner, (linear,), x = Runner(discards=True), linears(1), leaf(4, WIDTH)
    h = x * 1
    out = linear(runner.run(torch.sin, h))
    wrong = {"none": None, "elsewhere": linear(torch.ones(1, WIDTH)), "frozen": out.detach(), "before": h}[hook]
    with pytest.warns(SacWarning, match="does not depend on the region's output, which is therefore kept"):
        runner.discard(wrong)
    out.square().sum().backward()
    assert torch.equal(x.grad, expected(lambda one: linear(one.sin()).square(), x))


def test_a_torch_that_shows_no_saved_tensors_keeps_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_discarding, "SHOWS_SAVED_TENSORS", False)
    runner, (linear,), x = Runner(discards=True), linears(1), leaf(4, WIDTH)
    out = linear(runner.run(torch.sin, x))
    with pytest.warns(SacWarning, match="this version of torch does not show what its graph has saved"):
        runner.discard(out)
    out.sum().backward()
    assert x.grad is not None


def test_an_output_changed_in_place_is_kept() -> None:
    def program(runner: Runner) -> dict[str, Tensor]:
        (linear,), x = linears(1), leaf(4, WIDTH)
        y = runner.run(lambda h: h + 1, x)
        y.mul_(2)
        out = linear(y)
        if runner.discards:
            with pytest.warns(SacWarning, match="changed in place after the region: it is kept until backward"):
                runner.discard(out)
        return gradients_of(out.square().sum(), x, linear)

    assert_discarding_changes_nothing(program)


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_results_without_tensors_have_nothing_to_discard(value: Any) -> None:
    assert Runner(discards=True).run(lambda x: value, leaf(2)) == value


def test_a_region_s_input_that_is_changed_in_place_is_an_error() -> None:
    runner, x = Runner(discards=True), leaf(4)
    y = runner.run(torch.sin, x)
    out = megatron.checkpoint(torch.exp, False, y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RegionError, match="output 0 was written to after a region had taken it as its input"):
        out.sum().backward()


FAILS = Noted(False)


def failing(h: Tensor) -> Tensor:
    if FAILS[0]:
        raise ZeroDivisionError
    return h.sin()


def test_an_exception_in_the_region_or_in_recomputation_leaves_nothing_behind() -> None:
    runner, x = Runner(discards=True), leaf(4)
    FAILS[0] = True
    with pytest.raises(ZeroDivisionError):
        runner.run(failing, x)
    runner.regions.clear()
    FAILS[0] = False
    out = (runner.run(failing, x) ** 2).sum()
    runner.discard(out)
    FAILS[0] = True
    with pytest.raises(ZeroDivisionError):
        out.backward(retain_graph=True)
    FAILS[0] = False
    out.backward()
    assert torch.equal(x.grad, expected(lambda one: one.sin() ** 2, x))


def test_an_output_that_lies_otherwise_in_recomputation_is_an_error() -> None:
    runner, transposes, x = Runner(discards=True), Noted(False), leaf(2, 3)

    def region(h: Tensor) -> Tensor:
        out = h.sin()
        return out.t().contiguous().t() if transposes[0] else out

    for _ in range(2):  # a first call, under the recorder, would find the other op before us
        out = (runner.run(region, x) ** 2).sum()
        runner.discard(out)
    transposes[0] = True
    with pytest.raises(RegionError, match=r"output 0 was float32\[2, 3\] with strides \(3, 1\).* strides \(1, 2\)"):
        out.backward()


def test_an_output_in_memory_that_others_write_to_is_an_error_as_it_is_without_regions() -> None:
    runner, cache, x = Runner(discards=True), torch.arange(6.0), leaf(3)
    out = (x * runner.run(lambda h: cache[:3], x)).sum()
    runner.discard(out)
    cache.zero_()
    with pytest.raises(RegionError, match="output 0 lies in memory that is not the region's own and was written to"):
        out.backward()


def test_a_discard_before_the_region_has_run_is_an_error() -> None:
    with pytest.raises(RegionError, match=r"there is no output to discard\n    fix: call checkpoint\("):
        megatron.CheckpointWithoutOutput().discard_output_and_register_recompute(torch.ones(1))


# Managers


def managed(manager: Any, function: Any, *args: Any) -> Any:
    """Run a function as a region of the manager, or plainly without one."""
    if manager is None:
        return function(*args)
    return megatron.CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(function, *args)


def assert_a_manager_changes_nothing(program: Callable[[Any], dict[str, Tensor]]) -> None:
    results = []
    for manager in (None, megatron.CheckpointWithoutOutputManager(), megatron.BlockLevelCheckpointManager()):
        torch.manual_seed(0)
        results.append(program(manager))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_chain_of_regions_is_discarded_as_a_whole(dropout: float) -> None:
    def program(manager: Any) -> dict[str, Tensor]:
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(dropout)) for _ in range(3)]
        last, x = nn.Linear(WIDTH, WIDTH), leaf(4, WIDTH)
        h, memories = x, []
        for stage in stages:
            h = managed(manager, stage, h)
            memories.append(StorageWeakRef(h.untyped_storage()))
        out = last(h)
        del h
        if manager is not None:
            assert len(manager.checkpoints) == 3
            manager.discard_all_outputs_and_register_unified_recompute(out)
            assert all(memory.expired() for memory in memories)
        return gradients_of(out.square().sum(), x, last, *stages)

    assert_a_manager_changes_nothing(program)


def test_a_stage_that_is_no_region_keeps_what_it_saved() -> None:
    def program(manager: Any) -> dict[str, Tensor]:
        (first, middle, last), x = linears(3), leaf(4, WIDTH)
        between = middle(managed(manager, nn.Sequential(first, nn.Tanh()), x)).exp()
        memory = StorageWeakRef(between.untyped_storage())
        out = (managed(manager, nn.Sequential(last, nn.Dropout(0.2)), between) ** 2).sum()
        del between
        if manager is not None:
            manager.discard_all_outputs_and_register_unified_recompute(out)
            assert not memory.expired()
        return gradients_of(out, x, first, middle, last)

    assert_a_manager_changes_nothing(program)


def test_regions_of_several_outputs_in_a_manager() -> None:
    def program(manager: Any) -> dict[str, Tensor]:
        first, second, x = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH), leaf(4, WIDTH)
        one, two = managed(manager, lambda h: first(h).chunk(2, -1), x)
        three = managed(manager, lambda a, b: F.dropout(second(a * b), 0.3), one, two)
        out = (three * one).sum()
        if manager is not None:
            manager.discard_all_outputs_and_register_unified_recompute(out)
        return gradients_of(out, x, first, second)

    assert_a_manager_changes_nothing(program)


def test_with_a_manager_the_discard_of_one_region_does_nothing() -> None:
    manager, x = megatron.MHCBlockRecomputeManager(), leaf(4)
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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ("region", "add_checkpoint: a str is not a CheckpointWithoutOutput\n    legal: a CheckpointWithoutOutput that"),
        (megatron.CheckpointWithoutOutput(), "add_checkpoint: it has not run\n    fix: call its checkpoint("),
    ],
)
def test_what_a_manager_cannot_take(wrong: Any, text: str) -> None:
    manager = megatron.CheckpointWithoutOutputManager()
    with pytest.raises(ConfigError) as error:
        manager.add_checkpoint(wrong)
    assert text in str(error.value)
    assert manager.checkpoints == []


def test_an_output_that_goes_into_a_checkpoint_is_not_held_by_it() -> None:
    """The norm before experts that are recomputed as a whole: the experts' region would hold the norm's output."""
    runner, norm, x = Runner(discards=True), nn.LayerNorm(WIDTH), leaf(4, WIDTH)
    experts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    y = runner.run(norm, x)
    out, memory = megatron.checkpoint(experts, False, y), StorageWeakRef(y.untyped_storage())
    del y
    assert not memory.expired()
    runner.discard(out)
    assert memory.expired()
    (out**2).sum().backward()
    assert torch.equal(x.grad, expected(lambda one: experts(norm(one)) ** 2, x))


# Random programs of regions and plain ops

SIZE = 6
ONE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.sin, F.gelu, F.silu, torch.t,
    lambda t: t * t,
    lambda t: t.flip(0),
    lambda t: t.cumsum(0),
    lambda t: t.softmax(-1),
    lambda t: t.sort(-1)[0],
    lambda t: t.reshape(-1).view(SIZE, SIZE),
    lambda t: t.exp().clamp(max=3),
    lambda t: F.dropout(t, 0.3),
    lambda t: F.normalize(t, dim=-1),
    lambda t: F.layer_norm(t, (SIZE,)),
    lambda t: torch.where(t > 0, t, t * 0.1),
    lambda t: t[torch.arange(SIZE - 1, -1, -1)],
)  # fmt: skip
TWO: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.mul, torch.add, torch.maximum, lambda a, b: a / (1 + b * b), lambda a, b: a @ b.t() @ b,
)  # fmt: skip
RESULTS: tuple[Callable[[Tensor], Any], ...] = (
    lambda h: h,
    lambda h: (h, h.tanh()),
    lambda h: (h.chunk(2, -1)[0].repeat(1, 2), h),
    lambda h: h.unbind(0),
)


def drawn_region(choice: random.Random, linear: nn.Module) -> Callable[[Tensor, Tensor], Any]:
    steps, result = [choice.choice(ONE) for _ in range(choice.randint(0, 3))], choice.choice(RESULTS)

    def run(a: Tensor, b: Tensor) -> Any:
        h = linear(a)
        for step in steps:
            h = step(h)
        return result(h * b.mean())

    return run


def drawn(seed: int, when: str) -> dict[str, Tensor]:
    """Run the program of a seed; `when` its regions' outputs are discarded: never (no regions), together, or early."""
    choice, order = random.Random(seed), random.Random(~seed)
    torch.manual_seed(seed)
    layers, x, runner = [nn.Linear(SIZE, SIZE) for _ in range(3)], leaf(SIZE, SIZE), Runner(discards=when != "never")
    pool = [x * 1.1]
    for _ in range(choice.randint(3, 7)):
        kind = choice.random()
        if kind < 0.5:
            function, args = drawn_region(choice, choice.choice(layers)), (choice.choice(pool), choice.choice(pool))
            output = runner.run(function, *args)
            results = output if isinstance(output, tuple) else (output,)
            pool += [one if one.dim() == 2 else one.expand(SIZE, SIZE) for one in results[:3]]
        elif kind < 0.75:
            pool.append(choice.choice(ONE)(choice.choice(pool)))
        else:
            pool.append(choice.choice(TWO)(choice.choice(pool), choice.choice(pool)))
        if when == "early" and runner.regions and order.random() < 0.5:
            region = runner.regions.pop(order.randrange(len(runner.regions)))
            region.discard_output_and_register_recompute(pool[-1])
    out = torch.stack([(one.tanh() * (place + 1)).sum() for place, one in enumerate(pool)]).sum()
    del pool
    manager = megatron.CheckpointWithoutOutputManager()
    for region in runner.regions:
        manager.add_checkpoint(region)
    manager.discard_all_outputs_and_register_unified_recompute(out)
    return gradients_of(out, x, *layers)


@pytest.mark.filterwarnings("ignore")  # a tensor drawn at random need not depend on the region
@pytest.mark.parametrize("when", ["together", "early"])
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_random_programs(first: int, when: str) -> None:
    for seed in range(first, first + 20):
        assert_same(drawn(seed, "never"), drawn(seed, when))
