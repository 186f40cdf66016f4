"""A module that is saved as a whole runs once per step: its buffers advance once, wherever recomputation ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from tests.support.blocks import FunctionBlock, Stack, install, policy, save, selective, square
from tests.support.training import assert_same_training, built, train
from tests.support.whole_module_blocks import RUNS, WIDTH, Apply, whole


def normed(part: Apply, x: Tensor) -> Tensor:
    RUNS.append(1)
    return part.norm(x @ part.weight)


def norm_between(block: Any, x: Tensor) -> Tensor:
    return block.part(block.norm(block.part(x)))


def module_last(block: Any, x: Tensor) -> Tensor:
    return block.part((x @ block.a).sin())


def modules_last(block: Any, x: Tensor) -> Tensor:
    return block.part(block.other((x @ block.a).sin()))


def module_unread(block: Any, x: Tensor) -> Tensor:
    y = (x @ block.a).sin()
    block.part(y)
    return y.cos() @ block.b


BODIES = (norm_between, module_last, modules_last, module_unread)
VALUES: dict[str, Any] = {
    "modules": selective(policy(whole("{part,other}"))),
    "modules and products": selective(policy(whole("{part,other}"), save("matmul", optional=True))),
    "to the end": selective(policy(whole("{part,other}")), early_stop=False),
}


def stack_of(body: Callable[..., Any]) -> Stack:
    blocks = []
    for _ in range(2):
        block = FunctionBlock(body, WIDTH, norm=nn.BatchNorm1d(WIDTH))
        for name in ("part", "other"):
            block.add_module(name, Apply(normed))
            block.get_submodule(name).norm = nn.BatchNorm1d(WIDTH)
        blocks.append(block)
    return Stack(*blocks)


@pytest.mark.parametrize("entry", ["apply", "context_fn with module"])
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("body", BODIES)
def test_training_is_the_same(body: Callable[..., Any], name: str, entry: str) -> None:
    assert_same_training(lambda: stack_of(body), VALUES[name], entry=entry, steps=3, make_input=square)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("body", BODIES)
def test_no_saved_module_runs_again(body: Callable[..., Any], name: str) -> None:
    def runs(model: Stack) -> int:
        del RUNS[:]
        train(model, steps=3, make_input=square)
        return len(RUNS)

    assert runs(install(built(lambda: stack_of(body)), VALUES[name])) == runs(built(lambda: stack_of(body)))


@pytest.mark.parametrize("body", BODIES)
def test_to_the_end_inside_torchs_checkpoint(body: Callable[..., Any]) -> None:
    with set_checkpoint_early_stop(False):
        assert_same_training(
            lambda: stack_of(body), VALUES["modules"], entry="context_fn with module", steps=3, make_input=square
        )
