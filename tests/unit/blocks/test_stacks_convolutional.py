"""Blocks of convolutional networks: residual blocks, and not the single convolutions in them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import sac
from sac.blocks.find import find_blocks
from sac.memory_timeline import mark, measure_memory

CHANNELS = 16


class Unit(nn.Module):
    """One convolution, its norm and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.normalization = nn.BatchNorm2d(CHANNELS)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.normalization(self.convolution(x)))


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(Unit(), Unit(), Unit())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


class Stage(nn.Module):
    def __init__(self, part: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part() for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Network(nn.Module):
    def __init__(self, part: type[nn.Module], depth: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(part, depth), Stage(part, depth)])

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


class NormedResidual(nn.Module):
    """As in EnCodec: two convolutions in a list, each with its weight in two factors."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleList(
            part
            for _ in range(2)
            for part in (nn.ELU(), nn.Sequential(weight_norm(nn.Conv1d(CHANNELS, CHANNELS, 1)), nn.Identity()))
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = x
        for part in self.block:
            inner = part(inner)
        return x + inner


def paths(model: nn.Module) -> list[str]:
    return [block.path for block in find_blocks(model)]


@pytest.mark.parametrize("part", [Bottleneck, NormedResidual])
def test_a_residual_block_is_a_block_and_its_convolutions_are_not(part: type[nn.Module]) -> None:
    assert paths(Network(part, 2)) == [f"stages.{stage}.layers.{layer}" for stage in range(2) for layer in range(2)]


def test_a_long_list_of_single_convolutions_is_a_stage() -> None:
    assert paths(Network(Unit, 8)) == [f"stages.{stage}.layers.{layer}" for stage in range(2) for layer in range(8)]


def test_a_single_convolution_that_is_not_to_be_split_over_devices_is_no_block() -> None:
    network = Network(Bottleneck, 2)
    network._no_split_modules = ["Unit"]  # as ResNet of Hugging Face has it
    assert paths(network) == paths(Network(Bottleneck, 2))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_less_is_kept_of_residual_blocks(mode: str) -> None:
    torch.manual_seed(0)
    plain = Network(Bottleneck, 2)
    ours = sac.apply(copy.deepcopy(plain), mode)
    x = torch.randn(4, CHANNELS, 16, 16)
    assert kept_bytes(ours, x) < 0.75 * kept_bytes(plain, x)
    for left, right in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def kept_bytes(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model.zero_grad()
        loss = model(x).square().sum()
        mark("forward done")
        loss.backward()

    step()
    return measure_memory(step).at("forward done")
