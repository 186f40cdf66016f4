"""Regions whose outputs are released, one after another, in threads, and where something goes wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sac.compat.output_discarding import (
    OTHER_LAYOUT,
    WRITTEN_LATER,
    discard,
    run_discardable,
)
from sac.engine.settings import PLAIN
from sac.errors import RegionError
from tests.support.discarding_programs import (
    WIDTH,
    Runner,
    gradients,
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
