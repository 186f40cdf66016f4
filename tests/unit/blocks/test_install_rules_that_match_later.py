"""A rule that matches nothing in the first steps warns, or raises under `strict`; what it matches later is saved."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import RegionError, SacWarning
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective
from tests.support.training import built

WIDTH = 8
ENGINES = ("auto", "replay", "rerun")


def idle(index: int) -> str:
    where = f"activation_checkpointing.policy.rules[{index}]"
    return (
        f'{where}: rule "rule-{index}" matched no op in any region of the model\n'
        "    fix: `sac trace` lists the ops there are; mark the rule `optional: true` if it may match nothing"
    )


def product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin()


def skips_empty_batches(block: FunctionBlock, x: Tensor) -> Tensor:
    return product(block, x) if x.shape[0] else x


def grow(model: nn.Module, lengths: tuple[int, ...]) -> list[Tensor]:
    """Train one step for each length; return every loss and gradient."""
    torch.manual_seed(0)
    seen = []
    for length in lengths:
        x = torch.randn(length, WIDTH, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward()
        seen += [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    return seen


LARGE = save("matmul", shape=[">=16", WIDTH])
CASES: dict[str, Any] = {
    # name: (body, rules, lengths)
    "sequences that grow": (product, (LARGE,), (4, 8, 16, 32)),
    "two rules, sequences that grow": (product, (LARGE, save("aten.sin", shape=[">=32", WIDTH])), (4, 16, 32)),
    "an empty first batch": (product, (save("matmul"),), (0, 8, 8)),
    "an empty first batch that the block skips": (skips_empty_batches, (save("matmul"),), (0, 8, 8)),
    "a large rule and an empty first batch": (skips_empty_batches, (LARGE,), (0, 4, 16)),
}


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_and_later_matches_are_saved(name: str, engine: str) -> None:
    body, rules, lengths = CASES[name]
    build = lambda: Stack(FunctionBlock(body, WIDTH), FunctionBlock(body, WIDTH))  # noqa: E731
    model = sac.apply(built(build), selective(policy(*rules), engine=engine))
    seen, expected = grow(model, lengths), grow(built(build), lengths)
    assert len(seen) == len(expected)
    assert all(map(torch.equal, seen, expected))
    report = sac.report(model)
    assert report.zero_hit_rules == ()
    assert report.kinds[0].saved_bytes >= lengths[-1] * WIDTH * 4


def build_pair() -> Stack:
    return Stack(FunctionBlock(product, WIDTH), FunctionBlock(product, WIDTH))


def test_each_rule_warns_once() -> None:
    model = sac.apply(built(build_pair), selective(policy(LARGE, save("convolution"))))
    with pytest.warns(SacWarning) as told:
        grow(model, (4, 4, 16))
    assert [str(one.message) for one in told] == [idle(0), idle(1)]


def test_an_optional_rule_may_match_later_under_strict() -> None:
    value = selective(policy({**LARGE, "optional": True}), strict=True)
    model = sac.apply(built(build_pair), value)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        hits = []
        for lengths in ((4,), (16,)):
            grow(model, lengths)
            hits.append([use.hits for kind in sac.report(model).kinds for use in kind.rules])
    assert [str(one.message) for one in told] == []
    assert hits == [[0], [1]]


def test_strict_raises_in_the_first_step() -> None:
    model = sac.apply(built(build_pair), selective(policy(LARGE), strict=True))
    with pytest.raises(RegionError) as caught:
        grow(model, (4, 16))
    assert str(caught.value) == idle(0)
