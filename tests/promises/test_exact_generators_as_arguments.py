"""Random generators of Python and NumPy among the arguments of a region, in some calls only, are as without sac."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import FunctionBlock
from tests.support.every_mode import MODES, assert_as_without


def of_python(step: int) -> tuple[Any, Callable[[], float]]:
    source = random.Random(step)
    return source, source.random


def of_numpy(step: int) -> tuple[Any, Callable[[], float]]:
    source = np.random.default_rng(step)
    return source, source.random


def older_of_numpy(step: int) -> tuple[Any, Callable[[], float]]:
    source = np.random.RandomState(step)
    return source, source.random_sample


def scaled(block: FunctionBlock, x: Tensor, sources: dict[str, Any] | None) -> Tensor:
    h = x @ block.a
    if sources is not None:
        source = sources["source"]
        h = h * float(source.random_sample() if hasattr(source, "random_sample") else source.random())
    return x + torch.tanh(h).sin() @ block.b


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("made", [of_python, of_numpy, older_of_numpy])
def test_generators_among_arguments(mode: str, made: Callable[[int], tuple[Any, Callable[[], float]]]) -> None:
    def program(calls: list[Callable[..., Any]], step: int) -> list[Any]:
        source, draw = made(step)
        x = torch.randn(4, 8, requires_grad=True)
        y = x
        for call in calls:
            y = call(y, {"source": source} if step else None)
        y.square().sum().backward()
        return [x.grad, torch.tensor(draw())]

    blocks = [FunctionBlock(scaled, up=nn.Identity()) for _ in range(2)]
    if mode == "whole":
        blocks = [FunctionBlock(with_layer, up=nn.Linear(8, 8)) for _ in range(2)]
    assert_as_without(mode, nn.ModuleList(blocks), program)


def with_layer(block: FunctionBlock, x: Tensor, sources: dict[str, Any] | None) -> Tensor:
    return scaled(block, block.up(x), sources)
