"""Tiny models with random weights, for every family that a test may want: Hugging Face configs and plain torch.

``tiny("llama")`` returns a model in training mode and the inputs that make its ``.loss``. Weights and inputs are the
same in every call of one process and the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
BATCH = 2
SEQ = 12
IMAGE = 16
PATCH = 8
IMAGE_TOKEN = 5

# What each family calls its dropout; only the names that its config already knows are set.
DROPOUT_FIELDS = (
    "activation_dropout",
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "drop_path_rate",
    "dropout",
    "dropout_rate",
    "embd_pdrop",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_pdrop",
)


@dataclass(frozen=True)
class Recipe:
    """How one Hugging Face family is built: its config class, its model class, what the config is given."""

    config: str
    model: str
    fields: dict[str, Any]
    inputs: Callable[[], dict[str, Any]]
    parts: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)  # sub-config: its class and fields


def _ids(seed: int = 1, length: int = SEQ) -> Tensor:
    return torch.randint(6, VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def _next_token() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids()}


def _masked_token() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(3)}


def _sequence_pair() -> dict[str, Any]:
    return {"input_ids": _ids(), "labels": _ids(3, 7)}


def _image_class() -> dict[str, Any]:
    return {"pixel_values": _pixels(BATCH, 3, IMAGE, IMAGE), "labels": torch.tensor([0, 1])}


def _text_and_image() -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": _pixels(BATCH, 3, IMAGE, IMAGE), "return_loss": True}


def _speech() -> dict[str, Any]:
    return {"input_features": _pixels(BATCH, 8, 24), "labels": _ids(3, 7)}


def _image_in_text() -> dict[str, Any]:
    ids = _ids()
    ids[:, 1 : 1 + (IMAGE // PATCH) ** 2] = IMAGE_TOKEN
    return {"input_ids": ids, "pixel_values": _pixels(BATCH, 3, IMAGE, IMAGE), "labels": ids.clone()}


def _patches_in_text() -> dict[str, Any]:
    ids = _ids()
    ids[:, 0], ids[:, 1:5] = 1, IMAGE_TOKEN  # one merged token for each 2 x 2 of the 4 x 4 patches
    grid = torch.tensor([[1, 4, 4]] * BATCH)
    pixels = _pixels(BATCH * 16, 3 * 2 * 4 * 4)
    kinds = (ids == IMAGE_TOKEN).int()
    return {
        "input_ids": ids,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": kinds,
        "labels": ids.clone(),
    }


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: dict[str, Any] = {**_SIZES, **_ENDS, "max_position_embeddings": 32}
_GQA: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2}
_HEAD8: dict[str, Any] = {**_GQA, "head_dim": 8}
_VISION: dict[str, Any] = {
    **{k: v for k, v in _SIZES.items() if k != "vocab_size"},
    "image_size": IMAGE,
    "patch_size": PATCH,
}
_MAMBA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, **_ENDS}
_MAMBA_V2: dict[str, Any] = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 4}
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "decoder_start_token_id": 1,
    **_ENDS,
}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GEMMA_TEXT: dict[str, Any] = {
    **_HEAD8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_GEMMA3N_TEXT: dict[str, Any] = {**_GEMMA_TEXT, "laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4}
_GEMMA4_TEXT: dict[str, Any] = {**_GEMMA_TEXT, "global_head_dim": 8}

RECIPES: dict[str, Recipe] = {
    "llama": Recipe("LlamaConfig", "LlamaForCausalLM", _GQA, _next_token),
    "mistral": Recipe("MistralConfig", "MistralForCausalLM", {**_GQA, "sliding_window": 8}, _next_token),
    "qwen2": Recipe("Qwen2Config", "Qwen2ForCausalLM", _GQA, _next_token),
    "qwen3": Recipe("Qwen3Config", "Qwen3ForCausalLM", _HEAD8, _next_token),
    "smollm3": Recipe("SmolLM3Config", "SmolLM3ForCausalLM", _GQA, _next_token),
    "phi3": Recipe("Phi3Config", "Phi3ForCausalLM", _GQA, _next_token),
    "gemma": Recipe("GemmaConfig", "GemmaForCausalLM", _HEAD8, _next_token),
    "gemma2": Recipe("Gemma2Config", "Gemma2ForCausalLM", {**_HEAD8, "sliding_window": 8}, _next_token),
    "gemma3": Recipe("Gemma3TextConfig", "Gemma3ForCausalLM", {**_HEAD8, "sliding_window": 8}, _next_token),
    "gemma3n": Recipe("Gemma3nTextConfig", "Gemma3nForCausalLM", _GEMMA3N_TEXT, _next_token),
    "gemma4": Recipe("Gemma4TextConfig", "Gemma4ForCausalLM", _GEMMA4_TEXT, _next_token),
    "gpt2": Recipe(
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_ENDS},
        _next_token,
    ),
    "gpt_neox": Recipe("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT, _next_token),
    "opt": Recipe("OPTConfig", "OPTForCausalLM", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, _next_token),
    "bloom": Recipe(
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, **_ENDS},
        _next_token,
    ),
    "falcon": Recipe("FalconConfig", "FalconForCausalLM", _TEXT, _next_token),
    "mixtral": Recipe(
        "MixtralConfig", "MixtralForCausalLM", {**_GQA, "num_local_experts": 4, "num_experts_per_tok": 2}, _next_token
    ),
    "qwen3_moe": Recipe(
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_HEAD8, **_MOE, "num_experts": 4, "norm_topk_prob": True},
        _next_token,
    ),
    "deepseek_v3": Recipe(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_TEXT,
            **_MOE,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
        _next_token,
    ),
    "mamba": Recipe("MambaConfig", "MambaForCausalLM", {**_MAMBA, "state_size": 8, "expand": 2}, _next_token),
    "mamba2": Recipe(
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**_MAMBA, "state_size": 8, "expand": 2, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 4},
        _next_token,
    ),
    "jamba": Recipe(
        "JambaConfig",
        "JambaForCausalLM",
        {
            **_GQA,
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        _next_token,
    ),
    "zamba": Recipe(
        "ZambaConfig",
        "ZambaForCausalLM",
        {
            **_GQA,
            "num_key_value_heads": 4,
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
        },
        _next_token,
    ),
    "bamba": Recipe("BambaConfig", "BambaForCausalLM", {**_GQA, **_MAMBA_V2, "attn_layer_indices": [1]}, _next_token),
    "falcon_h1": Recipe(
        "FalconH1Config", "FalconH1ForCausalLM", {**_GQA, **_MAMBA_V2, "head_dim": 8, "mamba_d_ssm": 64}, _next_token
    ),
    "qwen3_next": Recipe(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **_HEAD8,
            **_MOE,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        _next_token,
    ),
    "bert": Recipe("BertConfig", "BertForMaskedLM", _TEXT, _masked_token),
    "roberta": Recipe("RobertaConfig", "RobertaForMaskedLM", _TEXT, _masked_token),
    "distilbert": Recipe(
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"vocab_size": VOCAB, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32},
        _masked_token,
    ),
    "albert": Recipe("AlbertConfig", "AlbertForMaskedLM", {**_TEXT, "embedding_size": 16}, _masked_token),
    "t5": Recipe(
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        _sequence_pair,
    ),
    "bart": Recipe(
        "BartConfig", "BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 32}, _sequence_pair
    ),
    "whisper": Recipe(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 16},
        _speech,
    ),
    "vit": Recipe("ViTConfig", "ViTForImageClassification", _VISION, _image_class),
    "dinov2": Recipe("Dinov2Config", "Dinov2ForImageClassification", _VISION, _image_class),
    "siglip": Recipe(
        "SiglipConfig",
        "SiglipForImageClassification",
        {},
        _image_class,
        {"text_config": ("SiglipTextConfig", _TEXT), "vision_config": ("SiglipVisionConfig", _VISION)},
    ),
    "clip": Recipe(
        "CLIPConfig",
        "CLIPModel",
        {"projection_dim": 16},
        _text_and_image,
        {"text_config": ("CLIPTextConfig", _TEXT), "vision_config": ("CLIPVisionConfig", _VISION)},
    ),
    "swin": Recipe(
        "SwinConfig",
        "SwinForImageClassification",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2},
        _image_class,
    ),
    "llava": Recipe(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN, "vision_feature_layer": -1, "image_seq_length": (IMAGE // PATCH) ** 2},
        _image_in_text,
        {"vision_config": ("CLIPVisionConfig", _VISION), "text_config": ("LlamaConfig", _GQA)},
    ),
    "qwen2_vl": Recipe(
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        {"image_token_id": IMAGE_TOKEN, "vision_start_token_id": 1, "video_token_id": 3, "vision_end_token_id": 4},
        _patches_in_text,
        {
            "vision_config": (
                "Qwen2VLVisionConfig",
                {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2},
            ),
            "text_config": (
                "Qwen2VLTextConfig",
                {**_GQA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
            ),
        },
    ),
}

FAMILIES: tuple[str, ...] = tuple(RECIPES)


def tiny(family: str, *, dropout: float = 0.0, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model in training mode and inputs that give it a ``.loss``; ``changes`` go to its config."""
    return build(RECIPES[family], dropout=dropout, **changes)


def build(recipe: Recipe, *, dropout: float = 0.0, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of a recipe, as ``tiny`` does."""
    import transformers

    parts = {key: getattr(transformers, kind)(**fields) for key, (kind, fields) in recipe.parts.items()}
    config = getattr(transformers, recipe.config)(**{**recipe.fields, **parts, **changes})
    for part in (config, *parts.values()):
        for name in DROPOUT_FIELDS:
            if isinstance(getattr(part, name, None), (int, float)):
                setattr(part, name, dropout)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, recipe.model)(config)
    return model.train(), recipe.inputs()
