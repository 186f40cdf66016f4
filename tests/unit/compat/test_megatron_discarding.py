"""Megatron-Core's `CheckpointWithoutOutput`: outputs are freed until backward, and all gradients stay the same."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sac
from sac.compat import megatron, output_discarding
from sac.errors import ConfigError, RegionError, SacWarning
from tests.support.runs import Noted
from tests.support.training import assert_same
from tests.unit.compat.programs import WIDTH, gradients_of


class Runner:
    """Runs functions as regions without output, or plainly."""

    def __init__(self, *, discards: bool = True) -> None:
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


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def expected(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.autograd.grad(function(x).sum(), x)[0]


def assert_same_for(values: Any, program: Callable[[Any], dict[str, Tensor]]) -> None:
    """Run the program with each of the values, from the same seed; each gives what the first one gives."""
    results = []
    for value in values:
        torch.manual_seed(0)
        results.append(program(value))
    for other in results[1:]:
        assert_same(results[0], other)


def assert_discarding_changes_nothing(program: Callable[[Runner], dict[str, Tensor]]) -> None:
    assert_same_for([Runner(discards=discards) for discards in (False, True, True)], program)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return tensor @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensor, weight = ctx.saved_tensors
        return grad @ weight.t(), tensor.t() @ grad


def forked_dropout(h: Tensor) -> Tensor:
    with megatron.get_cuda_rng_tracker().fork():
        return F.dropout(h, 0.4)


def both(m: Any, h: Tensor) -> tuple[Any, ...]:
    hidden = m.first(h)
    return hidden.tanh(), {"same": hidden.sigmoid(), "none": None}, 3, hidden.argmax(-1)


def of_both(m: Any, y: Any) -> Tensor:
    one, rest, number, places = y
    return (one * rest["same"]).sum() * number + F.embedding(places, m.second.weight).square().sum() + m.second(one)


def of_views(m: Any, y: Tensor) -> Tensor:
    left, right = y.tensor_split(2, dim=1)
    return (left * right.flip(0)).sum() + m.second(y.t().reshape(-1, WIDTH)).sum() + (y[1:4, ::2] ** 2).sum()


def of_host(m: Any, y: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return m.second(y)


X, CACHE = (4, WIDTH), torch.arange(6.0)
# By name: the region, what reads its output, and the shape of its input; both get a module of two linear layers.
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any, Any], Tensor], tuple[int, ...]]] = {
    "dropout inside": (
        lambda m, h: F.dropout(F.gelu(m.first(h)) * h, 0.4), lambda m, y: F.dropout(m.second(y), 0.2), X,
    ),
    "dropout in a fork of the tracker": (
        lambda m, h: forked_dropout(h.tanh()), lambda m, y: forked_dropout(m.second(y)), X,
    ),
    "attention": (
        lambda m, h: torch.cat([m.first(h), h], -1).chunk(2, -1),
        lambda m, y: F.scaled_dot_product_attention(m.second(y[0]), *y), (2, 5, WIDTH),
    ),
    "views": (lambda m, h: m.first(h).exp(), of_views, (6, WIDTH)),
    "several outputs": (both, of_both, X),
    "outputs in one storage": (
        lambda m, h: m.first(h).exp().chunk(2, -1), lambda m, y: y[0] * y[1] + m.second(torch.cat(y, -1)).mean(), X,
    ),
    "no gradient inside": (lambda m, h: F.dropout(h.detach(), 0.5), lambda m, y: m.second(y), X),
    "an autograd function reads": (
        lambda m, h: F.gelu(m.first(h)), lambda m, y: Scaled.apply(y, m.second.weight), X,
    ),
    "mixed precision": (
        torch.autocast("cpu", torch.bfloat16)(lambda m, h: F.silu(m.first(h))),
        torch.autocast("cpu", torch.bfloat16)(lambda m, y: m.second(y)), X,
    ),
    "complex numbers": (lambda m, h: h.sin().to(torch.complex64) * 1j, lambda m, y: (y * y.conj() * y).abs(), X),
    "as another dtype": (
        lambda m, h: h.sin(), lambda m, y: torch.view_as_complex(y.view(4, -1, 2)).square().abs(), X,
    ),
    "empty": (lambda m, h: h.sin(), lambda m, y: m.second(y), (0, WIDTH)),
    "saved on the host": (lambda m, h: h.sin(), of_host, X),
}  # fmt: skip


HELD = ("several outputs", "complex numbers", "empty", "saved on the host")  # partly, in forms that are not freed


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_the_plain_program_and_the_memory_is_free(name: str) -> None:
    region, reads, shape = CASES[name]

    def program(runner: Runner) -> dict[str, Tensor]:
        megatron.model_parallel_cuda_manual_seed(3, tp_rank=0)
        model, x = nn.Module(), leaf(*shape)
        model.first, model.second = linear(), linear()
        y = runner.run(partial(region, model), x)
        out = reads(model, y)
        memories = [StorageWeakRef(one.untyped_storage()) for one in tree_leaves(y) if isinstance(one, Tensor)]
        del y
        runner.discard(out)
        assert not runner.discards or name in HELD or all(one.expired() for one in memories)
        return gradients_of(out.float().square().sum(), x, model)

    assert_discarding_changes_nothing(program)


# Other backwards


def gradients_of_gradients(runner: Runner) -> dict[str, Tensor]:
    x = leaf(5)
    out = (runner.run(lambda h: h.sin().exp(), x) ** 3).sum()
    runner.discard(out)
    (first,) = torch.autograd.grad(out, x, create_graph=True)
    return gradients_of(first.square().sum(), x)


def two_losses_one_after_the_other(runner: Runner) -> dict[str, Tensor]:
    first, second, x = linear(), linear(), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    one, two = first(y).square().sum(), second(y).square().sum()
    runner.discard(one, two)
    one.backward()
    two.backward(inputs=list(second.parameters()))
    return gradients_of(x.sum() * 0, x, first, second)


def backward_twice(runner: Runner) -> dict[str, Tensor]:
    last, x = linear(), leaf(4, WIDTH)
    out = last(runner.run(torch.sin, x)).square().sum()
    runner.discard(out)
    out.backward(retain_graph=True)
    return gradients_of(out, x, last)


def a_consumer_that_does_not_lead_to_the_tensor(runner: Runner) -> dict[str, Tensor]:
    first, second, x = linear(), linear(), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    one, two = first(y), second(y)
    runner.discard(one)
    return gradients_of((one * two).sum(), x, first, second)


def an_output_that_is_changed_after_the_discard(runner: Runner) -> dict[str, Tensor]:
    last, x = linear(), leaf(4, WIDTH)
    y = runner.run(torch.sin, x)
    out = last(y)
    runner.discard(out)
    if runner.discards:  # without us torch refuses this backward
        with torch.no_grad():
            y.zero_()
    return gradients_of(out.square().sum(), x, last)


def an_output_that_was_changed_in_place(runner: Runner) -> dict[str, Tensor]:
    last, x = linear(), leaf(4, WIDTH)
    y = runner.run(lambda h: h + 1, x)
    y.mul_(2)
    out = last(y)
    if runner.discards:
        with pytest.warns(SacWarning, match="changed in place after the region: it is kept until backward"):
            runner.discard(out)
    return gradients_of(out.square().sum(), x, last)


def an_output_in_memory_of_others(runner: Runner) -> dict[str, Tensor]:
    x = leaf(3)
    out = (x * runner.run(lambda h: CACHE[:3], x)).sum()
    runner.discard(out)
    return gradients_of(out, x)


def a_discard_that_never_comes(runner: Runner) -> dict[str, Tensor]:
    x = leaf(4)
    y = runner.run(torch.sin, x)
    out = megatron.checkpoint(lambda t: t.exp().exp(), False, y) if runner.discards else y.exp().exp()
    del y
    runner.regions.clear()
    return gradients_of(out.sum(), x)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "program",
    [
        gradients_of_gradients, two_losses_one_after_the_other, backward_twice, an_output_in_memory_of_others,
        a_consumer_that_does_not_lead_to_the_tensor, an_output_that_is_changed_after_the_discard,
        an_output_that_was_changed_in_place, a_discard_that_never_comes,
    ],
    ids=lambda one: one.__name__,
)  # fmt: skip
def test_programs(program: Any) -> None:
    assert_discarding_changes_nothing(program)


class Layer(nn.Module):
    """A layer of which the norm and the activation are regions without output, or plain calls."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(), linear()
        self.discards = runner.discards

    def forward(self, x: Tensor) -> Tensor:
        runner = Runner(discards=self.discards)
        y = runner.run(self.norm, x)
        out = self.down(runner.run(lambda h: F.dropout(F.gelu(h) * h, 0.2), self.up(y)))
        runner.discard(out)
        runner.discard(out)
        return x + out


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


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("runs_backward", [True, False])
def test_everything_is_free_without_the_cycle_collector(runs_backward: bool) -> None:
    runner, last, x = Runner(), linear(), leaf(4, WIDTH)
    h = x * 2
    out, memory = last(runner.run(torch.sin, h)), StorageWeakRef(h.untyped_storage())
    runner.discard(out)
    del h
    if runs_backward:
        out.sum().backward()
    else:
        del out
    assert memory.expired()


def test_what_others_still_hold_stays_as_it_is() -> None:
    """Megatron resizes the storage: the caller's own tensor is empty until backward."""
    runner, x = Runner(), leaf(4)
    y = runner.run(torch.sin, x)
    runner.discard((y**2).sum())
    assert torch.equal(y, x.sin())


@pytest.mark.parametrize(("reads", "ends_again"), [(lambda y: (y * y.cos()).sum() + (y**3).sum(), 1), (torch.sum, 0)])
def test_the_region_runs_once_more_at_most_and_only_as_far_as_needed(reads: Any, ends_again: int) -> None:
    runner, ends, x = Runner(), Noted(), leaf(4)

    def region(h: Tensor) -> Tensor:
        out = h.sin() + 1
        ends.append(out)
        return out

    for _ in range(2):  # with the recorder and without
        ends.clear()
        out = reads(runner.run(region, x))
        runner.discard(out)
        out.backward()
        assert len(ends) == 1 + ends_again


@pytest.mark.filterwarnings("error")
def test_one_object_serves_step_after_step_and_without_grad_mode() -> None:
    region, last, x = megatron.CheckpointWithoutOutput(), linear(), leaf(4, WIDTH)
    gradients = []
    for grad_mode in (True, False, True):
        with torch.set_grad_enabled(grad_mode):
            out = last(region.checkpoint(torch.sin, x))
            region.discard_output_and_register_recompute(out)
            region.discard_output_and_register_recompute(out)
        if grad_mode:
            gradients += torch.autograd.grad(out.sum(), x)
    assert torch.equal(*gradients)


# What is kept, and what is an error


@pytest.mark.parametrize("retain", [False, True])
def test_an_output_in_the_memory_of_the_input_is_retained(retain: bool) -> None:
    def results(t: Tensor) -> tuple[Tensor, ...]:
        return t, t[1:], t.sin()

    x, region = leaf(4), megatron.CheckpointWithoutOutput(retain_input_tensors=retain)
    h = x * 2
    same, view, new = region.checkpoint(results, h)
    out = (same**2).sum() + (view**2).sum() + (new**2).sum()
    kept, gone = StorageWeakRef(h.untyped_storage()), StorageWeakRef(new.untyped_storage())
    del h, same, view, new
    region.discard_output_and_register_recompute(out)
    assert (kept.expired(), gone.expired()) == (False, True)
    out.backward()
    assert torch.equal(x.grad, expected(lambda one: sum((part**2).sum() for part in results(one * 2)), x))


NO_HOOK = "does not depend on the region's output, which is therefore kept"


@pytest.mark.parametrize("hook", ["none", "elsewhere", "frozen", "before", "a torch that shows no saved tensors"])
def test_a_wrong_hook_tensor_warns_and_changes_nothing(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's backward computes with freed memory then, or ends the process."""
    runner, last, x = Runner(), linear(), leaf(4, WIDTH)
    h = x * 1
    out = last(runner.run(torch.sin, h))
    wrong = {"none": None, "elsewhere": last(torch.ones(1, WIDTH)), "frozen": out.detach(), "before": h}.get(hook, out)
    if wrong is out:
        monkeypatch.setattr(output_discarding, "SHOWS_SAVED_TENSORS", False)
    text = "this version of torch does not show what its graph has saved" if wrong is out else NO_HOOK
    with pytest.warns(SacWarning, match=text):
        runner.discard(wrong)
    out.square().sum().backward()
    assert torch.equal(x.grad, expected(lambda one: last(one.sin()).square(), x))


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_results_without_tensors_have_nothing_to_discard(value: Any) -> None:
    assert Runner().run(lambda x: value, leaf(2)) == value


def test_a_region_s_input_that_is_changed_in_place_is_an_error() -> None:
    runner, x = Runner(), leaf(4)
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
    runner, x = Runner(), leaf(4)
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
    runner, transposes, x = Runner(), Noted(False), leaf(2, 3)

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
    runner, cache, x = Runner(), torch.arange(6.0), leaf(3)
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


def chain(manager: Any, plain: nn.Module | None = None) -> dict[str, Tensor]:
    """Three regions one after the other, discarded as a whole; `plain` is between the first two, and no region."""
    stages = [nn.Sequential(linear(), nn.GELU(), nn.Dropout(0.3)) for _ in range(3)]
    last, x = linear(), leaf(4, WIDTH)
    h, memories = x, []
    for place, stage in enumerate(stages):
        h = managed(manager, stage, h)
        if plain is not None and not place:
            h = plain(h).exp()
        memories.append(StorageWeakRef(h.untyped_storage()))
    out = last(h)
    del h
    if manager is not None:
        assert len(manager.checkpoints) == 3
        manager.discard_all_outputs_and_register_unified_recompute(out)
        assert [memory.expired() for memory in memories] == [plain is None, True, True]
    return gradients_of(out.square().sum(), x, last, *stages, *([] if plain is None else [plain]))


def several_outputs(manager: Any) -> dict[str, Tensor]:
    first, second, x = nn.Linear(WIDTH, 2 * WIDTH), linear(), leaf(4, WIDTH)
    one, two = managed(manager, lambda h: first(h).chunk(2, -1), x)
    three = managed(manager, lambda a, b: F.dropout(second(a * b), 0.3), one, two)
    out = (three * one).sum()
    if manager is not None:
        manager.discard_all_outputs_and_register_unified_recompute(out)
    return gradients_of(out, x, first, second)


@pytest.mark.parametrize("program", [chain, lambda manager: chain(manager, linear()), several_outputs])
def test_a_manager_changes_nothing(program: Any) -> None:
    managers = megatron.CheckpointWithoutOutputManager, megatron.BlockLevelCheckpointManager
    assert_same_for([None, *(manager() for manager in managers)], program)


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


@pytest.mark.parametrize("wrong", ["region", megatron.CheckpointWithoutOutput()])
def test_what_a_manager_cannot_take(wrong: Any) -> None:
    manager = megatron.CheckpointWithoutOutputManager()
    text = (
        f"this {type(wrong).__name__} is not a region that has run\n    legal: a CheckpointWithoutOutput that has run"
    )
    with pytest.raises(ConfigError, match=f"add_checkpoint: {text}\n    fix: call its checkpoint"):
        manager.add_checkpoint(wrong)
    assert manager.checkpoints == []


def test_an_output_that_goes_into_a_checkpoint_is_not_held_by_it() -> None:
    """The norm before experts that are recomputed as a whole: the experts' region would hold the norm's output."""
    runner, norm, x = Runner(), nn.LayerNorm(WIDTH), leaf(4, WIDTH)
    experts = nn.Sequential(linear(), nn.GELU(), linear())
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
