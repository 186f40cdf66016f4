"""Regions whose outputs are released, one after another, in threads, and where something goes wrong."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

import sac
from sac.compat.output_discarding import (
    OTHER_LAYOUT,
    WRITTEN_LATER,
    discard,
    lent_inputs,
    run_discardable,
)
from sac.engine.settings import PLAIN
from sac.errors import RegionError
from tests.support.discarding_programs import (
    WIDTH,
    Runner,
    gradients,
    linears,
    norm_and_linear,
    normed,
    seeded,
)
from tests.support.runs import Noted
from tests.support.training import assert_same


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
    with pytest.raises(RegionError, match="output 0 was written to after a region had taken it as its input"):
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
    fails = Noted(False)

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
    transposes = Noted(False)

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
        f"    fix: {OTHER_LAYOUT}"
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
        f"    fix: {WRITTEN_LATER}"
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
