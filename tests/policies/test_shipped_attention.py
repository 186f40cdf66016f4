"""Attention that is no op of its own: eager, or with dropout on CPU. The narrow values are kept, the scores are not."""

from __future__ import annotations

from typing import Any

import pytest

import sac
from sac.blocks.kv_cache import turn_off_cache
from sac.reporting import decisions_of
from tests.policies.families import loss_of
from tests.policies.training import DROPOUT, Trained, train, unequal
from tests.support.model_zoo import tiny

EAGER = ("llama", "phi3", "gemma2", "gemma3", "gpt2", "gpt_neox", "opt", "bert", "t5", "bart", "mixtral", "vit")
DROPPING = ("gpt2", "opt", "bert", "roberta", "t5", "bart")


def trained(family: str, value: Any, **changes: Any) -> Trained:
    model, inputs = tiny(family, dropout=DROPOUT, **changes)
    turn_off_cache(model)
    return train(sac.apply(model, value), inputs)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {"attn_implementation": "eager"}) for family in EAGER), *((family, {}) for family in DROPPING)],
)
def test_unfused_attention_keeps_the_values_but_not_the_scores(family: str, changes: dict[str, Any]) -> None:
    """In these families only attention has batched products."""
    ours = trained(family, "selective", **changes)
    products = {(row.call, row.decision) for row in decisions_of(ours.model) if row.op == "aten.bmm.default"}
    assert products == {(0, "recompute"), (1, "save")}
    assert "attention" not in ours.hits
    assert unequal(trained(family, "none", **changes), ours) == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bart", "vit", "qwen3_moe"])
def test_fused_attention_is_kept_and_not_run_again(family: str) -> None:
    model, inputs = tiny(family)
    sac.apply(model, "selective")
    loss_of(model, inputs).backward()
    fused = [row for row in decisions_of(model) if "scaled_dot_product" in row.op]
    assert fused
    assert {(row.decision, row.rule) for row in fused} == {("save", "attention")}
