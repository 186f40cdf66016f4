"""Which models each shipped policy is tested on: a tiny real model for every name that it claims to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.policies.plain_families import diffusion_transformer, torchtitan_llama, vision_transformer
from tests.support.model_zoo import RECIPES, VOCAB, Recipe, build

Built = tuple[nn.Module, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """One model of a policy; ``name`` is the pattern of the policy's ``models`` that must find it."""

    policy: str
    name: str
    build: Callable[[float], Built]  # takes the dropout

    def __str__(self) -> str:
        return f"{self.policy}-{self.name}"


def _like(family: str, prefix: str, **fields: Any) -> Recipe:
    """Return the recipe of a model that is configured as one of the zoo is."""
    known = RECIPES[family]
    head = known.model.removeprefix(known.config.removesuffix("Config"))
    return Recipe(f"{prefix}Config", f"{prefix}{head}", {**known.fields, **fields}, known.inputs, known.parts)


_GPT = {"rotary_dim": 8}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_PIXELS = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}


def _tower(prefix: str) -> Recipe:
    """Return a vision tower alone: it has no loss, so its output is trained on."""
    inputs = RECIPES["vit"].inputs
    fields = {**_PIXELS, "image_size": 16, "patch_size": 8}
    return Recipe(f"{prefix}Config", f"{prefix}Model", fields, lambda: {"pixel_values": inputs()["pixel_values"]})


_RESIDUAL = {"embedding_size": 16, "hidden_sizes": [64, 128], "depths": [2, 2]}


def _picture() -> dict[str, Any]:
    """Return an image that is large enough to be halved five times."""
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))}


def _detector(prefix: str) -> Recipe:
    """Return a detector: a network whose norms are frozen, below a transformer."""
    fields = {
        "encoder_hidden_dim": 32,
        "encoder_in_channels": [64, 128, 256],
        "decoder_in_channels": [32, 32, 32],
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
        "d_model": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "decoder_layers": 2,
        "num_queries": 8,
        "num_denoising": 0,
        "disable_custom_kernels": True,
    }
    network = {
        "embedding_size": 16,
        "hidden_sizes": [32, 64, 128, 256],
        "depths": [2, 2, 2, 2],
        "out_indices": [2, 3, 4],
    }
    parts = {"backbone_config": ("RTDetrResNetConfig", network)}
    return Recipe(f"{prefix}Config", f"{prefix}ForObjectDetection", fields, _picture, parts)


# What the zoo lacks, by policy. Families of the zoo itself are in _ZOO, by the name that `models` has for them.
_MORE: dict[str, dict[str, Recipe]] = {
    "llama": {
        "ministral3": _like("llama", "Ministral3"),
        "granite": _like("llama", "Granite"),
        "olmo": _like("llama", "Olmo"),
        "stablelm": _like("llama", "StableLm"),
        "cohere": _like("llama", "Cohere"),
        "cohere2": _like("llama", "Cohere2"),
        "seed_oss": _like("qwen3", "SeedOss", residual_dropout=0.1),
        "ernie4_5": _like("llama", "Ernie4_5"),
        "cwm": _like("qwen3", "Cwm"),
        "glm": _like("qwen3", "Glm"),
    },
    "gemma": {
        "vaultgemma": _like("gemma2", "VaultGemma"),
        "olmo2": _like("llama", "Olmo2"),
        "olmo3": _like("llama", "Olmo3", sliding_window=8),
        "exaone4": _like("qwen3", "Exaone4"),
        "glm4": _like("qwen3", "Glm4"),
    },
    "gpt2": {
        "gpt_bigcode": Recipe(
            "GPTBigCodeConfig", "GPTBigCodeForCausalLM", RECIPES["gpt2"].fields, RECIPES["gpt2"].inputs
        ),
        "gpt_neo": Recipe(
            "GPTNeoConfig",
            "GPTNeoForCausalLM",
            {
                "vocab_size": VOCAB,
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": 8,
                "max_position_embeddings": 32,
            },
            RECIPES["gpt2"].inputs,
        ),
        "gpt_neox_japanese": _like("gpt_neox", "GPTNeoXJapanese"),
        "gptj": Recipe("GPTJConfig", "GPTJForCausalLM", {**RECIPES["gpt2"].fields, **_GPT}, RECIPES["gpt2"].inputs),
        "codegen": Recipe(
            "CodeGenConfig", "CodeGenForCausalLM", {**RECIPES["gpt2"].fields, **_GPT}, RECIPES["gpt2"].inputs
        ),
        "mpt": Recipe(
            "MptConfig",
            "MptForCausalLM",
            {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
            RECIPES["gpt2"].inputs,
        ),
        "biogpt": _like("llama", "BioGpt"),
        "xglm": Recipe(
            "XGLMConfig",
            "XGLMForCausalLM",
            {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64},
            RECIPES["gpt2"].inputs,
        ),
        "persimmon": _like("llama", "Persimmon"),
        "phi": _like("llama", "Phi"),
        "starcoder2": _like("llama", "Starcoder2"),
        "nemotron": _like("llama", "Nemotron"),
        "arcee": _like("llama", "Arcee"),
        "apertus": _like("llama", "Apertus"),
        "jais2": _like("llama", "Jais2"),
    },
    "bert": {
        "camembert": _like("bert", "Camembert"),
        "xlm-roberta": _like("bert", "XLMRoberta"),
        "xlm-roberta-xl": _like("bert", "XLMRobertaXL"),
        "roberta-prelayernorm": _like("bert", "RobertaPreLayerNorm"),
        "electra": _like("bert", "Electra"),
        "deberta": _like("bert", "Deberta"),
        "deberta-v2": _like("bert", "DebertaV2"),
        "mpnet": _like("bert", "MPNet"),
        "ernie": _like("bert", "Ernie"),
        "esm": _like("bert", "Esm"),
        "megatron-bert": _like("bert", "MegatronBert"),
        "rembert": _like("bert", "RemBert"),
        "roformer": _like("bert", "RoFormer"),
        "layoutlm": _like("bert", "LayoutLM"),
        "data2vec-text": _like("bert", "Data2VecText"),
        "modernbert": _like("bert", "ModernBert"),
    },
    "t5": {
        "mt5": _like("t5", "MT5"),
        "umt5": _like("t5", "UMT5"),
        "longt5": _like("t5", "LongT5"),
        "mbart": _like("bart", "MBart"),
        "pegasus": _like("bart", "Pegasus"),
        "marian": Recipe("MarianConfig", "MarianMTModel", RECIPES["bart"].fields, RECIPES["bart"].inputs),
        "m2m_100": _like("bart", "M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
        "plbart": _like("bart", "PLBart"),
        "blenderbot": _like("bart", "Blenderbot"),
        "blenderbot-small": _like("bart", "BlenderbotSmall"),
    },
    "moe": {
        "qwen2_moe": _like("llama", "Qwen2Moe", **_MOE, shared_expert_intermediate_size=16),
        "olmoe": _like("llama", "Olmoe", **_MOE),
        "granitemoe": _like("llama", "GraniteMoe", **_MOE),
        "ernie4_5_moe": _like("llama", "Ernie4_5_Moe", **_MOE, moe_num_experts=4, moe_layer_start_index=1, moe_k=2),
        "hunyuan_v1_moe": _like("qwen3", "HunYuanMoEV1", **_MOE, moe_topk=2),
        "minimax_m2": _like("qwen3", "MiniMaxM2", **_MOE),
        "gpt_oss": _like("qwen3", "GptOss", **_MOE),
        "glm4_moe": _like("qwen3", "Glm4Moe", **_MOE, n_routed_experts=4, first_k_dense_replace=1),
    },
    "mixtral": {
        "phimoe": _like("llama", "Phimoe", **_MOE),
        "flex_olmo": _like("llama", "FlexOlmo", **_MOE),
    },
    "deepseek_v3": {
        "deepseek_v2": _like("deepseek_v3", "DeepseekV2", q_lora_rank=None),
        "deepseek_v32": _like("deepseek_v3", "DeepseekV32", index_topk=8, index_head_dim=8, index_n_heads=2),
        "glm4_moe_lite": _like("deepseek_v3", "Glm4MoeLite"),
        "minicpm3": _like("deepseek_v3", "MiniCPM3"),
        "youtu": _like("deepseek_v3", "Youtu"),
    },
    "vit": {
        "vit_msn": _like("vit", "ViTMSN"),
        "beit": _like("vit", "Beit"),
        "data2vec-vision": _like("vit", "Data2VecVision"),
        "ijepa": _like("vit", "IJepa"),
        "dinov2_with_registers": _like("dinov2", "Dinov2WithRegisters"),
        "siglip_vision_model": _tower("SiglipVision"),
        "clip_vision_model": _tower("CLIPVision"),
        "metaclip_2": Recipe(
            "MetaClip2Config",
            "MetaClip2ForImageClassification",
            {},
            RECIPES["vit"].inputs,
            {
                "text_config": ("MetaClip2TextConfig", RECIPES["bert"].fields),
                "vision_config": ("MetaClip2VisionConfig", RECIPES["vit"].fields),
            },
        ),
    },
    "resnet": {
        "resnet": Recipe("ResNetConfig", "ResNetForImageClassification", _RESIDUAL, _picture),
        "rt_detr": _detector("RTDetr"),
        "rt_detr_v2": _detector("RTDetrV2"),
        "rt_detr_resnet": Recipe("RTDetrResNetConfig", "RTDetrResNetBackbone", _RESIDUAL, _picture),
    },
    "mamba": {
        "falcon_mamba": _like("mamba", "FalconMamba"),
        "zamba2": _like(
            "llama",
            "Zamba2",
            num_key_value_heads=4,
            num_hidden_layers=4,
            layers_block_type=["mamba", "hybrid"] * 2,
            mamba_d_state=8,
            mamba_ngroups=1,
            n_mamba_heads=4,
            mamba_headdim=16,
            chunk_size=4,
            attention_head_dim=16,
        ),
        "granitemoehybrid": _like(
            "bamba",
            "GraniteMoeHybrid",
            **_MOE,
            layer_types=["mamba", "attention"],
            layers_block_type=["mamba", "attention"],
            shared_intermediate_size=32,
        ),
        "nemotron_h": _like(
            "qwen3",
            "NemotronH",
            num_hidden_layers=3,
            layers_block_type=["attention", "mlp", "mamba"],
            ssm_state_size=8,
            mamba_num_heads=4,
            mamba_head_dim=16,
            n_groups=1,
            chunk_size=4,
        ),
        "lfm2": _like("llama", "Lfm2", layer_types=["conv", "full_attention"]),
        "qwen3_5_text": Recipe(
            "Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**RECIPES["qwen3"].fields, **_LINEAR}, RECIPES["qwen3"].inputs
        ),
        "olmo_hybrid": _like("qwen3", "OlmoHybrid", **{**_LINEAR, "linear_num_key_heads": 4}),
        "minimax": _like("qwen3", "MiniMax", **_MOE, layer_types=["linear_attention", "full_attention"]),
        "recurrent_gemma": _like(
            "llama",
            "RecurrentGemma",
            block_types=["recurrent", "attention"],
            lru_width=32,
            attention_window_size=8,
        ),
    },
}

_ZOO: dict[str, dict[str, str]] = {
    "llama": {
        **{name: name for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")},
        "qwen2_vl_text": "qwen2_vl",
    },
    "phi3": {"phi3": "phi3"},
    "gemma": {
        "gemma": "gemma",
        "gemma2": "gemma2",
        "gemma3_text": "gemma3",
        "gemma3n_text": "gemma3n",
        "gemma4_text": "gemma4",
    },
    "gpt2": {name: name for name in ("gpt2", "gpt_neox", "opt", "bloom", "falcon")},
    "bert": {name: name for name in ("bert", "roberta", "distilbert", "albert")},
    "t5": {name: name for name in ("t5", "bart", "whisper")},
    "mixtral": {"mixtral": "mixtral"},
    "moe": {"qwen3_moe": "qwen3_moe"},
    "deepseek_v3": {"deepseek_v3": "deepseek_v3"},
    "vit": {name: name for name in ("vit", "dinov2", "siglip", "clip", "swin")},
    "mamba": {name: name for name in ("mamba", "mamba2", "jamba", "zamba", "bamba", "falcon_h1", "qwen3_next")},
}

_PLAIN: tuple[tuple[str, str, Callable[[float], Built]], ...] = (
    ("llama", "Llama3Model", torchtitan_llama),
    ("vit", "VisionTransformer", vision_transformer),
    ("vit", "DiT", diffusion_transformer),
)


def _from_recipe(recipe: Recipe, dropout: float) -> Built:
    return build(recipe, dropout=dropout)


FAMILIES: tuple[Family, ...] = (
    *(
        Family(policy, name, partial(_from_recipe, RECIPES[known]))
        for policy, names in _ZOO.items()
        for name, known in names.items()
    ),
    *(
        Family(policy, name, partial(_from_recipe, recipe))
        for policy, recipes in _MORE.items()
        for name, recipe in recipes.items()
    ),
    *(Family(*plain) for plain in _PLAIN),
)

# What falls to `general`: a family of no policy, and a model that is no one's.
STRANGERS: tuple[Family, ...] = (
    Family("general", "llama", partial(_from_recipe, RECIPES["llama"])),
    Family("general", "mixtral", partial(_from_recipe, RECIPES["mixtral"])),
    Family("general", "mamba", partial(_from_recipe, RECIPES["mamba"])),
    Family("general", "bert", partial(_from_recipe, RECIPES["bert"])),
)


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """Run the model and return its loss, or where it has none the mean square of its first output."""
    output = model(**inputs)
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    first = output if isinstance(output, torch.Tensor) else next(iter(output.values()))
    if isinstance(first, tuple):  # the feature maps of a backbone
        first = first[-1]
    return first.square().mean()
