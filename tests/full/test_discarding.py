"""Outputs of regions that are let go of until backward: their memory goes, and every gradient is what it would be."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sac
from sac.errors import RegionError, SacWarning
from sac.full import saved_by_graph
from sac.full.discarding import Discardable, discard, lent_inputs, run_discardable
from sac.full.saved_by_graph import nodes_between
from sac.region.settings import PLAIN
from tests.semantics.training import assert_same

WIDTH = 8
Program = Callable[["Runner"], dict[str, Tensor]]


class Runner:
    """Runs functions plainly, or as regions whose outputs are discarded."""

    def __init__(self, *, discards: bool) -> None:
        self.discards = discards
        self.let_go = 0
        self.last: Discardable | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        if not self.discards:
            return function(*args)
        output, self.last = run_discardable(PLAIN, function, args)
        return output

    def discard(self, *further_on: Tensor) -> None:
        if self.last is not None:
            self.let_go += discard([self.last], *further_on)
        self.last = None


def linears(count: int = 2, width: int = WIDTH) -> list[nn.Linear]:
    return [nn.Linear(width, width) for _ in range(count)]


def gradients(loss: Tensor, *sources: Tensor | nn.Module) -> dict[str, Tensor]:
    loss.backward()
    found = {"loss": loss.detach()}
    for place, source in enumerate(sources):
        for number, tensor in enumerate(source.parameters() if isinstance(source, nn.Module) else [source]):
            assert tensor.grad is not None
            found[f"{place}.{number}"] = tensor.grad
    return found | {"random state": torch.get_rng_state()}


def gelu_times_input(x: Tensor) -> Tensor:
    return F.gelu(x) * x


def activation_before_a_linear(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    inner = runner.run(gelu_times_input, first(x))
    out = second(inner)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second)


def dropout_inside(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    inner = runner.run(lambda h: F.dropout(F.gelu(h), 0.4), first(x))
    out = F.dropout(second(inner), 0.2)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second)


def norm_before_an_attention(runner: Runner) -> dict[str, Tensor]:
    norm, (q, k, v, o) = nn.LayerNorm(WIDTH), linears(4)
    x = torch.randn(2, 5, WIDTH, requires_grad=True)
    y = runner.run(norm, x)
    attended = F.scaled_dot_product_attention(q(y), k(y), v(y))
    out = o(attended)
    runner.discard(out)
    return gradients((out + x).square().sum(), x, norm, q, k, v, o)


def views_saved_by_the_consumers(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(6, WIDTH, requires_grad=True)
    y = runner.run(lambda h: first(h).exp(), x)
    left, right = y.tensor_split(2, dim=1)
    out = (left * right.flip(0)).sum() + second(y.t().reshape(-1, WIDTH)).sum() + (y[1:4, ::2] ** 2).sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def several_outputs(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)

    def both(h: Tensor) -> tuple[Any, ...]:
        hidden = first(h)
        return hidden.tanh(), {"same": hidden.sigmoid(), "none": None}, 3, hidden.argmax(-1)

    one, rest, number, places = runner.run(both, x)
    out = (one * rest["same"]).sum() * number + F.embedding(places, second.weight).square().sum() + second(one).sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def outputs_in_one_storage(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    left, right = runner.run(lambda h: first(h).exp().chunk(2, dim=-1), x)
    out = (left * right).sum() + second(torch.cat([right, left], -1)).square().sum()
    runner.discard(out)
    return gradients(out, x, first, second)


def nothing_in_the_region_needs_a_gradient(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    first.requires_grad_(False)
    inner = runner.run(lambda h: F.dropout(first(h), 0.5), torch.randn(4, WIDTH))
    out = second(inner)
    runner.discard(out)
    return gradients(out.square().sum(), second)


def autograd_functions_as_consumers(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = runner.run(gelu_times_input, first(x))
    out = Scaled.apply(y, second.weight)
    runner.discard(out)
    return gradients(out.square().sum(), x, first, second.weight)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        return tensor @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        tensor, weight = ctx.saved_tensors
        return grad @ weight.t(), tensor.t() @ grad


def mixed_precision(runner: Runner) -> dict[str, Tensor]:
    first, second = linears()
    x = torch.randn(4, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = runner.run(lambda h: F.silu(first(h)), x)
        out = second(y)
        runner.discard(out)
    return gradients(out.float().square().sum(), x, first, second)


def complex_numbers(runner: Runner) -> dict[str, Tensor]:
    x = torch.randn(4, 6, dtype=torch.complex64, requires_grad=True)
    y = runner.run(lambda h: h.sin(), x)
    out = (y * y.conj() * y).abs().sum()
    runner.discard(out)
    return gradients(out, x)


def as_other_dtype(runner: Runner) -> dict[str, Tensor]:
    x = torch.randn(4, 6, requires_grad=True)
    y = runner.run(torch.sin, x)
    out = torch.view_as_complex(y.view(4, 3, 2)).square().abs().sum()
    runner.discard(out)
    return gradients(out, x)


def empty_output(runner: Runner) -> dict[str, Tensor]:
    (first,) = linears(1)
    x = torch.randn(0, WIDTH, requires_grad=True)
    out = first(runner.run(torch.sin, x)).sum()
    runner.discard(out)
    return gradients(out, x, first)


PROGRAMS: tuple[Program, ...] = (
    activation_before_a_linear,
    dropout_inside,
    norm_before_an_attention,
    views_saved_by_the_consumers,
    several_outputs,
    outputs_in_one_storage,
    nothing_in_the_region_needs_a_gradient,
    autograd_functions_as_consumers,
    mixed_precision,
    complex_numbers,
    as_other_dtype,
    empty_output,
)


def seeded(program: Program, runner: Runner) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return program(runner)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_gradients_are_those_of_the_plain_program(program):
    plain = seeded(program, Runner(discards=False))
    for _ in range(2):
        runner = Runner(discards=True)
        assert_same(plain, seeded(program, runner))
        assert runner.let_go > 0 or program is empty_output


def normed(x: Tensor, norm: nn.Module, linear: nn.Module) -> tuple[Tensor, Discardable, StorageWeakRef]:
    """A norm as a region and a linear layer after it; the norm's output lives on only where autograd holds it."""
    y, lender = run_discardable(PLAIN, norm, (x,))
    assert lender is not None
    return linear(y), lender, StorageWeakRef(y.untyped_storage())


def norm_and_linear() -> tuple[Tensor, nn.Module, nn.Module]:
    torch.manual_seed(0)
    return torch.randn(4, WIDTH, requires_grad=True), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)


def test_the_memory_goes_at_the_discard_and_not_before():
    x, norm, linear = norm_and_linear()
    out, lender, memory = normed(x, norm, linear)
    assert not memory.expired()
    assert discard([lender], out) == 1
    assert memory.expired()
    out.sum().backward()


def test_everything_is_free_after_backward_without_the_cycle_collector():
    x, norm, linear = norm_and_linear()
    gc.collect()
    gc.disable()
    try:
        out, lender, _ = normed(x, norm, linear)
        discard([lender], out)
        input_memory = StorageWeakRef(x.untyped_storage())
        out.sum().backward()
        del x, out, lender
        assert input_memory.expired()
    finally:
        gc.enable()


def test_a_graph_that_is_dropped_frees_everything_without_the_cycle_collector():
    x, norm, linear = norm_and_linear()
    gc.collect()
    gc.disable()
    try:
        out, lender, _ = normed(x, norm, linear)
        discard([lender], out)
        memory = StorageWeakRef(x.untyped_storage())
        del x, out, lender
        assert memory.expired()
    finally:
        gc.enable()


def test_the_region_runs_once_more_for_all_consumers_and_its_own_backward():
    runs = []

    def region(h: Tensor) -> Tensor:
        runs.append(h)
        return h.sin().exp()

    x = torch.randn(4, requires_grad=True)
    y, lender = run_discardable(PLAIN, region, (x,))
    out = (y * y.cos()).sum() + (y**3).sum()
    assert discard([lender], out) >= 3
    out.backward()
    assert len(runs) == 2


def test_what_nobody_saved_does_not_make_recomputation_run_to_its_end():
    ends = []

    def region(h: Tensor) -> Tensor:
        out = h.sin() + 1
        ends.append(out)
        return out

    x = torch.randn(4, requires_grad=True)
    for _ in range(2):  # with the recorder and without
        ends.clear()
        y, lender = run_discardable(PLAIN, region, (x,))
        out = y.sum()
        assert discard([lender], out) == 0
        del lender
        out.backward()
        assert len(ends) == 1


def test_backward_twice_with_a_retained_graph():
    x, norm, linear = norm_and_linear()
    out, lender, _ = normed(x, norm, linear)
    discard([lender], out)
    out.square().sum().backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    out.square().sum().backward()
    assert torch.equal(x.grad, first)


def test_gradients_of_gradients():
    def twice(runner: Runner) -> dict[str, Tensor]:
        x = torch.randn(5, requires_grad=True)
        y = runner.run(lambda h: h.sin().exp(), x)
        out = (y**3).sum()
        runner.discard(out)
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        return gradients(first.square().sum(), x)

    assert_same(seeded(twice, Runner(discards=False)), seeded(twice, Runner(discards=True)))


def test_two_losses_one_after_the_other():
    def losses(runner: Runner) -> dict[str, Tensor]:
        first, second = linears()
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = runner.run(torch.sin, x)
        one, two = first(y).square().sum(), second(y).square().sum()
        runner.discard(one, two)
        one.backward()
        two.backward(inputs=list(second.parameters()))
        return gradients(x.sum() * 0, x, first, second)

    assert_same(seeded(losses, Runner(discards=False)), seeded(losses, Runner(discards=True)))


def test_a_consumer_that_does_not_lead_to_the_tensor_keeps_the_output():
    def aside(runner: Runner) -> dict[str, Tensor]:
        first, second = linears()
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = runner.run(torch.sin, x)
        one, two = first(y), second(y)
        runner.discard(one)
        return gradients((one * two).sum(), x, first, second)

    assert_same(seeded(aside, Runner(discards=False)), seeded(aside, Runner(discards=True)))


def test_a_tensor_that_does_not_depend_on_the_output_changes_nothing_but_warns():
    x, norm, linear = norm_and_linear()
    out, lender, memory = normed(x, norm, linear)
    with pytest.warns(SacWarning) as seen:
        assert discard([lender], linear(torch.randn(1, WIDTH))) == 0
    assert str(seen[0].message) == (
        "the tensor given does not depend on the region's output, which is therefore kept until backward"
    )
    del lender
    assert not memory.expired()
    out.sum().backward()
    assert x.grad is not None


def test_a_torch_that_shows_no_saved_tensors_keeps_the_output(monkeypatch):
    monkeypatch.setattr(saved_by_graph, "_tells_hooks", False)
    x, norm, linear = norm_and_linear()
    out, lender, memory = normed(x, norm, linear)
    with pytest.warns(SacWarning, match="this version of torch does not show what its graph has saved"):
        assert discard([lender], out) == 0
    del lender
    assert not memory.expired()
    out.sum().backward()
    assert x.grad is not None


def test_an_output_changed_in_place_is_kept():
    def changed(runner: Runner) -> dict[str, Tensor]:
        (linear,) = linears(1)
        x = torch.randn(4, WIDTH, requires_grad=True)
        y = runner.run(lambda h: h + 1, x)
        y.mul_(2)
        out = linear(y)
        if runner.discards:
            with pytest.warns(SacWarning, match="changed in place after the region: it is kept until backward"):
                runner.discard(out)
        return gradients(out.square().sum(), x, linear)

    assert_same(seeded(changed, Runner(discards=False)), seeded(changed, Runner(discards=True)))


def test_an_output_changed_in_place_after_the_discard_does_no_harm():
    x, norm, linear = norm_and_linear()
    linear(norm(x)).square().sum().backward()
    expected, x.grad = x.grad, None
    y, lender = run_discardable(PLAIN, norm, (x,))
    out = linear(y)
    discard([lender], out)
    with torch.no_grad():
        y.zero_()  # without us torch refuses this backward
    out.square().sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_part_of_the_input_is_not_let_go():
    x = torch.randn(4, requires_grad=True)
    h = x * 2
    (same, view, new), lender = run_discardable(PLAIN, lambda t: (t, t[1:], t.sin()), (h,))
    out = (same**2).sum() + (view**2).sum() + (new**2).sum()
    assert discard([lender], out) == 1
    out.backward()
    assert torch.equal(x.grad, torch.autograd.grad(_parts(x * 2), x)[0])


def _parts(h: Tensor) -> Tensor:
    return (h**2).sum() + (h[1:] ** 2).sum() + (h.sin() ** 2).sum()


@pytest.mark.parametrize("value", [None, 3, "text"])
def test_results_without_tensors_have_nothing_to_discard(value):
    assert run_discardable(PLAIN, lambda x: value, (torch.randn(2, requires_grad=True),)) == (value, None)


def test_without_grad_mode_it_is_the_plain_call():
    with torch.no_grad():
        output, lender = run_discardable(PLAIN, torch.sin, (torch.ones(2),))
    assert lender is None
    assert torch.equal(output, torch.ones(2).sin())


def test_inside_another_region_gradients_are_right():
    def nested(runner: Runner) -> dict[str, Tensor]:
        norm, (first,) = nn.LayerNorm(WIDTH), linears(1)
        x = torch.randn(4, WIDTH, requires_grad=True)

        def layer(h: Tensor) -> Tensor:
            out = first(runner.run(norm, h))
            runner.discard(out)
            return F.dropout(out, 0.3) + h

        outer = partial(sac.checkpoint, layer) if runner.discards else layer
        return gradients(outer(outer(x)).square().sum(), x, norm, first)

    plain = seeded(nested, Runner(discards=False))
    for _ in range(2):
        assert_same(plain, seeded(nested, Runner(discards=True)))


def test_hooks_around_the_consumer_keep_what_they_packed():
    x, norm, linear = norm_and_linear()
    linear(norm(x)).square().sum().backward()
    expected, x.grad = x.grad, None
    y, lender = run_discardable(PLAIN, norm, (x,))
    with torch.autograd.graph.save_on_cpu():
        out = linear(y)
    assert discard([lender], out) == 0
    out.square().sum().backward()
    assert torch.equal(x.grad, expected)


def chain(runner: Runner, stages: list[nn.Module], x: Tensor, memories: list[StorageWeakRef]) -> tuple[Tensor, Any]:
    """Regions of which each takes the one before as its input."""
    lenders = []
    h = x
    for stage in stages:
        h = runner.run(stage, h)
        memories.append(StorageWeakRef(h.untyped_storage()))
        lenders.append(runner.last)
    return h, lenders


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_chain_of_regions_holds_none_of_the_outputs_between_them(dropout):
    def program(runner: Runner) -> dict[str, Tensor]:
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(3)]
        last = nn.Linear(WIDTH, WIDTH)
        x = torch.randn(4, WIDTH, requires_grad=True)
        memories: list[StorageWeakRef] = []
        out, lenders = chain(runner, stages, x, memories)
        out = last(out)
        if runner.discards:
            assert discard(lenders, out) > 0
            assert [memory.expired() for memory in memories] == [True] * 3
        return gradients(out.square().sum(), x, *stages, last)

    plain = seeded(program, Runner(discards=False))
    for _ in range(2):
        assert_same(plain, seeded(program, Runner(discards=True)))


def test_a_chain_with_plain_ops_between_its_regions():
    def program(runner: Runner) -> dict[str, Tensor]:
        first, second = linears()
        x = torch.randn(4, WIDTH, requires_grad=True)
        h = runner.run(lambda t: first(t).tanh(), x)
        one = runner.last
        middle = h * h.exp()
        h = runner.run(lambda t: F.dropout(second(t), 0.3), middle)
        two = runner.last
        out = (h**2).sum()
        if runner.discards:
            assert discard([one, two], out) == 2
        return gradients(out, x, first, second)

    plain = seeded(program, Runner(discards=False))
    for _ in range(2):
        assert_same(plain, seeded(program, Runner(discards=True)))


def test_a_lent_input_that_is_changed_in_place_is_an_error_as_it_is_for_every_region():
    x = torch.randn(4, requires_grad=True)
    y, _lender = run_discardable(PLAIN, torch.sin, (x,))
    with lent_inputs(y):
        out = sac.checkpoint(torch.exp, y)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RegionError, match=r"input 0 \(float32\[4\]\) was changed in place after the forward"):
        out.sum().backward()


def test_outputs_that_are_never_discarded_are_used_as_they_are():
    x = torch.randn(4, requires_grad=True)
    y, lender = run_discardable(PLAIN, torch.sin, (x,))
    with lent_inputs(y):
        out = sac.checkpoint(lambda t: t.exp().exp(), y)
    del y, lender
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().exp().sum(), x)[0])


def test_an_exception_in_the_region_leaves_nothing_behind():
    def broken(h: Tensor) -> Tensor:
        raise ZeroDivisionError

    x = torch.randn(4, requires_grad=True)
    with pytest.raises(ZeroDivisionError):
        run_discardable(PLAIN, broken, (x,))
    y, lender = run_discardable(PLAIN, torch.sin, (x,))
    out = (y**2).sum()
    discard([lender], out)
    out.backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() ** 2).sum(), x)[0])


def test_an_exception_in_recomputation_can_be_retried():
    fails = [False]

    def region(h: Tensor) -> Tensor:
        if fails[0]:
            raise ZeroDivisionError
        return h.sin()

    x = torch.randn(4, requires_grad=True)
    y, lender = run_discardable(PLAIN, region, (x,))
    out = (y**2).sum()
    discard([lender], out)
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        out.backward(retain_graph=True)
    fails[0] = False
    out.backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() ** 2).sum(), x)[0])


def test_an_output_that_lies_otherwise_in_recomputation_is_an_error():
    transposes = [False]

    def region(h: Tensor) -> Tensor:
        out = h.sin()
        return out.t().contiguous().t() if transposes[0] else out

    x = torch.randn(2, 3, requires_grad=True)
    for _ in range(2):  # a first call, under the recorder, would find the other op before us
        y, lender = run_discardable(PLAIN, region, (x,))
        out = (y**2).sum()
        discard([lender], out)
    transposes[0] = True
    with pytest.raises(RegionError) as error:
        out.backward()
    assert str(error.value) == (
        "region: output 0 was float32[2, 3] with strides (3, 1), 0 elements into 24 bytes in forward and is "
        "float32[2, 3] with strides (1, 2), 0 elements into 24 bytes in recomputation\n"
        "    fix: make the region's forward depend on its inputs, parameters and random state only"
    )


def test_an_output_in_memory_that_others_write_to_is_an_error_as_it_is_without_regions():
    cache = torch.arange(6.0)
    x = torch.ones(3, requires_grad=True)
    y, lender = run_discardable(PLAIN, lambda h: cache[:3], (x,))
    out = (x * y).sum()
    discard([lender], out)
    cache.zero_()
    with pytest.raises(RegionError) as error:
        out.backward()
    assert str(error.value) == (
        "region: output 0 lies in memory that is not the region's own and was written to after the forward\n"
        "    fix: make the region's forward depend on its inputs, parameters and random state only"
    )


def test_an_output_in_memory_of_others_can_be_discarded():
    cache = torch.arange(6.0)
    x = torch.ones(3, requires_grad=True)
    y, lender = run_discardable(PLAIN, lambda h: cache[:3], (x,))
    out = (x * y).sum()
    discard([lender], out)
    out.backward()
    assert torch.equal(x.grad, cache[:3])


def test_a_second_discard_does_nothing():
    x, norm, linear = norm_and_linear()
    out, lender, _ = normed(x, norm, linear)
    assert discard([lender], out) == 1
    assert discard([lender], out) == 0
    out.sum().backward()


def test_the_walk_does_not_go_beyond_the_region():
    """A deep graph before the region is not looked at: its nodes were made before the region's."""
    x = torch.randn(WIDTH, requires_grad=True)
    h = x
    for _ in range(50):
        h = h.sin()
    before = h.grad_fn
    y, lender = run_discardable(PLAIN, torch.exp, (h,))
    out = ((y**2) + h).sum()  # h leads there beside the region
    seen = list(nodes_between([out], lender.starts))
    assert before not in seen
    assert y.grad_fn in seen


def test_threads_discard_independently():
    def train(seed: int, results: dict[int, Any]) -> None:
        generator = torch.Generator().manual_seed(seed)
        linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            linear.weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator))
            linear.bias.zero_()
        x = torch.randn(4, WIDTH, generator=generator).requires_grad_()
        for _ in range(20):
            x.grad = None
            y, lender = run_discardable(PLAIN, torch.sin, (x,))
            out = linear(y)
            discard([lender], out)
            del y, lender
            out.square().sum().backward()
        results[seed] = (x.grad, torch.autograd.grad(linear(x.sin()).square().sum(), x)[0])

    results: dict[int, Any] = {}
    threads = [threading.Thread(target=train, args=(seed, results)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(ours, plain) for ours, plain in results.values())


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def forward(self, h: Tensor) -> Tensor:
        self.modes.append(_get_current_dispatch_mode() is not None)
        return h.sin()


def test_repeated_calls_run_without_a_dispatch_mode():
    """Evidence is found again: the function is the same one in each call, and so is the sort of its inputs."""
    region, x = Watching(), torch.randn(4, requires_grad=True)
    for _ in range(3):
        y, lender = run_discardable(PLAIN, region, (x,))
        discard([lender], (y**2).sum())
    assert region.modes == [True, False, False]
