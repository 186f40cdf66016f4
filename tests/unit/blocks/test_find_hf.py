"""Blocks, towers and frozen towers of tiny Hugging Face models of many families."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from sac.blocks.find import Block, divided, drop_frozen, find_blocks, is_trained, submodules
from sac.blocks.towers import Towers
from sac.errors import ModelError
from sac.policy.patterns import PathPattern
from tests.support.model_zoo import FAMILIES, tiny

DECODER = "model.layers"
# family -> {(stack, block class, tower): number of blocks}
EXPECTED: dict[str, dict[tuple[str, str, str], int]] = {
    "llama": {(DECODER, "LlamaDecoderLayer", "language"): 2},
    "mistral": {(DECODER, "MistralDecoderLayer", "language"): 2},
    "qwen2": {(DECODER, "Qwen2DecoderLayer", "language"): 2},
    "qwen3": {(DECODER, "Qwen3DecoderLayer", "language"): 2},
    "smollm3": {(DECODER, "SmolLM3DecoderLayer", "language"): 2},
    "phi3": {(DECODER, "Phi3DecoderLayer", "language"): 2},
    "gemma": {(DECODER, "GemmaDecoderLayer", "language"): 2},
    "gemma2": {(DECODER, "Gemma2DecoderLayer", "language"): 2},
    "gemma3": {(DECODER, "Gemma3DecoderLayer", "language"): 2},
    "gemma3n": {(DECODER, "Gemma3nTextDecoderLayer", "language"): 4},
    "gemma4": {(DECODER, "Gemma4TextDecoderLayer", "language"): 4},
    "gpt2": {("transformer.h", "GPT2Block", "language"): 2},
    "gpt_neox": {("gpt_neox.layers", "GPTNeoXLayer", "language"): 2},
    "opt": {("model.decoder.layers", "OPTDecoderLayer", "language"): 2},
    "bloom": {("transformer.h", "BloomBlock", "language"): 2},
    "falcon": {("transformer.h", "FalconDecoderLayer", "language"): 2},
    "mixtral": {(DECODER, "MixtralDecoderLayer", "language"): 2},
    "qwen3_moe": {(DECODER, "Qwen3MoeDecoderLayer", "language"): 2},
    "deepseek_v3": {(DECODER, "DeepseekV3DecoderLayer", "language"): 3},
    "mamba": {("backbone.layers", "MambaBlock", "language"): 2},
    "mamba2": {("backbone.layers", "Mamba2Block", "language"): 2},
    "jamba": {
        (DECODER, "JambaMambaDecoderLayer", "language"): 2,
        (DECODER, "JambaAttentionDecoderLayer", "language"): 2,
    },
    "zamba": {(DECODER, "ZambaMambaDecoderLayer", "language"): 2, (DECODER, "ZambaHybridLayer", "language"): 2},
    "bamba": {(DECODER, "BambaDecoderLayer", "language"): 2},
    "falcon_h1": {(DECODER, "FalconH1DecoderLayer", "language"): 2},
    "qwen3_next": {(DECODER, "Qwen3NextDecoderLayer", "language"): 2},
    "bert": {("bert.encoder.layer", "BertLayer", "language"): 2},
    "roberta": {("roberta.encoder.layer", "RobertaLayer", "language"): 2},
    "distilbert": {("distilbert.transformer.layer", "TransformerBlock", "language"): 2},
    "albert": {("albert.encoder.albert_layer_groups.0.albert_layers", "AlbertLayer", "language"): 1},
    "t5": {("encoder.block", "T5Block", "language"): 2, ("decoder.block", "T5Block", "language"): 2},
    "bart": {
        ("model.encoder.layers", "BartEncoderLayer", "language"): 2,
        ("model.decoder.layers", "BartDecoderLayer", "language"): 2,
    },
    "whisper": {
        ("model.encoder.layers", "WhisperEncoderLayer", "audio"): 2,
        ("model.decoder.layers", "WhisperDecoderLayer", "language"): 2,
    },
    "vit": {("vit.layers", "ViTLayer", "vision"): 2},
    "dinov2": {("dinov2.encoder.layer", "Dinov2Layer", "vision"): 2},
    "siglip": {("vision_model.encoder.layers", "SiglipEncoderLayer", "vision"): 2},
    "clip": {
        ("text_model.encoder.layers", "CLIPEncoderLayer", "language"): 2,
        ("vision_model.encoder.layers", "CLIPEncoderLayer", "vision"): 2,
    },
    "swin": {
        ("swin.encoder.layers.0.blocks", "SwinLayer", "vision"): 2,
        ("swin.encoder.layers.1.blocks", "SwinLayer", "vision"): 2,
    },
    "llava": {
        ("model.vision_tower.encoder.layers", "CLIPEncoderLayer", "vision"): 2,
        ("model.language_model.layers", "LlamaDecoderLayer", "language"): 2,
    },
    "qwen2_vl": {
        ("model.visual.blocks", "Qwen2VLVisionBlock", "vision"): 2,
        ("model.language_model.layers", "Qwen2VLDecoderLayer", "language"): 2,
    },
}


WITHOUT_DROPOUT = {"mamba", "mamba2"}


def stacks(blocks: tuple[Block, ...]) -> dict[tuple[str, str, str], int]:
    return dict(Counter((block.stack, type(block.module).__name__, block.tower) for block in blocks))


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)


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
    assert find_blocks(layer) == (Block("", layer, 0, "", 1, "language"),)


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


# --- scope


@pytest.mark.parametrize(
    ("family", "scope", "kept"),
    [
        ("llava", "vision", {"vision": 2}),
        ("llava", "language", {"language": 2}),
        ("llava", ["vision", "language"], {"vision": 2, "language": 2}),
        ("llava", "all", {"vision": 2, "language": 2}),
        ("qwen2_vl", "vision", {"vision": 2}),
        ("whisper", "audio", {"audio": 2}),
        ("clip", "vision", {"vision": 2}),
        ("vit", "vision", {"vision": 2}),
    ],
)
def test_scope_keeps_its_towers(family: str, scope, kept: dict[str, int]) -> None:
    model, _ = tiny(family)
    assert dict(Counter(block.tower for block in find_blocks(model, scope=scope))) == kept


def test_scope_of_a_tower_that_is_not_there() -> None:
    with pytest.raises(ModelError) as caught:
        find_blocks(tiny("llava")[0], scope=["audio", "multimodal"])
    assert str(caught.value) == (
        "LlavaForConditionalGeneration: no block of this model is in scope audio, multimodal; "
        "it has vision (2 blocks), language (2 blocks)\n"
        "    fix: scope: vision, or scope: all"
    )


def test_projectors_are_multimodal() -> None:
    assert Towers(tiny("llava")[0]).of("model.multi_modal_projector.linear_1") == "multimodal"
    assert Towers(tiny("qwen2_vl")[0]).of("model.visual.merger.mlp.0") == "multimodal"


# --- frozen towers


def towers(blocks: tuple[Block, ...]) -> set[str]:
    return {block.tower for block in blocks}


def test_nothing_is_left_alone_when_all_is_trained() -> None:
    model, _ = tiny("llava")
    assert drop_frozen(find_blocks(model), model) == (find_blocks(model), ())


@pytest.mark.parametrize(("family", "vision"), [("llava", "vision_tower"), ("qwen2_vl", "visual")])
def test_frozen_vision_tower_is_left_alone(family: str, vision: str) -> None:
    model, _ = tiny(family)
    freeze(getattr(model.model, vision))
    kept, left_alone = drop_frozen(find_blocks(model), model)
    assert (towers(kept), towers(left_alone)) == ({"language"}, {"vision"})
    assert not any(is_trained(block.module) for block in left_alone)


@pytest.mark.parametrize(("family", "projector"), [("llava", "multi_modal_projector"), ("qwen2_vl", "visual.merger")])
def test_trained_projector_keeps_the_frozen_language_model_only(family: str, projector: str) -> None:
    model, inputs = tiny(family)
    freeze(model)
    model.model.get_submodule(projector).requires_grad_(True)
    kept, left_alone = drop_frozen(find_blocks(model), model)
    assert (towers(kept), towers(left_alone)) == ({"language"}, {"vision"})
    reached: set[str] = set()  # the oracle: autograd passes exactly through the blocks that were kept
    for block in kept + left_alone:
        block.module.register_forward_hook(
            lambda _module, _args, out, path=block.path: (
                reached.add(path) if (out[0] if isinstance(out, tuple) else out).requires_grad else None
            )
        )
    model(**inputs).loss.backward()
    assert reached == {block.path for block in kept}


def test_trained_vision_tower_keeps_a_frozen_language_model() -> None:
    model, _ = tiny("llava")
    freeze(model.model.language_model)
    freeze(model.lm_head)
    freeze(model.model.multi_modal_projector)
    assert drop_frozen(find_blocks(model), model)[1] == ()


def test_adapters_count_as_trained() -> None:
    model, _ = tiny("llava")
    freeze(model)
    for block in find_blocks(model, scope="language"):
        projection = block.module.self_attn.q_proj
        projection.lora_A = nn.Linear(32, 2, bias=False)
    kept, left_alone = drop_frozen(find_blocks(model), model)
    assert (towers(kept), towers(left_alone)) == ({"language"}, {"vision"})
    assert all(is_trained(block.module) for block in kept)


def test_adapters_in_the_first_layer_keep_the_whole_stack() -> None:
    model, _ = tiny("llama")
    freeze(model)
    model.model.layers[0].mlp.adapter = nn.Linear(4, 4)
    assert len(drop_frozen(find_blocks(model), model)[0]) == 2


def test_frozen_speech_encoder_is_left_alone() -> None:
    model, _ = tiny("whisper")
    freeze(model.model.encoder)
    kept, left_alone = drop_frozen(find_blocks(model), model)
    assert (towers(kept), towers(left_alone)) == ({"language"}, {"audio"})


def test_all_frozen_leaves_none_alone() -> None:
    """Adapters are to come."""
    model, _ = tiny("llava")
    freeze(model)
    assert drop_frozen(find_blocks(model), model) == (find_blocks(model), ())
