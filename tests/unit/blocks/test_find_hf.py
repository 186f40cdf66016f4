"""Blocks of tiny Hugging Face models of many families."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from sac.blocks.find import Block, divided, find_blocks, submodules
from sac.policy.patterns import PathPattern
from tests.support.model_zoo import FAMILIES, tiny

DECODER = "model.layers"
# family -> {(stack, block class): number of blocks}
EXPECTED: dict[str, dict[tuple[str, str], int]] = {
    "llama": {(DECODER, "LlamaDecoderLayer"): 2},
    "mistral": {(DECODER, "MistralDecoderLayer"): 2},
    "qwen2": {(DECODER, "Qwen2DecoderLayer"): 2},
    "qwen3": {(DECODER, "Qwen3DecoderLayer"): 2},
    "smollm3": {(DECODER, "SmolLM3DecoderLayer"): 2},
    "phi3": {(DECODER, "Phi3DecoderLayer"): 2},
    "gemma": {(DECODER, "GemmaDecoderLayer"): 2},
    "gemma2": {(DECODER, "Gemma2DecoderLayer"): 2},
    "gemma3": {(DECODER, "Gemma3DecoderLayer"): 2},
    "gemma3n": {(DECODER, "Gemma3nTextDecoderLayer"): 4},
    "gemma4": {(DECODER, "Gemma4TextDecoderLayer"): 4},
    "gpt2": {("transformer.h", "GPT2Block"): 2},
    "gpt_neox": {("gpt_neox.layers", "GPTNeoXLayer"): 2},
    "opt": {("model.decoder.layers", "OPTDecoderLayer"): 2},
    "bloom": {("transformer.h", "BloomBlock"): 2},
    "falcon": {("transformer.h", "FalconDecoderLayer"): 2},
    "mixtral": {(DECODER, "MixtralDecoderLayer"): 2},
    "qwen3_moe": {(DECODER, "Qwen3MoeDecoderLayer"): 2},
    "deepseek_v3": {(DECODER, "DeepseekV3DecoderLayer"): 3},
    "mamba": {("backbone.layers", "MambaBlock"): 2},
    "mamba2": {("backbone.layers", "Mamba2Block"): 2},
    "jamba": {
        (DECODER, "JambaMambaDecoderLayer"): 2,
        (DECODER, "JambaAttentionDecoderLayer"): 2,
    },
    "zamba": {(DECODER, "ZambaMambaDecoderLayer"): 2, (DECODER, "ZambaHybridLayer"): 2},
    "bamba": {(DECODER, "BambaDecoderLayer"): 2},
    "falcon_h1": {(DECODER, "FalconH1DecoderLayer"): 2},
    "qwen3_next": {(DECODER, "Qwen3NextDecoderLayer"): 2},
    "bert": {("bert.encoder.layer", "BertLayer"): 2},
    "roberta": {("roberta.encoder.layer", "RobertaLayer"): 2},
    "distilbert": {("distilbert.transformer.layer", "TransformerBlock"): 2},
    "albert": {("albert.encoder.albert_layer_groups.0.albert_layers", "AlbertLayer"): 1},
    "t5": {("encoder.block", "T5Block"): 2, ("decoder.block", "T5Block"): 2},
    "bart": {
        ("model.encoder.layers", "BartEncoderLayer"): 2,
        ("model.decoder.layers", "BartDecoderLayer"): 2,
    },
    "whisper": {
        ("model.encoder.layers", "WhisperEncoderLayer"): 2,
        ("model.decoder.layers", "WhisperDecoderLayer"): 2,
    },
    "vit": {("vit.layers", "ViTLayer"): 2},
    "dinov2": {("dinov2.encoder.layer", "Dinov2Layer"): 2},
    "siglip": {("vision_model.encoder.layers", "SiglipEncoderLayer"): 2},
    "clip": {
        ("text_model.encoder.layers", "CLIPEncoderLayer"): 2,
        ("vision_model.encoder.layers", "CLIPEncoderLayer"): 2,
    },
    "swin": {
        ("swin.encoder.layers.0.blocks", "SwinLayer"): 2,
        ("swin.encoder.layers.1.blocks", "SwinLayer"): 2,
    },
    "llava": {
        ("model.vision_tower.encoder.layers", "CLIPEncoderLayer"): 2,
        ("model.language_model.layers", "LlamaDecoderLayer"): 2,
    },
    "qwen2_vl": {
        ("model.visual.blocks", "Qwen2VLVisionBlock"): 2,
        ("model.language_model.layers", "Qwen2VLDecoderLayer"): 2,
    },
}


WITHOUT_DROPOUT = {"mamba", "mamba2"}


def stacks(blocks: tuple[Block, ...]) -> dict[tuple[str, str], int]:
    return dict(Counter((block.stack, type(block.module).__name__) for block in blocks))


def test_every_family_is_expected() -> None:
    assert set(EXPECTED) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_tiny_and_have_a_loss_that_trains(family: str) -> None:
    model, inputs = tiny(family)
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) <= 200_000
    model(**inputs).loss.backward()
    for block in find_blocks(model):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in block.module.parameters()), block.path


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_is_off_or_on_as_asked(family: str) -> None:
    _, inputs = tiny(family)
    off = [tiny(family)[0](**inputs)[1] for _ in range(2)]  # the logits
    assert torch.equal(*off)
    on = tiny(family, dropout=0.5)[0](**inputs)[1]
    assert torch.equal(on, off[0]) == (family in WITHOUT_DROPOUT)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_every_family(family: str) -> None:
    model, _ = tiny(family)
    blocks = find_blocks(model)
    assert stacks(blocks) == EXPECTED[family]
    for block in blocks:
        assert block.path == f"{block.stack}.{block.layer}"
        assert block.module is model.get_submodule(block.path)
        assert block.stack_size == len(model.get_submodule(block.stack))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_cover_what_hugging_face_would_checkpoint(family: str) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    model, _ = tiny(family)
    inside = {id(module) for block in find_blocks(model) for module in block.module.modules()}
    left = {
        type(m).__name__ for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and id(m) not in inside
    }
    assert left == ({"SwinStage"} if family == "swin" else set())  # its layers are the blocks


@pytest.mark.parametrize("family", FAMILIES)
def test_submodules_run_in_forward_and_lie_in_blocks(family: str) -> None:
    model, inputs = tiny(family)
    blocks = find_blocks(model)
    parts = divided(find_blocks(model), submodules)
    called: set[str] = set()
    for part in parts:
        assert any(part.path.startswith(block.path + ".") and part.layer == block.layer for block in blocks)
        part.module.register_forward_hook(lambda *_, path=part.path: called.add(path))
    model(**inputs)
    silent = {path for path in {part.path for part in parts} - called if not path.endswith(".altup")}
    assert silent == set()  # Gemma 3n calls other methods of its altup than forward


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "mamba"])
def test_one_layer_alone_is_one_block(family: str) -> None:
    layer = find_blocks(tiny(family)[0])[0].module
    assert find_blocks(layer) == (Block("", layer, 0, "", 1),)


def test_parts_of_t5_blocks_are_found_in_their_list() -> None:
    model, _ = tiny("t5")
    paths = [block.path for block in divided(find_blocks(model), submodules)]
    assert paths[:4] == [
        "encoder.block.0.layer.0",
        "encoder.block.0.layer.1",
        "encoder.block.1.layer.0",
        "encoder.block.1.layer.1",
    ]
    assert paths[4:7] == ["decoder.block.0.layer.0", "decoder.block.0.layer.1", "decoder.block.0.layer.2"]


def test_experts_are_no_blocks_and_named_patterns_reach_inside() -> None:
    model, _ = tiny("deepseek_v3")
    chosen = find_blocks(model, patterns=[PathPattern.parse("model.layers.*.mlp")])
    assert [(b.path, b.stack_size) for b in chosen] == [(f"model.layers.{i}.mlp", 1) for i in range(3)]


def test_declared_names_need_no_checkpointing_layer_class() -> None:
    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(4, 4)

        def forward(self, x):
            return self.map(x)

    class Remote(nn.Module):
        _no_split_modules = ("Cell",)

        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.ModuleList([Cell(), Cell()])
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])

    assert [block.path for block in find_blocks(Remote())] == ["cells.0", "cells.1", "layers.0", "layers.1"]
