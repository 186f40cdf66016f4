"""Modules saved as a whole under DDP, FSDP and `torch.compile`, with scattered inputs, and in Hugging Face models."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import sac
from tests.stacks.compiled import per_block, plain, whole
from tests.stacks.composes import assert_same_gradients, outcomes
from tests.stacks.composition import differences, forward_done, outcome
from tests.support.model_zoo import tiny

MODE = "whole modules"
PARTS = {"schema": "sac/v1", "name": "parts", "rules": [{"id": "parts", "module": "{self_attn,mlp}", "do": "save"}]}


@pytest.mark.parametrize(
    ("stack", "options"),
    [
        ("ddp", {"micro_batches": 2}),
        ("ddp", {"static_graph": True, "order": "after"}),
        ("fsdp1", {}),
        ("fsdp2", {"bf16": True, "prefetch": True}),
        ("fsdp2", {"order": "after", "micro_batches": 2}),
        ("fsdp2", {"frozen": ("self_attn",)}),
    ],
    ids=str,
)
def test_data_parallel(stack: str, options: dict[str, Any]) -> None:
    assert_same_gradients(stack, MODE, **options)
    none, full = outcomes(stack, "none", **options)[0], outcomes(stack, "torch full", **options)[0]
    ours = outcomes(stack, MODE, **options)[0]
    assert ours.flops == none.flops < full.flops, "all products are in saved modules"
    if "bf16" not in options:  # activations of that size are below the random states of regions
        assert full.kept_bytes < ours.kept_bytes < none.kept_bytes
    assert all(count <= full.collectives.get(name, 0) for name, count in ours.collectives.items())


@pytest.mark.parametrize(
    "options", [{"micro_batches": 2, "reshard_in_between": False}, {"order": "after", "bf16": True}], ids=str
)
def test_a_sharded_unit_that_is_saved(options: dict[str, Any]) -> None:
    options = {"block": "experts", "nested": True, **options}
    assert_same_gradients("fsdp2", MODE, **options)
    none, full = outcomes("fsdp2", "none", **options)[0], outcomes("fsdp2", "torch full", **options)[0]
    ours = outcomes("fsdp2", MODE, **options)[0]
    assert none.flops < ours.flops <= full.flops  # a region with a unit of FSDP inside runs again as Python
    # FSDP's own hooks around the experts gather their weights in recomputation, as under any checkpointing.
    assert ours.collectives == full.collectives


def test_scattered_inputs() -> None:
    options = {"same_data": True}
    assert_same_gradients("ddp", "whole modules, scattered", **options)
    none, ours = outcomes("ddp", "none", **options)[0], outcomes("ddp", "whole modules, scattered", **options)[0]
    whole_inputs = outcomes("ddp", MODE, **options)[0]
    assert ours.flops == none.flops
    assert ours.kept_bytes < whole_inputs.kept_bytes


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
        sac.apply(model, mode)

        def step() -> Tensor:
            loss = model(**batch).loss
            forward_done()
            loss.backward()
            return loss

        found = outcome(step, model)
        if mode is value:
            assert all(kind.rules[0].hits for kind in sac.report(model).kinds)
        return found

    reference, ours, full = trained("none"), trained(value), trained("full")
    assert differences(ours, reference) == []
    assert reference.flops <= ours.flops < full.flops
    assert full.kept_bytes < ours.kept_bytes
