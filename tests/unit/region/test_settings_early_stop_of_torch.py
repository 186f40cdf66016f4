"""``torch.utils.checkpoint.set_checkpoint_early_stop`` around a forward takes precedence over what sac was told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

import sac
from tests.support.layers import stack
from tests.support.recording import Recorder

Around = Callable[[], AbstractContextManager[Any]]
LAST = "aten.addmm.default"


def off() -> AbstractContextManager[Any]:
    return set_checkpoint_early_stop(False)


def on() -> AbstractContextManager[Any]:
    return set_checkpoint_early_stop(True)


def products(run: Callable[[Tensor], Tensor], around: Around, around_backward: Around = nullcontext) -> int:
    """How many linear maps backward runs again."""
    with around():
        out = run(torch.ones(2, 8, 32, requires_grad=True))
    with around_backward(), Recorder() as backward:
        out.sum().backward()
    return backward.count(LAST)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("around", [nullcontext, off, on])
def test_a_function_is_run_again_as_far_as_by_torch(around: Around, given: bool) -> None:
    layer = stack(1)[0]
    found = products(lambda x: sac.checkpoint(layer, x, early_stop=given), around)
    expected = products(lambda x: torch_checkpoint(layer, x, use_reentrant=False, early_stop=given), around)
    assert found == expected
    assert expected == (3 if (around is nullcontext and given) or around is on else 4)


@pytest.mark.parametrize(
    "value",
    [
        {"mode": "full"},
        {"mode": "full", "store": "host"},
        {"mode": "selective", "engine": "rerun"},
        {"mode": "selective", "engine": "auto"},
        {"mode": "selective", "engine": "replay"},
        {"mode": "selective", "policy": {"rules": [{"module": "up", "do": "save"}]}},
    ],
    ids=str,
)
def test_it_means_what_the_key_of_the_config_means(value: dict[str, Any]) -> None:
    plain = stack(2)
    said, given = copy.deepcopy(plain), copy.deepcopy(plain)
    sac.apply(said, value)
    sac.apply(given, {**value, "early_stop": False})
    for _ in range(2):
        assert products(said, off) == products(given, nullcontext)
        assert gradients(said, off) == gradients(plain, nullcontext)


def gradients(model: nn.Module, around: Around) -> list[list[float]]:
    model.zero_grad()
    torch.manual_seed(0)
    with around():
        out = model(torch.ones(2, 8, 32))
    out.square().sum().backward()
    return [one.grad.flatten().tolist() for one in model.parameters()]
