"""Rules with `blocks`: which regions they hold for, and what is told where no region has such a path."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.errors import PolicyError, SacWarning
from sac.reporting import regions_by_group
from tests.support.blocks import ENGINES, llama_stack, policy, save, selective, tokens
from tests.support.model_zoo import tiny
from tests.support.training import assert_same, built

WHOLE = {"id": "whole", "blocks": "decoder.**", "module": "layer.0", "layers": ["0"], "do": "save"}


def saved_bytes(model: nn.Module) -> dict[str, int]:
    return {kind["regions"]: kind["saved_bytes"] for kind in sac.report(model).to_dict()["kinds"]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("rule", "saving"),
    [
        (save("matmul", blocks="encoder.block.*"), ["encoder.block.0", "encoder.block.1"]),
        (save("matmul", blocks="encoder.block.*", layers={"first": 1}), ["encoder.block.0"]),
        (save("matmul", blocks=["encoder.block.0", "decoder.**"], layers={"last": 1}), ["decoder.block.1"]),
        (
            save("matmul", blocks="encoder.**", module="layer.*.DenseReluDense.wo"),
            ["encoder.block.0", "encoder.block.1"],
        ),
        (WHOLE, ["decoder.block.0"]),
    ],
    ids=["a stack", "its first layer", "a list", "with a module", "a module as a whole"],
)
def test_a_rule_holds_for_the_stack_that_it_names(engine: str, rule: dict[str, Any], saving: list[str]) -> None:
    gradients = []
    for value in ({"mode": "selective", "policy": policy(rule), "engine": engine}, "none"):
        model, inputs = tiny("t5", dropout=0.1, use_cache=False)
        sac.apply(model, value)
        for _ in range(2):
            torch.manual_seed(0)
            model(**inputs).loss.backward()
        if value != "none":
            assert _saving(model) == saving
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(*gradients)


def _saving(model: nn.Module) -> list[str]:
    groups = regions_by_group(model)
    kinds = sac.report(model).to_dict()["kinds"]
    assert len(kinds) == len(groups)
    return [region.path for kind, (_, of) in zip(kinds, groups, strict=True) for region in of if kind["saved_bytes"]]


IDLE = {
    "a path": ({"blocks": ["layer.*", "tail"]}, "blocks", "blocks"),
    "a part of a block": ({"blocks": "blocks.0.mlp"}, "blocks", "blocks"),
    "a layer": ({"blocks": "blocks.0", "layers": ["1"]}, "blocks", "blocks and layers"),
    "a module": ({"blocks": "blocks.*", "module": "y"}, "module", "module and blocks"),
}


@pytest.mark.parametrize(("matchers", "key", "text"), IDLE.values(), ids=IDLE.keys())
def test_what_no_region_has_is_told(matchers: dict[str, Any], key: str, text: str) -> None:
    """An error if no rule is left, else a warning; nothing of a rule that is optional."""
    told = re.escape(f'activation_checkpointing.policy.rules[0].{key}: no region has the {text} of rule "rule-0"')
    with pytest.raises(PolicyError, match=told):
        sac.apply(built(llama_stack), selective(policy(save("matmul", **matchers))))
    with pytest.warns(SacWarning, match=told) as warned:
        sac.apply(built(llama_stack), selective(policy(save("matmul", **matchers), save("attention"))))
    assert [one.filename for one in warned] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sac.apply(built(llama_stack), selective(policy(save("matmul", **matchers, optional=True), save("attention"))))


def test_regions_within_blocks_have_longer_paths() -> None:
    value = {"mode": "selective", "policy": policy(save("matmul", blocks="blocks.*.mlp")), "granularity": "submodule"}
    model = sac.apply(built(llama_stack), value)
    model(*tokens()).sum().backward()
    assert {path for path, size in saved_bytes(model).items() if size} == {"blocks.0-1.mlp (x2)"}
