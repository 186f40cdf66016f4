"""What a few families need to be told: a relation between fields, an input that no name explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import image_inputs as images
from . import part_inputs as parts
from . import sound_inputs as sounds
from .drawing import Inputs
from .shrinking import Size, small_config


@dataclass(frozen=True)
class Hint:
    """How one family differs from what is done for all."""

    model: str = ""  # the class to take
    size: str = ""  # the only size that is tried
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration, by path
    config: Callable[[Size], Any] | None = None
    inputs: Inputs | None = None
    added: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    image: int = 0


def _pair(wrapper: str, method: str, first: str, second: str) -> Callable[[Size], Any]:
    """A configuration that has no default: it is made of two others."""

    def config(size: Size) -> Any:
        import transformers

        halves = [small_config(transformers.CONFIG_MAPPING[name], size, {}) for name in (first, second)]
        whole = getattr(getattr(transformers, wrapper), method)(*halves)
        whole.decoder_start_token_id, whole.pad_token_id = 1, 0
        return whole

    return config


_SERIES = Hint(changes={"prediction_length": 8})
_ROUTED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}

# The defaults of these rotate other shares of a head than their sections say.
_HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [8, 12, 12]}
_GLM = Hint(size="whole heads", changes={"rope_parameters": _HALF_ROTARY})
_GLM_IMAGE = Hint(size="whole heads", changes={"text_config.rope_parameters": _HALF_ROTARY})
_GLM_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2, "rope_parameters": _HALF_ROTARY}
_GLM_MOE = Hint(size="whole heads", changes=_GLM_HEADS)
_GLM_MOE_IMAGE = Hint(size="whole heads", changes={f"text_config.{key}": value for key, value in _GLM_HEADS.items()})
_HUNYUAN = Hint(changes={"head_dim": 32})
_FOUR_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4, 4]}

_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}  # of the 16 pairs of a small head
_COMPASS = {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}

_FEW_IMAGE_TOKENS = {f"<|visual token {code:06d}|>": code + 8 for code in range(32)}
_CODES = {"<image>": 5, "<|extra_200|>": 6, **_FEW_IMAGE_TOKENS}

_KERNELS = {
    f"{name}_{ratio}ratio": [[across, down], [1, 1], [across // 2, down // 2]]
    for ratio, side in (("long", 7), ("mid", 5), ("short", 3))
    for name, across, down in (
        ("vertical_long_to_small_conv", side, 1),
        ("horizontal_small_to_long_conv", 1, side),
        ("symmetric_conv_long", side, side),
    )
}
_SERVER_DET = {
    "intraclass_block_config": {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0], **_KERNELS},
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
# The default backbone is that of a recogniser: it gives its last stage, and halves only the height in the last two.
_HALVING = {
    "backbone_config.out_features": ["stage1", "stage2", "stage3", "stage4"],
    "backbone_config.block_configs": [
        [[3, 96, 96, 1, True]],
        [[3, 96, 96, 2, False], [3, 96, 96, 1, False]],
        [[3, 96, 192, 2, False], [3, 192, 192, 1, True]],
        [[3, 192, 384, 2, False], [3, 384, 384, 1, True]],
    ],
}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_T5_DROPOUT = Hint(changes={"dropout_rate": 0.1})
_SHARED_BLOCKS = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
}

_FEATURE_SIZES = [[16, 16], [8, 8], [4, 4]]  # of an image of 64 x 64 pixels
_GEMMA3N = {
    "text_config.vocab_size_per_layer_input": 256,
    "text_config.hidden_size_per_layer_input": 16,
    "vision_config.architecture": "resnet18",
}
_PERCEPTION = {
    "vision_config.architecture": "vit_pe_core_tiny_patch16_384",
    "vision_config.model_args": {"embed_dim": 192, "img_size": [64, 64], "depth": 2, "global_pool": ""},
}


def _timm_tower(path: str) -> dict[str, Any]:
    return {
        f"{path}.architecture": "vit_pe_core_tiny_patch16_384",
        f"{path}.model_args": {"img_size": [64, 64], "depth": 2},
    }


HINTS: dict[str, Hint] = {
    "aya_vision": Hint(changes={"vision_config.num_attention_heads": 4}),  # 14 do not divide its width
    "blip-2": Hint(changes={"image_token_index": 200}),
    "emu3": Hint(changes={"vocabulary_map": _CODES, "vq_config.base_channels": 32, "vq_config.codebook_size": 32}),
    "granite4_vision": Hint(
        changes={
            "vision_config.hidden_size": 64,
            "vision_config.num_attention_heads": 4,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0]],
            "spatial_target_layers": [1],
        }
    ),
    "gemma4_unified_assistant": Hint(inputs=parts.drafted),
    "dots3_note_audio_encoder": Hint(changes={"adapter_input_size": 80}, inputs=sounds.chunks, size="small"),
    "lw_detr": Hint(changes={"projector_scale_factors": [1.0]}),
    "lxmert": Hint(added=("visual_feats", "visual_pos")),
    "minicpm_ocr_vision": Hint(inputs=images.patches_on_a_strip),
    "minicpmv4_6_vision": Hint(inputs=images.patches_on_a_strip),
    "minicpmv4_7_vision": Hint(inputs=images.patches_on_a_strip),
    "molmo2_adapter": Hint(inputs=images.features_of_crops),
    "moonshine_streaming": Hint(changes={"num_key_value_heads": 2}),  # its decoder asks for what it has no default of
    "neucodec": Hint(size="small", changes={"quantization_dim": 128}, inputs=sounds.waves_and_mels),
    "xcodec2": Hint(size="small", changes={"quantization_dim": 128}, inputs=sounds.waves_and_mels),
    "oneformer": Hint(changes={"conv_dim": 64, "mask_dim": 64, "hidden_dim": 64}),
    "pp_ocrv5_server_det": Hint(changes=_SERVER_DET),
    "pp_ocrv5_mobile_rec": Hint(image=128),
    "qwen4_exp_text": Hint(changes=_INDEXER),
    "qwen4_exp": Hint(changes={f"text_config.{key}": value for key, value in _INDEXER.items()}),
    "qwen2_5_omni_dit": Hint(inputs=sounds.diffused_mels),
    "qwen2_5_omni_bigvgan": Hint(size="small", changes={"upsample_initial_channel": 128}),
    "qwen2_5_omni_token2wav": Hint(
        size="small", changes={"bigvgan_config.upsample_initial_channel": 128}, inputs=sounds.conditioned_codes
    ),
    "sam2": Hint(size="small", changes={"vision_config.backbone_feature_sizes": _FEATURE_SIZES}),
    "sam2_vision_model": Hint(size="small", changes={"backbone_feature_sizes": _FEATURE_SIZES}),
    "step3p5": Hint(changes={"sliding_window": 16}),
    "step3p7": Hint(changes={"text_config.sliding_window": 16}),
    "slanext": Hint(
        model="SLANeXtForTableRecognition",
        size="small",
        changes={"max_text_length": 8, "post_conv_in_channels": 16, "post_conv_out_channels": 32},
    ),
    "perceiver": Hint(size="small", inputs=parts.text_as_inputs),
    "siglip2": Hint(inputs=images.text_and_packed_patches),
    "sam3_tracker": Hint(size="small", changes={"vision_config.backbone_feature_sizes": _FEATURE_SIZES}),
    "speech_to_text": Hint(inputs=sounds.mels_and_text),
    "speecht5_hifigan": Hint(size="small", changes={"model_in_dim": 16}, inputs=sounds.mels_alone),
    "seggpt": Hint(
        changes={"num_hidden_layers": 4, "merge_index": 0, "intermediate_hidden_state_indices": [0, 1, 2, 3]},
        inputs=images.image_pair,
    ),
    "vibevoice_acoustic_tokenizer_encoder": Hint(changes={"num_filters": 4}, inputs=sounds.wave_as_states),
    "vibevoice_acoustic_tokenizer_decoder": Hint(changes={"num_filters": 4}, inputs=sounds.latents_as_states),
    "embedding_gemma2": Hint(inputs=parts.plain_text),
    "gemma3n": Hint(changes=_GEMMA3N, inputs=parts.plain_text),  # its tower of images has 300 M parameters
    "pp_ocrv6_medium_det": Hint(changes={**_SERVER_DET, **_HALVING}),
    "pp_ocrv6_small_det": Hint(changes={"layer_list_out_channels": [96, 96, 192, 384], **_HALVING}),
    "perception_lm": Hint(changes=_PERCEPTION),
    "pe_video_encoder": Hint(changes=_timm_tower("vision_config"), inputs=images.frames),
    "pe_video": Hint(changes=_timm_tower("video_config.vision_config"), inputs=images.text_and_frames),
    "pe_audio_video_encoder": Hint(changes=_timm_tower("video_config.vision_config"), inputs=images.frames_and_sound),
    "pe_audio_video": Hint(
        changes=_timm_tower("audio_video_config.video_config.vision_config"), inputs=images.text_frames_and_sound
    ),
    "inkling_audio": Hint(inputs=sounds.quantized_mels),
    "swin2sr": Hint(changes={"image_size": 16, "depths": [2, 2], "num_heads": [6, 6]}),
    "t5gemma2_text": _T5_DROPOUT,
    "t5gemma2_decoder": Hint(changes={"dropout_rate": 0.1}, inputs=parts.decoded),
    "t5gemma2_encoder": Hint(changes={"text_config.dropout_rate": 0.1}),
    "timm_backbone": Hint(changes={"backbone": "resnet18"}),
    "tvp": Hint(changes={"max_img_size": 64, "visual_prompt_size": 16, "num_frames": 2}, inputs=images.text_and_clip),
    "uvdoc": Hint(changes={"backbone_config.out_features": [f"stage{number}" for number in range(1, 7)]}),
    "vitmatte": Hint(size="small", changes={"hidden_size": 48, "fusion_hidden_sizes": [32, 16, 16, 16]}),
    # What a random predictor of durations draws is without bounds.
    "vits": Hint(
        size="small",
        changes={"use_stochastic_duration_prediction": False, "speaking_rate": 16.0},
        inputs=parts.short_text,
    ),
    "voxtral_realtime": Hint(inputs=sounds.text_beside_sound),
    "voxtral_realtime_text": Hint(inputs=sounds.text_at_a_time),
    "xclip_vision_model": Hint(inputs=images.frames_in_rows),
    "xmod": Hint(changes={"default_language": "en_XX"}),
    "zamba": Hint(changes=_SHARED_BLOCKS),
    "zamba2": Hint(changes=_SHARED_BLOCKS),
    "zoedepth": Hint(size="whole width"),
    "granite_speech5_ctc": Hint(inputs=sounds.joined_mels),
    "idefics": Hint(inputs=images.text_about_images),
    "inkling2_vision": Hint(inputs=images.merged_patches),
    "inkling_vision": Hint(inputs=images.pairs_of_patches),
    "kimi_k25_vision": Hint(inputs=images.patches_on_grids),
    "janus_vqgan": Hint(changes={"base_channels": 32, "num_patches": 4}),
    "cohere_compass_text": Hint(size="small", changes={"rope_parameters": _COMPASS}),
    "cohere_compass": Hint(size="small", changes={"text_config.rope_parameters": _COMPASS}),
    "dbrx": Hint(changes={"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0}),
    "kyutai_speech_to_text": Hint(inputs=sounds.text_and_codes),
    "moshi_depth": Hint(inputs=sounds.one_of_each_codebook),
    "musicgen_decoder": Hint(inputs=sounds.codebooks_as_rows),
    "musicgen_melody_decoder": Hint(inputs=sounds.codebooks_as_rows),
    "lfm2_moe": Hint(changes={"layer_types": ["conv", "full_attention"]}),
    "llama4_vision_model": Hint(
        size="small", changes={"intermediate_size": 192, "projector_input_dim": 256, "projector_output_dim": 256}
    ),
    "ministral": Hint(changes={"head_dim": 32}),
    "nemotron": Hint(changes={"num_key_value_heads": 4, "head_dim": 32}),
    "mllama_vision_model": Hint(inputs=images.tiles, changes={"intermediate_layers_indices": [0, 1]}),
    "molmo2": Hint(changes={"adapter_config.vision_feature_layer": [1, 0]}, inputs=images.text_about_crops),
    "molmo2_vision": Hint(inputs=images.patches_in_rows),
    "muse_spark": Hint(changes={"audio_config.num_hidden_layers": 4}),
    "muse_spark_audio": Hint(changes={"num_hidden_layers": 4}, inputs=sounds.whole_windows),
    "paddleocr_vl_vision": Hint(inputs=images.patches_in_one_row),
    "pi0": Hint(inputs=parts.robot),
    "pix2struct_text_model": Hint(changes={"initializer_range": 0.02}),
    "pp_formulanet_text": Hint(inputs=parts.decoder_ids),
    "glm4v_text": _GLM,
    "glm4v_moe_text": _GLM_MOE,
    "glm_image_text": _GLM,
    "glm46v": _GLM_IMAGE,
    "glm4v": _GLM_IMAGE,
    "glm4v_moe": _GLM_MOE_IMAGE,
    "glm_image": _GLM_IMAGE,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl_text": Hint(changes={"head_dim": 32, "rope_parameters": _FOUR_AXES}),
    "hunyuan_vl": Hint(changes={"text_config.head_dim": 32, "text_config.rope_parameters": _FOUR_AXES}),
    "gpt_neo": Hint(changes={"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "florence_vision": Hint(inputs=images.image),
    "fastspeech2_conformer": Hint(inputs=sounds.speech_of_text),
    "fastspeech2_conformer_with_hifigan": Hint(inputs=sounds.speech_of_text),
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": Hint(changes={"attn_layer_indices": [1]}),
    "deepseek_v2": Hint(changes={**_ROUTED, "moe_intermediate_size": 64}),
    "dots1": Hint(changes=_ROUTED),
    "chameleon": Hint(changes={"vocabulary_map": {"<image>": 5}}),
    # The widths of the two parts that its default configuration puts together are those of two releases.
    "qwen2_vl": Hint(changes={"vision_config.hidden_size": 512, "text_config.rope_parameters": _SECTIONS}),
    "colqwen2": Hint(
        changes={
            "vlm_config.vision_config.hidden_size": 512,
            "vlm_config.text_config.rope_parameters": _SECTIONS,
        }
    ),
    "qwen2_vl_text": Hint(changes={"rope_parameters": _SECTIONS}),
    "qwen2_5_vl_text": Hint(changes={"rope_parameters": _SECTIONS}),
    "qwen2_5_vl": Hint(changes={"text_config.rope_parameters": _SECTIONS}),
    "qwen2_5_omni_audio_encoder": Hint(changes={"n_window": 16}, inputs=sounds.packed_mels),
    "qwen3_omni_moe_audio_encoder": Hint(inputs=sounds.packed_mels),
    "qwen3_omni_moe_talker_text": Hint(changes={"shared_expert_intermediate_size": 64}, inputs=sounds.embedded_codes),
    "deepseek_ocr2_text": Hint(
        changes={"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    ),
    "deepseek_ocr2_vision": Hint(size="small", changes={"sam_config.downsample_channels": [64, 256]}),
    "deepseek_ocr2": Hint(
        size="small",
        changes={
            "text_config.mlp_layer_types": ["dense", "sparse"],
            "text_config.num_experts_per_tok": 2,
            "text_config.moe_intermediate_size": 64,
            "vision_config.sam_config.downsample_channels": [64, 256],
        },
    ),
    "diffusion_gemma_text": Hint(changes=_EXPERTS),
    "diffusion_gemma": Hint(changes={f"text_config.{key}": value for key, value in _EXPERTS.items()}),
    "dots3_note": Hint(
        size="small",
        # as many layers as its table of experts has
        changes={"vision_config.num_hidden_layers": 42, "audio_config.adapter_input_size": 80},
    ),
    "dots3_note_vision_encoder": Hint(changes={"num_hidden_layers": 42}),
    "depth_pro": Hint(
        changes={
            "patch_size": 64,
            "intermediate_hook_ids": [1, 0],
            "image_model_config.image_size": 64,
            "patch_model_config.image_size": 64,
            "fov_model_config.image_size": 64,
        },
        image=256,
    ),
    # Its default says `archirecture`, so that its own widths do not fit.
    "edgetam": Hint(
        changes={
            "vision_config.backbone_config.architecture": "repvit_m1",
            "vision_config.backbone_feature_sizes": _FEATURE_SIZES,
        }
    ),
    "edgetam_vision_model": Hint(changes={"backbone_config.architecture": "repvit_m1"}),
    "fun_asr_nano_encoder": Hint(inputs=sounds.stacked_mels),
    "granite_speech5_encoder": Hint(inputs=sounds.joined_mels),
    "instructblip": Hint(changes={"image_token_index": 200}),
    "instructblipvideo": Hint(changes={"video_token_index": 200}),
    "kosmos-2": Hint(inputs=images.grounded),
    # Eight channels by default, of which a random state takes more than a layer does.
    "patchtsmixer": Hint(changes={"d_model": 64, "context_length": 128}),
    "qwen3_omni_moe_talker_code_predictor": Hint(
        model="Qwen3OmniMoeTalkerCodePredictorModel", inputs=sounds.embedded_codes
    ),
    "reformer": Hint(changes={"axial_pos_embds": False}),
    "donut-swin": Hint(changes={"image_size": [320, 320]}),
    "esm": Hint(changes={"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    "encoder-decoder": Hint(config=_pair("EncoderDecoderConfig", "from_encoder_decoder_configs", "bert", "bert")),
    "vision-encoder-decoder": Hint(
        config=_pair("VisionEncoderDecoderConfig", "from_encoder_decoder_configs", "vit", "gpt2")
    ),
    "speech-encoder-decoder": Hint(
        config=_pair("SpeechEncoderDecoderConfig", "from_encoder_decoder_configs", "wav2vec2", "bert"),
        inputs=sounds.wave_and_text,
    ),
    "rag": Hint(
        model="RagTokenForGeneration",
        config=_pair("RagConfig", "from_question_encoder_generator_configs", "dpr", "bart"),
        inputs=parts.retrieved,
    ),
    "blip_2_qformer": Hint(inputs=parts.qformer),
    "instructblip_qformer": Hint(inputs=parts.qformer_of_text),
    "instructblipvideo_qformer": Hint(inputs=parts.qformer_of_text),
    "blt_local_encoder": Hint(inputs=parts.bytes_to_patches),
    "blt_local_decoder": Hint(inputs=parts.patches_to_bytes),
    "sam3_detr_encoder": Hint(inputs=images.detr_encoder),
    "sam3_lite_text_detr_encoder": Hint(inputs=images.detr_encoder),
    "sam3_detr_decoder": Hint(inputs=images.detr_decoder),
    "sam3_lite_text_detr_decoder": Hint(inputs=images.detr_decoder),
    "sam3_mask_decoder": Hint(inputs=images.mask_decoder),
    "sam3_lite_text_mask_decoder": Hint(inputs=images.mask_decoder),
    "dia": Hint(inputs=sounds.several_codebooks),
    "dia_decoder": Hint(inputs=sounds.several_codebooks),
    "unlimited_ocr_vision_encoder": Hint(inputs=images.embedded_patches),
    "muse_glimmer_assistant": Hint(inputs=parts.noise_and_context),
    "idefics2_perceiver": Hint(inputs=parts.perceiver),
    "deepseek_ocr2_encoder": Hint(inputs=images.patches_as_prefix),
    "gemma4_vision": Hint(inputs=images.packed_patches),
    "siglip2_vision_model": Hint(inputs=images.packed_patches),
    "video_llama_3_vision": Hint(inputs=images.packed_grids),
    "gemma3n_audio": Hint(inputs=sounds.mels_and_mask),
    "phi4_multimodal_audio": Hint(inputs=sounds.frames_and_mask),
    "mimi_decoder": Hint(inputs=sounds.latents),
    "pocket_tts_audio_tokenizer_decoder": Hint(inputs=sounds.latents),
    "omdet-turbo": Hint(inputs=images.image_and_classes),
    "jev": Hint(inputs=parts.questions),
}
