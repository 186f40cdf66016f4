"""Every shipped policy on a tiny real model of every family that it names: exact, smaller, and all of it in use."""

from __future__ import annotations

import copy
from functools import cache

import pytest
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from sac.policy.load import load_policy
from tests.policies.families import FAMILIES, STRANGERS, Family
from tests.policies.training import DROPOUT, kept_bytes, train, unequal

# Gemma 3n and 4 are told that their regions are not whole layers.
pytestmark = pytest.mark.filterwarnings("ignore:layers of .* share keys and values:sac.errors.SacWarning")

QUICK = {  # these also under full checkpointing
    "llama": ("llama", "Llama3Model"),
    "phi3": ("phi3",),
    "gemma": ("gemma2", "gemma3_text", "gemma3n_text"),
    "gpt2": ("gpt2", "gpt_neox"),
    "bert": ("bert", "albert"),
    "t5": ("t5", "bart"),
    "moe": ("qwen3_moe",),
    "deepseek_v3": ("deepseek_v3",),
    "vit": ("vit", "dinov2", "DiT"),
    "resnet": ("resnet", "rt_detr"),
    "mamba": ("mamba", "bamba", "qwen3_next"),
    "general": ("llama", "mixtral"),
}


def is_quick(family: Family) -> bool:
    return family.name in QUICK.get(family.policy, ())


CASES = [
    pytest.param(family, id=str(family), marks=() if is_quick(family) else pytest.mark.slow)
    for family in (*FAMILIES, *STRANGERS)
]


def saved_bytes(model: nn.Module) -> int:
    return sum(region.region.stats.saved_bytes for region in regions_of(model))


@cache
def rules_hit(family: Family) -> frozenset[str]:
    """The rules that training the model hits; its gradients are those of the model alone, and less is kept.

    The oracle has its cache off, as training is meant to be: GPT-2 and T5 round differently with it on, since the cache
    lays keys and values out anew.
    """
    plain, inputs = family.build(DROPOUT)
    turn_off_cache(plain)
    # The policy is that of the family without its name; `general` has to be named where a family has its own.
    named = {"policy": "general"} if family.policy == "general" else {}
    ours = sac.apply(copy.deepcopy(plain), {"mode": "selective", "strict": True, **named})
    full = sac.apply(copy.deepcopy(plain), "full") if is_quick(family) else None
    reference, trained = train(plain, inputs), train(ours, inputs)
    assert unequal(reference, trained) == []
    assert full is None or unequal(reference, train(full, inputs)) == []
    assert not needed_rules(family) & set(sac.report(ours).zero_hit_rules)
    without, kept = (kept_bytes(model, inputs) for model in (plain, ours))
    assert kept < without
    if full is None:
        return frozenset(trained.hits)
    least = kept_bytes(full, inputs)
    assert least < kept
    # ALBERT's one block runs once per layer, and the report is of the last call; Gemma 3n shares keys in full too.
    if family.name not in ("albert", "gemma3n_text"):
        small = kept - least - (saved_bytes(ours) - saved_bytes(full))  # copies of scalars that the tape holds
        assert 0 <= small <= 64
    return frozenset(trained.hits)


@pytest.mark.parametrize("family", CASES)
def test_gradients_rules_that_are_hit_and_kept_bytes(family: Family) -> None:
    """Gradients are those of the model alone, every rule is hit, less is kept, and the report says how much."""
    assert needed_rules(family) <= rules_hit(family)


def needed_rules(family: Family) -> set[str]:
    return {rule.id for rule in load_policy(family.policy).rules if not rule.optional}


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted({family.policy for family in FAMILIES}))
def test_every_rule_of_the_file_is_hit_by_one_of_its_families(policy: str) -> None:
    """An optional rule that no family hits would say nothing; with dropout, attention on CPU is not fused."""
    hits = set[str]().union(*(rules_hit(family) for family in FAMILIES if family.policy == policy))
    assert {rule.id for rule in load_policy(policy).rules if rule.origin == policy} - hits == set()
