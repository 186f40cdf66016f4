"""Each region on which torch's own selective checkpointing is wrong or breaks: ours gives the un-checkpointed bits.

The rows on several backward calls are in `test_05_backward_often.py`, those on bytes and on outer hooks in
`test_06_no_dead_bytes.py`, those on ops that only recomputation runs in `test_04_tolerant_and_strict.py`, those on
routing in `test_10_routing_is_saved.py`, and those on buffers and counters in the catalogue.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.blocks import APPLY, selective, square
from tests.support.defects import DEFECTS, Defect
from tests.support.oracle import assert_exact, on_every_way
from tests.support.programs import Program, programs
from tests.support.stock import install_stock
from tests.support.training import assert_same_training, deterministic

ON_EACH_DEFECT = pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.id)
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ON_EACH_ENTRY = pytest.mark.parametrize("entry", [*APPLY, "context_fn"])


@on_every_way(programs())
def test_each_program_in_each_way(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@ON_EACH_ENTRY
@ON_EACH_DEVICE
@ON_EACH_DEFECT
def test_gradients_equal_where_stock_is_wrong(defect: Defect, device: str, entry: str) -> None:
    with deterministic(device):
        assert_same_training(
            defect.build, selective(defect.policy), entry=entry, device=device, make_input=square, steps=2
        )


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
@ON_EACH_DEFECT
def test_stock_fails_this_row(defect: Defect) -> None:
    """The rows above can fail: torch's own engine does, with the very same model, policy and oracle."""
    compare = functools.partial(
        assert_same_training, defect.build, selective(defect.policy), make_input=square, put=install_stock
    )
    if defect.stock == "wrong":
        with pytest.raises(AssertionError, match="gradient"):
            compare()
    else:
        with pytest.raises(RuntimeError, match=defect.stock):
            compare()
