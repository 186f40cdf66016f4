"""Modules saved as a whole under `torch.compile`, and in Hugging Face models; see also test_data_parallel."""

from __future__ import annotations

from typing import Any

import pytest

import sac
from tests.stacks.compiled import per_block, plain, whole
from tests.stacks.composition import differences, train
from tests.support.model_zoo import tiny

PARTS = {"schema": "sac/v1", "name": "parts", "rules": [{"id": "parts", "module": "{self_attn,mlp}", "do": "save"}]}


def test_eager() -> None:
    assert differences(plain({"mode": "selective", "policy": PARTS}), plain("none")) == []


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [whole, per_block], ids=lambda one: one.__name__)
def test_compiled(compiled: Any) -> None:
    reference, full = compiled("none", backend="aot_eager"), compiled("full", backend="aot_eager")
    ours = compiled({"mode": "selective", "policy": PARTS}, backend="aot_eager")
    assert differences(ours, reference) == []
    assert reference.flops == ours.flops < full.flops


@pytest.mark.parametrize(
    ("family", "module"),
    [
        ("llama", "self_attn"),  # returns a tuple
        ("qwen3_moe", "mlp"),
        ("mixtral", "mlp.experts"),
        ("gpt2", "{attn,mlp}"),
        ("bert", "attention"),
    ],
)
def test_hugging_face(family: str, module: str) -> None:
    pytest.importorskip("transformers", reason="models of Hugging Face")
    rule = {"id": "parts", "module": module, "do": "save"}
    value = {"mode": "selective", "policy": {"schema": "sac/v1", "name": "parts", "rules": [rule]}}

    def trained(mode: Any) -> Any:
        model, batch = tiny(family)
        found = train(sac.apply(model, mode), lambda model: model(**batch).loss)
        if mode is value:
            assert all(kind.rules[0].hits for kind in sac.report(model).kinds)
        return found

    reference, ours, full = trained("none"), trained(value), trained("full")
    assert differences(ours, reference) == []
    assert reference.flops <= ours.flops < full.flops
    assert full.kept_bytes < ours.kept_bytes
