"""An input that is written to, or gets other data, between forward and backward is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.errors import RegionError

CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "written to": lambda mask: mask.zero_(),
    "other data": lambda mask: setattr(mask, "data", torch.zeros_like(mask)),
    "other data of another shape": lambda mask: setattr(mask, "data", torch.zeros(5)),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_it_is_an_error(name: str, reentrant: bool) -> None:
    x = torch.arange(8.0).requires_grad_()
    mask = torch.arange(16.0)[1::2]
    out = sac.checkpoint(lambda x, mask: (x * mask) ** 2, x, mask, use_reentrant=reentrant)
    CHANGES[name](mask)
    with pytest.raises(RegionError, match=r"its input 1 .* was changed"):
        out.sum().backward()
