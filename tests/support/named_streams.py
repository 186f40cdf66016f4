"""What the tests of ``RngTracker`` share: a tracker of two streams, the numbers of a seed, the text of a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sac.errors import ConfigError
from sac.full import RngTracker


def two_streams() -> RngTracker:
    made = RngTracker("cpu")
    made.add("a", 1)
    made.add("b", 2)
    return made


def numbers_of(seed: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(3, generator=generator) for _ in range(count)]


def assert_numbers(drawn: list[Tensor], expected: list[Tensor]) -> None:
    assert [one.tolist() for one in drawn] == [one.tolist() for one in expected]


def refusal(call, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    return str(error.value)
