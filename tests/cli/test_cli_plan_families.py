"""`sac plan` on configs as transformers writes them: a plan, or a text that says what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sac.errors import ConfigError
from sac.tools.cli import main
from sac.tools.models import Scale, check_batches, class_and_config, scale_config

transformers = pytest.importorskip("transformers")

HEADS = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32}
IMAGE = {**HEADS, "image_size": 16, "patch_size": 8}
SIDES = {"text_config": {**HEADS, "vocab_size": 64}, "vision_config": IMAGE}
CONVNEXT = {"num_stages": 2, "hidden_sizes": [8, 16], "image_size": 16, "drop_path_rate": 0.1}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2]}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
SEGFORMER = {"num_encoder_blocks": 2, "depths": [2, 2], "hidden_sizes": [8, 16], "num_attention_heads": [1, 2]}
SEGFORMER |= {"image_size": 32, "decoder_hidden_size": 8}
BART = {"d_model": 32, "vocab_size": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
# Those of Whisper lie beyond a small vocabulary, which its embedding refuses.
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
T5 = {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 32, "vocab_size": 64}
LLAMA = {**HEADS, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16}
MAMBA2 = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "vocab_size": 64}
CONV = {"conv_dim": [16, 16], "conv_stride": [5, 2], "conv_kernel": [10, 3], "num_feat_extract_layers": 2}
MASKS = {"num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}  # a masked step has no shape without data
MOE = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
# Swin: no stage may be smaller than a window, which transformers does not run (5.23).
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGE),
    "resnet": ("ResNetConfig", "ResNetForImageClassification", RESNET),
    "swin": ("SwinConfig", "SwinForImageClassification", SWIN),
    "clip": ("CLIPConfig", "CLIPModel", SIDES),
    "mamba2": ("Mamba2Config", "Mamba2ForCausalLM", MAMBA2),
    "bert": ("BertConfig", "BertForMaskedLM", {**HEADS, "vocab_size": 64}),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {**BART, **TOKENS, "max_source_positions": 16}),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", {**HEADS, **CONV, **MASKS}),
    "convnext": ("ConvNextConfig", "ConvNextForImageClassification", CONVNEXT),
    "segformer": ("SegformerConfig", "SegformerForSemanticSegmentation", SEGFORMER),
    "opt": ("OPTConfig", "OPTForCausalLM", {**HEADS, "ffn_dim": 32, "vocab_size": 64, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 2, "vocab_size": 64}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", LLAMA),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**LLAMA, **MOE}),
    "bart": ("BartConfig", "BartForConditionalGeneration", BART),
    "videomae": ("VideoMAEConfig", "VideoMAEForVideoClassification", {**IMAGE, "num_frames": 4}),
}  # fmt: skip
QUICK = ("vit", "resnet", "convnext")
LAYERS = {"clip": 1, "t5": 1}


def written(folder: Path, name: str) -> str:
    config_class, architecture, sizes = FAMILIES[name]
    config = getattr(transformers, config_class)(**sizes)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}, default=str))
    return str(path)


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES]
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("few_choices")
def test_a_family_is_planned_for(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"hf:{written(tmp_path, name)}"
    layers = str(LAYERS.get(name, 2))
    assert main(["plan", "--model", model, "--layers", layers, "--seq", "8", "--budget", "50%", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["least_peak_bytes"] <= found["plan"]["peak_bytes"] <= found["budget_bytes"]


def test_a_backward_that_needs_data_is_refused() -> None:
    from torch import nn

    from sac.errors import PlanError
    from sac.planner.fakes import run_backward

    class Asks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * len(grad.expand(2).nonzero())

    with FakeTensorMode():
        loss = Asks.apply(torch.ones((), requires_grad=True))
        with pytest.raises(PlanError) as error:
            run_backward(nn.Linear(1, 1), loss)
    assert str(error.value) == (
        "Linear: aten.nonzero.default needs the data of a tensor, but a plan is made on tensors without data\n"
        "    fix: plan on real tensors: sac.plan(…, real=True), or --real"
    )


def test_stages_have_that_many_layers_each() -> None:
    raw = {"depths": [2, 2, 6, 2], "num_layers": 4, "hidden_sizes": [8, 16, 32, 64], "out_features": ["stage4"]}
    assert scale_config(raw, Scale(layers=1)) == {**raw, "depths": [1, 1, 1, 1]}


def test_a_config_that_transformers_refuses(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "swin", "out_features": ["stage9"]}))
    with pytest.raises(ConfigError) as error:
        class_and_config(str(path), Scale(layers=2))
    first, fix = str(error.value).splitlines()
    assert first.startswith(f"--model: {path}: transformers cannot make a config from it: ")
    assert "stage9" in first
    assert fix == "    fix: leave --layers out, or write the sizes into the file"


def test_a_class_that_cannot_be_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, config: Any) -> None:
        raise ImportError("TimmBackbone requires the timm library")

    monkeypatch.setattr(transformers.ViTForImageClassification, "__init__", fails)
    path = written(tmp_path, "vit")
    assert main(["plan", "--model", f"hf:{path}", "--budget", "50%"]) == 1
    assert capsys.readouterr().err.strip() == (
        f"--model: {path}: ViTForImageClassification cannot be built: ImportError: TimmBackbone requires the timm "
        "library\n"
        "    fix: write a function that returns (model, inputs) and name it as package.module:function"
    )


def test_a_model_for_which_no_batch_can_be_made_up() -> None:
    class Reads:
        main_input_name = "point_cloud"

        def forward(self, point_cloud: Any) -> Any:
            return point_cloud

    with pytest.raises(ConfigError) as error:
        check_batches(Reads, None, Scale(), text_path=None)
    assert str(error.value) == (
        "--model: no batch can be generated for Reads, which reads 'point_cloud'\n"
        "    legal: models that read input_ids, pixel_values, input_values, input_features\n"
        "    fix: write a function that returns (model, inputs) and name it as package.module:function"
    )
