"""A shipped policy does not warn about its own rules: at most the choice of policy is reported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import PolicyError, RegionError, SacError
from sac.policy.load import is_shipped, shipped_directory, shipped_policies
from sac.policy.model import SourceLocation

CHOICE = (
    "no rule of it matches anything in this model\n"
    f"    legal: {', '.join(shipped_policies())}\n"
    "    fix: `sac trace` lists the ops there are; choose another policy, or write one for this model"
)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.convolution = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.convolution(torch.relu(self.norm(x)))


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(torch.sin(self.norm(x)))


def said(block: type[nn.Module], value: Any) -> list[str]:
    """The warnings of a step, or the error."""
    model = nn.Sequential(*(block() for _ in range(2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            sac.apply(model, value)
            model(torch.ones(2, 4, 8, 8)).sum().backward()
        except (RegionError, PolicyError) as error:
            return [str(error)]
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


@pytest.mark.parametrize("strict", [True, False])
def test_a_rule_of_general_that_matches_nothing_is_not_reported(strict: bool) -> None:
    assert said(Convolution, {"mode": "selective", "strict": strict}) == []


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["general", "llama"])
def test_a_policy_of_which_nothing_matches_is_a_matter_of_choice(name: str, strict: bool) -> None:
    value = {"mode": "selective", "policy": name, "strict": strict}
    assert said(Pointwise, value) == [f"policy {name}: {CHOICE}"]


def test_rules_that_the_user_adds_are_reported_and_those_that_they_extend_are_not() -> None:
    mine = {
        "schema": "sac/v1",
        "name": "mine",
        "extends": "general",
        "rules": [{"id": "mine", "ops": "attention", "do": "save"}],
    }
    (text,) = said(Convolution, {"mode": "selective", "policy": mine})
    assert 'rule "mine" matched no op in any region of the model' in text
    assert "matmuls" not in text


@pytest.mark.parametrize("name", shipped_policies())
def test_every_rule_of_a_shipped_policy_is_known_as_ours(name: str) -> None:
    assert all(is_shipped(rule.location) for rule in sac.load_policy(name).rules)


def test_a_file_elsewhere_and_a_value_are_the_users() -> None:
    assert not is_shipped(SourceLocation("policy.rules[0]"))
    assert not is_shipped(SourceLocation(str(shipped_directory().parent / "general.yaml"), 1, 1))
    assert issubclass(PolicyError, SacError)
