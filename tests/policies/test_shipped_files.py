"""The shipped policies as files: complete, told apart by their models, and the same after a round trip."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.engine.table import resolve_policy
from sac.policy.load import load_policy, shipped_policies
from tests.policies.families import FAMILIES

FAMILY_POLICIES = sorted({family.policy for family in FAMILIES})
EXPECTED = sorted([*FAMILY_POLICIES, "adapters", "general"])


def test_these_policies_are_shipped() -> None:
    assert len(EXPECTED) == 14
    assert list(shipped_policies()) == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_policy_is_named_as_its_file_and_can_be_used_and_written_out(name: str, tmp_path: Path) -> None:
    policy = load_policy(name)
    assert policy.name == name
    assert [bound.rule for bound in resolve_policy(policy).rules] == list(policy.rules)
    assert set(resolve_policy(policy).missing) <= {rule.id for rule in policy.rules}
    policy.save(tmp_path / "copy.yaml")
    assert load_policy(tmp_path / "copy.yaml") == policy


@pytest.mark.parametrize("name", [*FAMILY_POLICIES, "adapters"])
def test_family_policies_stand_on_general(name: str) -> None:
    policy = load_policy(name)
    assert policy.extends == (*{"mixtral": ("moe",), "phi3": ("llama",)}.get(name, ()), "general")
    kept_everywhere = {"attention", "routing", "collectives", "host-copies", "norm-statistics"}
    assert kept_everywhere <= {rule.id for rule in policy.rules if rule.origin == "general"}
    assert "alternate" not in {rule.do for rule in policy.rules if rule.id in ("matmuls", "experts")}


def test_no_model_has_two_policies() -> None:
    served = [model.lower() for name in EXPECTED for model in load_policy(name).models]
    assert len(served) == len(set(served))
    assert not [model for model in served if set(model) & set("*?[")]  # names in full: no glob is ever too wide


def test_every_model_that_a_policy_names_is_tested() -> None:
    named = {(name, model) for name in EXPECTED for model in load_policy(name).models}
    assert named == {(family.policy, family.name) for family in FAMILIES}


def test_models_of_a_family_say_its_name() -> None:
    """A family of these tests is a model that says the very name which the policy looks for."""
    for family in FAMILIES:
        model, _ = family.build(0.0)
        config = getattr(model, "config", None)
        text = getattr(config, "text_config", None)
        said = {getattr(config, "model_type", ""), getattr(text, "model_type", ""), type(model).__name__}
        assert family.name in said, f"{family}: {said}"
