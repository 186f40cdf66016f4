"""The shared support can fail: the oracle finds a wrong way, the catalogue is trained, the accountant counts right."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.accountant import account_step
from tests.support.blocks import Stack
from tests.support.oracle import built_model, train_program
from tests.support.programs import CATALOGUE, Program, programs
from tests.support.training import assert_same
from tests.support.ways import NONE, WAYS, Way


def _without_random_states(model: Stack, policy: Mapping[str, Any]) -> Stack:
    plain = [block.forward for block in model.blocks]
    for block, forward in zip(model.blocks, plain, strict=True):
        block.forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    return model


def test_a_recomputation_with_other_random_numbers_is_found() -> None:
    program = CATALOGUE["dropout_module"]
    with pytest.raises(AssertionError, match="gradient"):
        assert_same(train_program(program), train_program(program, Way("wrong", _without_random_states)))


@pytest.mark.parametrize("program", programs(), ids=str)
def test_each_program_repeats_itself_and_has_gradients(program: Program) -> None:
    reference = train_program(program)
    assert_same(reference, train_program(program))
    assert all(torch.isfinite(x).all() for name, x in reference.items() if "loss" in name)
    assert any("gradient of blocks.1" in name for name in reference)


def test_the_accountant_knows_what_two_products_keep_and_run() -> None:
    """Each block keeps the results of tanh and sin, and the second its input; `full` keeps inputs."""
    program = CATALOGUE["two_products"]
    inputs = (torch.randn(8, 8, requires_grad=True),)
    matrix, product = 8 * 8 * 4, 2 * 8**3
    plain = account_step(built_model(program, NONE), inputs)
    assert (plain.kept_bytes, plain.forward_flops, plain.backward_flops) == (5 * matrix, 4 * product, 8 * product)
    full = account_step(built_model(program, WAYS["full"]), inputs)
    assert full.kept_bytes == matrix
    assert full.recomputed_flops(plain) == 2 * product
    assert full.runs("aten.tanh.default") == 2 * plain.runs("aten.tanh.default")
