"""Attention that is no op of its own: eager, or with dropout on CPU. The narrow values are kept, the scores are not."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import sac
from sac.reporting import decisions_of
from tests.policies.families import loss_of
from tests.policies.training import DROPOUT, Trained, train, turn_off_cache, unequal
from tests.support.model_zoo import tiny

EAGER = ("llama", "phi3", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "bert", "t5", "bart", "mixtral", "vit")


def trained(family: str, value: Any, **changes: Any) -> Trained:
    model, inputs = tiny(family, dropout=DROPOUT, **changes)
    turn_off_cache(model)
    return train(sac.apply(model, value), inputs)


def products_of_attention(model: nn.Module) -> set[tuple[int, str]]:
    """Return call and decision of the batched products; in these families only attention has any."""
    return {(row.call, row.decision) for row in decisions_of(model) if row.op == "aten.bmm.default"}


@pytest.mark.parametrize("family", EAGER)
def test_eager_attention_is_exact_and_keeps_the_values_but_not_the_scores(family: str) -> None:
    ours = trained(family, "selective", attn_implementation="eager")
    assert unequal(trained(family, "none", attn_implementation="eager"), ours) == []
    assert products_of_attention(ours.model) == {(0, "recompute"), (1, "save")}


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "roberta", "t5", "bart"])
def test_attention_with_dropout_keeps_the_values_but_not_the_scores(family: str) -> None:
    ours = trained(family, "selective")
    assert products_of_attention(ours.model) == {(0, "recompute"), (1, "save")}
    assert "attention" not in ours.hits


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart", "vit", "qwen3_moe"])
def test_fused_attention_is_kept_and_not_run_again(family: str) -> None:
    model, inputs = tiny(family)
    sac.apply(model, "selective")
    loss_of(model, inputs).backward()
    fused = [row for row in decisions_of(model) if "scaled_dot_product" in row.op]
    assert fused
    assert {(row.decision, row.rule) for row in fused} == {("save", "attention")}
