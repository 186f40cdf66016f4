"""Which models each shipped policy is tested on: a tiny real model for every name that it claims to serve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.support.model_zoo import RECIPES, VOCAB, Recipe, build
from tests.support.plain_zoo import plain

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


def _all_like(family: str, *prefixes: str) -> dict[str, Recipe]:
    """The same for several whose names are their prefixes in small letters."""
    return {prefix.lower(): _like(family, prefix) for prefix in prefixes}


def _decoder(prefix: str, **fields: Any) -> Recipe:
    """Return the recipe of a decoder whose config has words of its own for its sizes."""
    return Recipe(f"{prefix}Config", f"{prefix}ForCausalLM", fields, RECIPES["gpt2"].inputs)


_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _tower(prefix: str) -> Recipe:
    """Return a vision tower alone: it has no loss, so its output is trained on."""
    inputs = RECIPES["vit"].inputs
    fields = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64}
    fields |= {"image_size": 16, "patch_size": 8}
    return Recipe(f"{prefix}Config", f"{prefix}Model", fields, lambda: {"pixel_values": inputs()["pixel_values"]})


_RESIDUAL = {"embedding_size": 16, "hidden_sizes": [64, 128], "depths": [2, 2]}


def _picture() -> dict[str, Any]:
    """Return an image that is large enough to be halved five times."""
    return {"pixel_values": torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(2))}


_DETECTOR = {
    "encoder_in_channels": [64, 128, 256],
    "decoder_in_channels": [32, 32, 32],
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{"d_model": 32, "encoder_hidden_dim": 32, "decoder_layers": 2, "num_queries": 8, "num_denoising": 0},
    "disable_custom_kernels": True,
}
_NETWORK = {"embedding_size": 16, "hidden_sizes": [32, 64, 128, 256], "depths": [2] * 4, "out_indices": [2, 3, 4]}


def _detector(prefix: str) -> Recipe:
    """Return a detector: a network whose norms are frozen, below a transformer."""
    parts = {"backbone_config": ("RTDetrResNetConfig", _NETWORK)}
    return Recipe(f"{prefix}Config", f"{prefix}ForObjectDetection", _DETECTOR, _picture, parts)


# What the zoo lacks, by policy. Families of the zoo itself are in _ZOO, by the name that `models` has for them.
_MORE: dict[str, dict[str, Recipe]] = {
    "llama": {
        **_all_like("llama", "Ministral3", "Granite", "Olmo", "StableLm", "Cohere", "Cohere2", "Ernie4_5"),
        **_all_like("qwen3", "Cwm", "Glm"),
        "seed_oss": _like("qwen3", "SeedOss", residual_dropout=0.1),
    },
    "gemma": {
        "vaultgemma": _like("gemma2", "VaultGemma"),
        "olmo2": _like("llama", "Olmo2"),
        "olmo3": _like("llama", "Olmo3", sliding_window=8),
        **_all_like("qwen3", "Exaone4", "Glm4"),
    },
    "gpt2": {
        **_all_like("llama", "BioGpt", "Persimmon", "Phi", "Starcoder2", "Nemotron", "Arcee", "Apertus", "Jais2"),
        "gpt_neox_japanese": _like("gpt_neox", "GPTNeoXJapanese"),
        "gpt_bigcode": _decoder("GPTBigCode", **RECIPES["gpt2"].fields),
        "gptj": _decoder("GPTJ", **RECIPES["gpt2"].fields, rotary_dim=8),
        "codegen": _decoder("CodeGen", **RECIPES["gpt2"].fields, rotary_dim=8),
        "mpt": _decoder("Mpt", vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
        "xglm": _decoder("XGLM", vocab_size=VOCAB, d_model=32, num_layers=2, attention_heads=4, ffn_dim=64),
        "gpt_neo": _decoder(
            "GPTNeo",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=8,
            max_position_embeddings=32,
        ),
    },
    "bert": {
        **_all_like("bert", "Camembert", "Electra", "Deberta", "MPNet", "Ernie", "Esm", "RemBert", "RoFormer"),
        **_all_like("bert", "LayoutLM", "ModernBert"),
        "xlm-roberta": _like("bert", "XLMRoberta"),
        "xlm-roberta-xl": _like("bert", "XLMRobertaXL"),
        "roberta-prelayernorm": _like("bert", "RobertaPreLayerNorm"),
        "deberta-v2": _like("bert", "DebertaV2"),
        "megatron-bert": _like("bert", "MegatronBert"),
        "data2vec-text": _like("bert", "Data2VecText"),
    },
    "t5": {
        **_all_like("t5", "MT5", "UMT5", "LongT5"),
        **_all_like("bart", "MBart", "Pegasus", "PLBart", "Blenderbot"),
        "marian": Recipe("MarianConfig", "MarianMTModel", RECIPES["bart"].fields, RECIPES["bart"].inputs),
        "m2m_100": _like("bart", "M2M100", encoder_layerdrop=0.0, decoder_layerdrop=0.0),
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
    "mixtral": {"phimoe": _like("llama", "Phimoe", **_MOE), "flex_olmo": _like("llama", "FlexOlmo", **_MOE)},
    "deepseek_v3": {
        **_all_like("deepseek_v3", "MiniCPM3", "Youtu"),
        "deepseek_v2": _like("deepseek_v3", "DeepseekV2", q_lora_rank=None),
        "deepseek_v32": _like("deepseek_v3", "DeepseekV32", index_topk=8, index_head_dim=8, index_n_heads=2),
        "glm4_moe_lite": _like("deepseek_v3", "Glm4MoeLite"),
    },
    "vit": {
        **_all_like("vit", "Beit", "IJepa"),
        "vit_msn": _like("vit", "ViTMSN"),
        "data2vec-vision": _like("vit", "Data2VecVision"),
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
            "llama", "RecurrentGemma", block_types=["recurrent", "attention"], lru_width=32, attention_window_size=8
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

_PLAIN = {"Llama3Model": "llama", "VisionTransformer": "vit", "DiT": "vit"}


def _from_recipe(recipe: Recipe, dropout: float) -> Built:
    return build(recipe, dropout=dropout)


def _from_plain(name: str, dropout: float) -> Built:
    return plain(name, dropout=dropout)


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
    *(Family(policy, name, partial(_from_plain, name)) for name, policy in _PLAIN.items()),
)

# What falls to `general`: a family of no policy, and a model that is no one's.
STRANGERS = tuple(
    Family("general", name, partial(_from_recipe, RECIPES[name])) for name in ("llama", "mixtral", "mamba", "bert")
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
