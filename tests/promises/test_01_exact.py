"""Each region on which torch's own selective checkpointing is wrong or breaks: ours gives the un-checkpointed bits.

The rows on several backward calls are in `test_05_backward_often.py`, those on bytes and on outer hooks in
`test_06_no_dead_bytes.py`, those on ops that only recomputation runs in `test_04_tolerant_and_strict.py`, those on
routing in `test_10_routing_is_saved.py`, those on buffers and counters in tests/unit/recompute.
"""

from __future__ import annotations

import functools

import pytest
import torch

from tests.support.blocks import APPLY, FULL, alternate, policy, save, selective, square
from tests.support.defects import DEFECTS, EVERYTHING, NOTHING, Defect
from tests.support.oracle import assert_exact, on_every_way
from tests.support.pairs import in_pairs
from tests.support.programs import Program, programs
from tests.support.stock import install_stock
from tests.support.training import assert_same_training, deterministic

OTHER_POLICIES = {
    "everything": EVERYTHING,
    "everything by glob": policy(save("*")),
    "nothing": NOTHING,
    "matmuls": policy(save("matmul", optional=True)),
    "every second op": policy(alternate("*")),
    "random": policy(save("random", optional=True)),
}
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


@ON_EACH_DEVICE
@in_pairs(defect=DEFECTS, name=OTHER_POLICIES.keys(), entry=(*APPLY, "context_fn"), ids=lambda defect: defect.id)
def test_gradients_equal_under_every_other_policy(defect: Defect, name: str, device: str, entry: str) -> None:
    with deterministic(device):
        assert_same_training(
            defect.build, selective(OTHER_POLICIES[name]), entry=entry, device=device, make_input=square, steps=2
        )


@pytest.mark.parametrize("engine", ["auto", "replay"])
@ON_EACH_DEVICE
@ON_EACH_DEFECT
def test_gradients_equal_in_full(defect: Defect, device: str, engine: str) -> None:
    """Of which, unless replay is asked for, only regions that need a recorder are replayed, from the second call on."""
    with deterministic(device):
        assert_same_training(defect.build, {**FULL, "engine": engine}, device=device, make_input=square, steps=3)


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
