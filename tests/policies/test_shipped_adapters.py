"""The policy for adapters: chosen where most of a block is frozen; gradients are equal, half of the bytes is kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.blocks.kv_cache import turn_off_cache
from tests.policies.training import kept_bytes, train, unequal
from tests.support.model_zoo import tiny

peft = pytest.importorskip("peft", reason="tests of adapters need peft")

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
CHOSEN = "policy adapters, since most parameters of the blocks are frozen; name a policy to use another"


def adapted(family: str, dropout: float = 0.0) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model in bfloat16 with LoRA on its projections, in float32 as PEFT keeps adapters."""
    model, inputs = tiny(family, **SIZES)
    turn_off_cache(model)
    config = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(1)
    model = peft.get_peft_model(model.bfloat16(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.train(), inputs


def policies_in(model: nn.Module) -> set[str]:
    return {bound.rule.origin for one in regions_of(model) for bound in one.region.group.table.rules}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_chosen_for_adapters_with_equal_gradients_and_half_of_the_bytes(family: str, dropout: float) -> None:
    plain, inputs = adapted(family, dropout)
    ours = sac.apply(copy.deepcopy(plain), "selective")
    assert CHOSEN in sac.report(ours).notes
    assert unequal(train(plain, inputs), train(ours, inputs)) == []
    assert kept_bytes(ours, inputs) <= kept_bytes(plain, inputs) / 2


def test_a_named_policy_is_used_instead() -> None:
    model, _ = adapted("llama")
    sac.apply(model, {"mode": "selective", "policy": "llama"})
    assert "adapters" not in policies_in(model)
    assert sac.report(model).notes == ()


@pytest.mark.parametrize("trained", [".", "lm_head"], ids=["everything", "nothing in the blocks"])
def test_not_chosen_where_blocks_are_trained_or_frozen_as_a_whole(trained: str) -> None:
    model, _ = tiny("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    sac.apply(model, "selective")
    assert "adapters" not in policies_in(model)
