"""Values made from parameters alone are made again, whatever a rule says: they are as large as weights."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support.blocks import (
    APPLY,
    ENGINES,
    ENTRIES,
    FULL,
    FunctionBlock,
    Stack,
    install,
    policy,
    save,
    selective,
    under_each_engine,
)
from tests.support.recording import backward_ops, kept_bytes
from tests.support.training import assert_same, train

WIDTH = 32
WEIGHT_BYTES = WIDTH * WIDTH * 4
NAMED = [
    "aten.mul",
    "aten.abs",
    "aten.amax",
    "matmul",
    "aten.tanh",
    "aten.add",
    "aten.bernoulli",
    "aten.cat",
    "aten._to_copy",
]


def magnitude(block: FunctionBlock, x: Tensor) -> Tensor:
    return x.sin() @ block.a.abs()


def merged_adapter(block: FunctionBlock, x: Tensor) -> Tensor:
    return x.sin() @ (block.a @ block.b).tanh()


def scaled_by_a_constant(block: FunctionBlock, x: Tensor) -> Tensor:
    return x.sin() @ (block.a * torch.tensor(0.5)).tanh()


def through_a_view_and_in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    weight = torch.empty_like(block.a).copy_(block.a.t()).mul_(2.0)
    return x.sin() @ weight.tanh()


def cast(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x.sin().bfloat16() @ block.a.to(torch.bfloat16)).float()


def two_parameters_joined(block: FunctionBlock, x: Tensor) -> Tensor:
    return x.sin() @ torch.cat([block.a, block.b]).tanh()[:WIDTH]


BODIES = (magnitude, merged_adapter, scaled_by_a_constant, through_a_view_and_in_place, cast, two_parameters_joined)


def stack(body: Callable[..., Tensor]) -> Stack:
    return Stack(FunctionBlock(body, WIDTH), FunctionBlock(body, WIDTH))


def rows(device: str = "cpu") -> tuple[Tensor, ...]:
    return (torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1), requires_grad=True),)


def trained(body: Callable[..., Tensor], value: Any = None, entry: str = "apply") -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = stack(body) if value is None else install(stack(body), value, entry)
    return train(model, steps=2, make_input=rows)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if "rerun" not in entry])  # that keeps what is named
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_no_weight_is_kept(body: Callable[..., Tensor], entry: str) -> None:
    value = selective(policy(save(NAMED)))
    assert_same(trained(body), trained(body, value, entry))
    assert kept_bytes(stack(body), rows()) > WEIGHT_BYTES
    assert kept_bytes(install(stack(body), value, entry), rows()) < WEIGHT_BYTES


@pytest.mark.parametrize("entry", APPLY)
def test_rules_that_match_nothing_else_are_told_as_matching(entry: str) -> None:
    model = install(stack(magnitude), selective(policy(save("aten.abs")), strict=True), entry)
    for _ in range(3):
        model(*rows()).sum().backward()
    assert [rule["hits"] for rule in sac.report(model).to_dict()["kinds"][0]["rules"]] == [1]


@pytest.mark.parametrize("entry", ENTRIES)
def test_with_an_activation_in_it_a_value_is_kept(entry: str) -> None:
    def joined(block: FunctionBlock, x: Tensor) -> Tensor:
        return x.sin() @ (block.a + x[0]).tanh()

    value = selective(policy(save("aten.add")))
    assert_same(trained(joined), trained(joined, value, entry))
    assert kept_bytes(install(stack(joined), value, entry), rows()) > 2 * WEIGHT_BYTES


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_small_beside_the_parameter_is_kept(entry: str) -> None:
    def scaled(block: FunctionBlock, x: Tensor) -> Tensor:
        return x.sin() @ (block.a / block.a.abs().amax()).tanh()

    model = install(stack(scaled), selective(policy(save("scaling"))), entry)
    assert_same(trained(scaled), trained(scaled, selective(policy(save("scaling"))), entry))
    assert backward_ops(model, rows()).count("aten.amax") == 0


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_random_mask_over_a_parameter_is_no_weight(entry: str) -> None:
    def masked(block: FunctionBlock, x: Tensor) -> Tensor:
        return x.sin() @ (block.a * torch.rand_like(block.a)).tanh()

    value = selective(policy(save("random")))
    assert_same(trained(masked), trained(masked, value, entry))
    assert kept_bytes(install(stack(masked), value, entry), rows()) > 2 * WEIGHT_BYTES


ROUTED = under_each_engine({"full": FULL, "selective": selective(policy(save("matmul")))})


@pytest.mark.parametrize("value", ROUTED.values(), ids=ROUTED.keys())
def test_what_must_be_saved_is_saved(value: Any) -> None:
    def routed(block: FunctionBlock, x: Tensor) -> Tensor:
        return x.sin() @ block.a.sort(dim=0).values.tanh()

    assert_same(trained(routed), trained(routed, value))
    assert backward_ops(install(stack(routed), value), rows()).count("aten.sort") == 0


class TaggedWeight(nn.Parameter):
    """A parameter of a class of its own."""


EXCHANGED = {"full": "full", **under_each_engine({"selective": {"mode": "selective"}})}


@pytest.mark.parametrize("value", EXCHANGED.values(), ids=EXCHANGED.keys())
def test_data_of_parameters_may_be_exchanged_between_the_passes(value: Any) -> None:
    def gradients(one: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)))
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight = TaggedWeight(module.weight.detach())
        sac.apply(model, one)
        out = model(torch.linspace(-1, 1, 8).view(2, 4))
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        out.square().sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    assert all(map(torch.equal, gradients("none"), gradients(value)))


class CodedWeight(nn.Parameter):
    """A parameter whose values are a code: its table hangs on it as an attribute, two objects away."""


class CodedLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(256, (WIDTH, WIDTH), dtype=torch.uint8)
        self.weight = CodedWeight(codes, requires_grad=False)
        self.weight.state = SimpleNamespace(inner=SimpleNamespace(table=torch.linspace(-1, 1, 256)))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() @ self.weight.state.inner.table[self.weight.int()] + self.bias


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "rerun"])
def test_what_a_parameter_carries_belongs_to_it(engine: str) -> None:
    value = {
        "mode": "selective",
        "engine": engine,
        "policy": policy(save(["aten.index", "aten._to_copy"])),
        "blocks": ["*"],
    }
    torch.manual_seed(0)
    model = nn.Sequential(CodedLinear(), CodedLinear())
    assert kept_bytes(model, rows()) > 2 * WEIGHT_BYTES
    assert kept_bytes(sac.apply(model, value), rows()) < WEIGHT_BYTES
