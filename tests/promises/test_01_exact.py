"""Each region on which torch's own selective checkpointing is wrong or breaks: ours gives the un-checkpointed bits.

The rows on several backward calls are in `test_05_backward_often.py`, those on bytes and on outer hooks in
`test_06_no_dead_bytes.py`, those on ops that only recomputation runs in `test_04_tolerant_and_strict.py`, those on
routing in `test_10_routing_is_saved.py`, and those on buffers and counters in the catalogue.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.support.blocks import APPLY, policy, save, selective, square
from tests.support.oracle import assert_exact, on_every_way
from tests.support.programs import CATALOGUE, Program, programs
from tests.support.stock import install_stock
from tests.support.training import assert_same_training, deterministic

EVERYTHING, MATMUL = policy(default="save"), policy(save("matmul"))
FIRST_DROPOUT = policy(save("aten.native_dropout", call={"index": [0]}))
MUTATED = "has been mutated"
# A program, what the policy saves of it, and what torch 2.13 does on a CPU: other gradients, or an error like this.
DEFECTS: list[tuple[str, dict[str, Any], str]] = [
    ("two_dropouts", FIRST_DROPOUT, "wrong"),
    ("noise_like_the_input", policy(save("aten.rand_like")), "wrong"),
    ("sampled_indices", policy(save("aten.multinomial")), "wrong"),
    ("custom_ops_that_draw", policy(save("sactest::noisy_attention")), "wrong"),  # it has no tag
    ("generator_of_a_module", MATMUL, "wrong"),
    ("generator_of_a_module", policy(save("aten.rand.generator")), "wrong"),
    ("random_slopes", MATMUL, "wrong"),
    ("activation_in_place", MATMUL, MUTATED),
    ("added_in_place", MATMUL, MUTATED),
    ("write_through_a_view", MATMUL, MUTATED),
    ("fused_norm", EVERYTHING, MUTATED),
    ("batch_norm", EVERYTHING, MUTATED),
    ("result_of_an_out_variant", policy(save("sactest::*", optional=True)), "wrong"),
    ("added_to_by_a_kernel", EVERYTHING, "wrong"),
]
ON_EACH_DEFECT = pytest.mark.parametrize(("name", "chosen", "stock"), DEFECTS, ids=[row[0] for row in DEFECTS])
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
ON_EACH_ENTRY = pytest.mark.parametrize("entry", [*APPLY, "context_fn"])


@on_every_way(programs(), quick=("full", "auto", "served rerun"))
def test_each_program_in_each_way(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy)


@ON_EACH_ENTRY
@ON_EACH_DEVICE
@ON_EACH_DEFECT
def test_gradients_equal_where_stock_is_wrong(
    name: str, chosen: dict[str, Any], stock: str, device: str, entry: str
) -> None:
    build = CATALOGUE[name].model
    with deterministic(device):
        assert_same_training(build, selective(chosen), entry=entry, device=device, make_input=square, steps=2)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="tells what torch 2.13 does, no other version")
@ON_EACH_DEFECT
def test_stock_fails_this_row(name: str, chosen: dict[str, Any], stock: str) -> None:
    """The rows above can fail: torch's own engine does, with the very same model, policy and oracle."""
    compare = functools.partial(
        assert_same_training, CATALOGUE[name].model, selective(chosen), make_input=square, put=install_stock
    )
    if stock == "wrong":
        with pytest.raises(AssertionError, match="gradient"):
            compare()
    else:
        with pytest.raises(RuntimeError, match=stock):
            compare()
