"""Blocks of tiny Hugging Face models of many families."""

from __future__ import annotations

from collections import Counter

import pytest

from sac.blocks.find import find_blocks, submodules
from tests.support.model_zoo import FAMILIES, tiny

DECODER = "model.layers"
STACKS: list[tuple[str, dict[str, int]]] = [
    # families, and the stacks of each with the number of their blocks
    ("llama mistral qwen2 qwen3 smollm3 phi3 gemma gemma2 gemma3", {DECODER: 2}),
    ("mixtral qwen3_moe bamba falcon_h1 qwen3_next", {DECODER: 2}),
    ("deepseek_v3", {DECODER: 3}),
    ("gemma3n gemma4 jamba zamba", {DECODER: 4}),
    ("gpt2 bloom falcon", {"transformer.h": 2}),
    ("mamba mamba2", {"backbone.layers": 2}),
    ("gpt_neox", {"gpt_neox.layers": 2}),
    ("opt", {"model.decoder.layers": 2}),
    ("bert", {"bert.encoder.layer": 2}),
    ("roberta", {"roberta.encoder.layer": 2}),
    ("distilbert", {"distilbert.transformer.layer": 2}),
    ("albert", {"albert.encoder.albert_layer_groups.0.albert_layers": 1}),
    ("t5", {"encoder.block": 2, "decoder.block": 2}),
    ("bart whisper", {"model.encoder.layers": 2, "model.decoder.layers": 2}),
    ("vit", {"vit.layers": 2}),
    ("dinov2", {"dinov2.encoder.layer": 2}),
    ("siglip", {"vision_model.encoder.layers": 2}),
    ("clip", {"text_model.encoder.layers": 2, "vision_model.encoder.layers": 2}),
    ("swin", {"swin.encoder.layers.0.blocks": 2, "swin.encoder.layers.1.blocks": 2}),
    ("llava", {"model.vision_tower.encoder.layers": 2, "model.language_model.layers": 2}),
    ("qwen2_vl", {"model.visual.blocks": 2, "model.language_model.layers": 2}),
]
EXPECTED = {family: stacks for families, stacks in STACKS for family in families.split()}


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family(family: str) -> None:
    model, _ = tiny(family)
    blocks = find_blocks(model)
    assert Counter(block.stack for block in blocks) == EXPECTED[family]
    for block in blocks:
        assert block.path == f"{block.stack}.{block.layer}"
        assert block.module is model.get_submodule(block.path)
        assert block.stack_size == len(model.get_submodule(block.stack))


@pytest.mark.parametrize("family", FAMILIES)
def test_submodules_run_in_forward_and_lie_in_blocks(family: str) -> None:
    model, inputs = tiny(family)
    blocks = find_blocks(model)
    parts = submodules(find_blocks(model))
    called: set[str] = set()
    for part in parts:
        assert any(part.path.startswith(block.path + ".") and part.layer == block.layer for block in blocks)
        part.module.register_forward_hook(lambda *_, path=part.path: called.add(path))
    model(**inputs)
    silent = {path for path in {part.path for part in parts} - called if not path.endswith(".altup")}
    assert silent == set()  # Gemma 3n calls other methods of its altup than forward
