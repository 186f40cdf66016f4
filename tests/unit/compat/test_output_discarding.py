"""Outputs of regions that are released until backward: their memory is freed, and all gradients stay the same."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import sac
from sac.compat import output_discarding
from sac.compat.output_discarding import discard, run_discardable
from sac.engine.settings import PLAIN
from sac.errors import SacWarning
from tests.support.discarding_programs import (
    PROGRAMS,
    WIDTH,
    Runner,
    empty_output,
    gradients,
    linears,
    norm_and_linear,
    normed,
    seeded,
)
from tests.support.runs import Noted
from tests.support.training import assert_same


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_gradients_are_those_of_the_plain_program(program):
    plain = seeded(program, Runner(discards=False))
    for _ in range(2):
        runner = Runner(discards=True)
        assert_same(plain, seeded(program, runner))
        assert runner.let_go > 0 or program is empty_output


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
    runs = Noted()

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
    ends = Noted()

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
    monkeypatch.setattr(output_discarding, "SHOWS_SAVED_TENSORS", False)
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
