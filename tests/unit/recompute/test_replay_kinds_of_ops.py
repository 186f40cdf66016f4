"""Ops of every kind are replayed: views, writes, several results, lists, sparse, complex, higher-order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.blocks import FunctionBlock
from tests.support.replay_programs import (
    POLICIES,
    assert_gave_way,
    block_of,
    replay,
    warning_of,
)


def results_written_to_arguments(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        doubled = torch.empty(0)
        torch.mul(x, 2, out=doubled)
        values, places = torch.empty(8, 1), torch.empty(8, 1, dtype=torch.long)
        torch.max(x, 1, keepdim=True, out=(values, places))
    return (x @ block.a * doubled).sin() * values * places


def lies_elsewhere(block: FunctionBlock, x: Tensor) -> Tensor:
    other = x.detach() * 3
    moved = torch.empty(0).set_(other)
    other.add_(1)
    return (x @ block.a).sin() * moved


def takes_a_storage(block: FunctionBlock, x: Tensor) -> Tensor:
    doubled = x.detach() * 2
    return (x @ block.a).sin() * torch.empty(0).set_(doubled.untyped_storage(), 0, doubled.shape, doubled.stride())


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (results_written_to_arguments, "aten.max.dim_max reads memory that no op has written to"),
        (lies_elsewhere, "aten.set_.source_Tensor gives a tensor other memory"),
        (takes_a_storage, "aten.set_.source_Storage_storage_offset takes a storage"),
    ],
)
def test_gives_way(function: Callable[..., Tensor], found: str) -> None:
    assert_gave_way(block_of(function), replay(POLICIES["nothing"]), warning_of(found))
