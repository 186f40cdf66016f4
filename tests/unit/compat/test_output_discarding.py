"""Outputs of regions that are released until backward: their memory is freed, and all gradients stay the same."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

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
