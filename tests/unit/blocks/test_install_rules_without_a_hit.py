"""A rule that matches nothing in the first steps warns, or raises under `strict`; rules of a shipped policy do not."""

from __future__ import annotations

import copy
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
    for index, one in enumerate(told):
        assert f'rule "rule-{index}" matched no op in any region of the model\n' in str(one.message)
    assert len(told) == 2


def test_strict_raises_in_the_first_step() -> None:
    model = sac.apply(built(build_pair), selective(policy(LARGE), strict=True))
    with pytest.raises(RegionError, match=r'rules\[0\]: rule "rule-0" matched no op .*\n.*fix: `sac trace` lists'):
        grow(model, (4, 16))


# Shipped policies: at most the choice of policy is reported

CONVOLUTIONS = (nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
NO_PRODUCTS = (nn.BatchNorm2d(4), nn.Sigmoid(), nn.BatchNorm2d(4))


def said(parts: tuple[nn.Module, ...], **value: Any) -> list[str]:
    """The warnings of a step of two blocks of these parts, or the error."""
    model = nn.Sequential(*(copy.deepcopy(nn.Sequential(*parts)) for _ in range(2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sac.apply(model, {"mode": "selective", "blocks": ["*"], **value})
            model(torch.ones(2, 4, 8, 8)).sum().backward()
        except sac.SacError as error:
            return [str(error)]
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("strict", [True, False])
def test_rules_of_shipped_policies_are_not_reported_but_for_the_choice_of_policy(strict: bool) -> None:
    assert said(CONVOLUTIONS, strict=strict) == []
    for name in ("general", "llama"):
        (text,) = said(NO_PRODUCTS, policy=name, strict=strict)
        assert text.startswith(f"policy {name}: no rule of it matches anything in this model\n    legal: ")


def test_rules_that_the_user_adds_are_reported_and_those_that_they_extend_are_not() -> None:
    (text,) = said(CONVOLUTIONS, policy=policy(save("attention"), extends="general"))
    assert 'rule "rule-0" matched no op in any region of the model' in text
    assert "matmuls" not in text
