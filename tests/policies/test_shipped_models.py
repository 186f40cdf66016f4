"""Every shipped policy on a tiny real model of every family that it names: exact, smaller, and all of it in use."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.config import family_policy
from sac.policy.load import load_policy
from tests.policies.families import FAMILIES, STRANGERS, Family
from tests.policies.training import kept_bytes, pair, train, unequal

# Gemma 3n and 4 are told that their regions are not whole layers.
pytestmark = pytest.mark.filterwarnings("ignore:layers of .* share keys and values:sac.errors.SacWarning")

QUICK = (
    "llama-llama",
    "phi3-phi3",
    "llama-Llama3Model",
    "gemma-gemma2",
    "gemma-gemma3_text",
    "gemma-gemma3n_text",
    "gpt2-gpt2",
    "gpt2-gpt_neox",
    "bert-bert",
    "bert-albert",
    "t5-t5",
    "t5-bart",
    "moe-qwen3_moe",
    "deepseek_v3-deepseek_v3",
    "vit-vit",
    "vit-dinov2",
    "vit-DiT",
    "resnet-resnet",
    "resnet-rt_detr",
    "mamba-mamba",
    "mamba-bamba",
    "mamba-qwen3_next",
    "general-llama",
    "general-mixtral",
)
CASES = [
    pytest.param(family, id=str(family), marks=() if str(family) in QUICK else pytest.mark.slow)
    for family in (*FAMILIES, *STRANGERS)
]


def chosen(family: Family) -> dict[str, object]:
    """Return the config value that a user would write, strict; `general` has to be named where a family has its own."""
    named = {"policy": "general"} if family.policy == "general" else {}
    return {"mode": "selective", "strict": True, **named}


def saved_bytes(model: nn.Module) -> int:
    return sum(region.region.stats.saved_bytes for region in regions_of(model))


def test_quick_families_exist() -> None:
    assert set(QUICK) <= {str(family) for family in (*FAMILIES, *STRANGERS)}


@cache
def rules_hit(family: Family) -> frozenset[str]:
    """The rules that training the model hits; its gradients are those of the model alone, and less is kept."""
    plain, ours, inputs = pair(family, chosen(family))
    full = sac.apply(copy.deepcopy(plain), "full")
    trained = train(ours, inputs)
    assert unequal(train(plain, inputs), trained) == []
    assert not needed_rules(family) & set(sac.report(ours).zero_hit_rules)
    train(full, inputs)
    holds_kept_bytes(family, plain, ours, full, inputs)
    return frozenset(trained.hits)


def needed_rules(family: Family) -> set[str]:
    return {rule.id for rule in load_policy(family.policy).rules if not rule.optional}


@pytest.mark.parametrize("family", CASES)
def test_gradients_rules_that_are_hit_and_kept_bytes(family: Family) -> None:
    """Gradients are those of the model alone, every rule is hit, less is kept, and the report says how much."""
    assert needed_rules(family) <= rules_hit(family)


def holds_kept_bytes(
    family: Family, plain: nn.Module, ours: nn.Module, full: nn.Module, inputs: dict[str, Any]
) -> None:
    """What trained models keep is less than without, and what the report says."""
    without, kept, least = (kept_bytes(model, inputs) for model in (plain, ours, full))
    assert least < kept < without
    # ALBERT's one block runs once per layer, and the report is of the last call; Gemma 3n and 4 share keys in full too.
    if family.name not in ("albert", "gemma3n_text", "gemma4_text"):
        small = kept - least - (saved_bytes(ours) - saved_bytes(full))  # copies of scalars that the tape holds
        assert 0 <= small <= 64


@pytest.mark.parametrize("family", [pytest.param(f, id=str(f)) for f in FAMILIES if str(f) in QUICK])
def test_selective_finds_the_policy_of_the_family(family: Family) -> None:
    model, _ = family.build(0.0)
    assert family_policy(model).name == family.policy


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted({family.policy for family in FAMILIES}))
def test_every_rule_of_the_file_is_hit_by_one_of_its_families(policy: str) -> None:
    """An optional rule that no family hits would say nothing; with dropout, attention on CPU is not fused."""
    hits = set[str]().union(*(rules_hit(family) for family in FAMILIES if family.policy == policy))
    assert {rule.id for rule in load_policy(policy).rules if rule.origin == policy} - hits == set()
