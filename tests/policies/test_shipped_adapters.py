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
transformers = pytest.importorskip("transformers", reason="tests of adapters need transformers")

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


REAL = {  # the models of 8B parameters
    "Llama": {"intermediate_size": 14336, "vocab_size": 128256},
    "Qwen3": {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128},
}
TARGETS = {"all-linear": "31%", ("q_proj", "v_proj"): "51%"}  # with bytes, of those that no checkpointing keeps


@pytest.mark.parametrize("targets", TARGETS, ids=["all", "q and v"])
@pytest.mark.parametrize("family", REAL)
def test_recomputes_at_most_a_tenth_longer_than_a_plan_of_as_many_bytes(family: str, targets: Any) -> None:
    """One layer of a model of real size without data, priced for an H100; its input needs a gradient, as in others."""
    sizes = {"hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **REAL[family])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
        tokens = torch.zeros(1, 2048, dtype=torch.long)
    model.enable_input_require_grads()
    figures = sac.plan(model, {"input_ids": tokens, "labels": tokens}, TARGETS[targets], device="h100").figures
    rows = {row.label: row for row in figures.rows}
    assert rows["selective"].peak <= figures.budget
    assert rows["selective"].seconds <= 1.10 * rows["plan"].seconds
