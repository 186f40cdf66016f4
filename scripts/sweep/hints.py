"""What a few families need to be told: a relation between fields, an input that no name explains."""

from __future__ import annotations

from . import part_inputs as parts
from . import sound_inputs as sounds
from .hint import GLM, GLM_HEADS, SECTIONS, Hint, pair
from .image_hints import IMAGE_HINTS

_SERIES = Hint(changes={"prediction_length": 8})
_ROUTED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 8, "n_shared_experts": 1}
_GLM_MOE = Hint(size="whole heads", changes=GLM_HEADS)
_HUNYUAN = Hint(changes={"head_dim": 32})
_FOUR_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4, 4]}
_COMPASS = {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
_FOLDING = {
    "folding_trunk_num_hidden_layers": 2,
    "num_loops": 1,
    "esmc_config.hidden_size": 128,
    "esmc_config.intermediate_size": 256,
    "esmc_config.num_attention_heads": 2,
    "esmc_config.num_key_value_heads": 2,
    "esmc_config.head_dim": 64,
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

HINTS: dict[str, Hint] = {
    **IMAGE_HINTS,
    "gemma4_unified_assistant": Hint(inputs=parts.drafted),
    "dots3_note_audio_encoder": Hint(changes={"adapter_input_size": 80}, inputs=sounds.chunks, size="small"),
    "moonshine_streaming": Hint(changes={"num_key_value_heads": 2}),  # its decoder asks for what it has no default of
    "neucodec": Hint(size="small", changes={"quantization_dim": 128}, inputs=sounds.waves_and_mels),
    "xcodec2": Hint(size="small", changes={"quantization_dim": 128}, inputs=sounds.waves_and_mels),
    "qwen4_exp_text": Hint(changes=_INDEXER),
    "qwen4_exp": Hint(changes={f"text_config.{key}": value for key, value in _INDEXER.items()}),
    "qwen2_5_omni_dit": Hint(inputs=sounds.diffused_mels),
    "qwen2_5_omni_bigvgan": Hint(size="small", changes={"upsample_initial_channel": 128}),
    "qwen2_5_omni_token2wav": Hint(
        size="small", changes={"bigvgan_config.upsample_initial_channel": 128}, inputs=sounds.conditioned_codes
    ),
    "step3p5": Hint(changes={"sliding_window": 16}),
    "step3p7": Hint(changes={"text_config.sliding_window": 16}),
    "esmfold2": Hint(size="few layers", changes=_FOLDING, inputs=parts.folded),
    "perceiver": Hint(size="small", inputs=parts.text_as_inputs),
    "speech_to_text": Hint(inputs=sounds.mels_and_text),
    "fastspeech2_conformer_hifigan": Hint(size="small", changes={"model_in_dim": 16}, inputs=sounds.mels_alone),
    "speecht5_hifigan": Hint(size="small", changes={"model_in_dim": 16}, inputs=sounds.mels_alone),
    "vibevoice_acoustic_tokenizer_encoder": Hint(changes={"num_filters": 4}, inputs=sounds.wave_as_states),
    "vibevoice_acoustic_tokenizer_decoder": Hint(changes={"num_filters": 4}, inputs=sounds.latents_as_states),
    "embedding_gemma2": Hint(inputs=parts.plain_text),
    "inkling_audio": Hint(inputs=sounds.quantized_mels),
    "t5gemma2_text": _T5_DROPOUT,
    "t5gemma2_decoder": Hint(changes={"dropout_rate": 0.1}, inputs=parts.decoded),
    "t5gemma2_encoder": Hint(changes={"text_config.dropout_rate": 0.1}),
    "vitmatte": Hint(size="small", changes={"hidden_size": 48, "fusion_hidden_sizes": [32, 16, 16, 16]}),
    # What a random predictor of durations draws is without bounds.
    "vits": Hint(
        size="small",
        changes={"use_stochastic_duration_prediction": False, "speaking_rate": 16.0},
        inputs=parts.short_text,
    ),
    "voxtral_realtime": Hint(inputs=sounds.text_beside_sound),
    "voxtral_realtime_text": Hint(inputs=sounds.text_at_a_time),
    "xmod": Hint(changes={"default_language": "en_XX"}),
    "zamba": Hint(changes=_SHARED_BLOCKS),
    "zamba2": Hint(changes=_SHARED_BLOCKS),
    "granite_speech5_ctc": Hint(inputs=sounds.joined_mels),
    "cohere_compass_text": Hint(size="small", changes={"rope_parameters": _COMPASS}),
    "cohere_compass": Hint(size="small", changes={"text_config.rope_parameters": _COMPASS}),
    "dbrx": Hint(changes={"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0}),
    "kyutai_speech_to_text": Hint(inputs=sounds.text_and_codes),
    "moshi_depth": Hint(inputs=sounds.one_of_each_codebook),
    "musicgen_decoder": Hint(inputs=sounds.codebooks_as_rows),
    "musicgen_melody_decoder": Hint(inputs=sounds.codebooks_as_rows),
    "lfm2_moe": Hint(changes={"layer_types": ["conv", "full_attention"]}),
    "ministral": Hint(changes={"head_dim": 32}),
    "nemotron": Hint(changes={"num_key_value_heads": 4, "head_dim": 32}),
    "muse_spark": Hint(changes={"audio_config.num_hidden_layers": 4}),
    "muse_spark_audio": Hint(changes={"num_hidden_layers": 4}, inputs=sounds.whole_windows),
    "pix2struct_text_model": Hint(changes={"initializer_range": 0.02}),
    "pp_formulanet_text": Hint(inputs=parts.decoder_ids),
    "glm4v_text": GLM,
    "glm4v_moe_text": _GLM_MOE,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl_text": Hint(changes={"head_dim": 32, "rope_parameters": _FOUR_AXES}),
    "hunyuan_vl": Hint(changes={"text_config.head_dim": 32, "text_config.rope_parameters": _FOUR_AXES}),
    "gpt_neo": Hint(changes={"attention_types": [[["global", "local"], 1]], "num_layers": 2}),
    "fastspeech2_conformer": Hint(inputs=sounds.speech_of_text),
    "fastspeech2_conformer_with_hifigan": Hint(inputs=sounds.speech_of_text),
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": Hint(changes={"attn_layer_indices": [1]}),
    "deepseek_v2": Hint(changes={**_ROUTED, "moe_intermediate_size": 64}),
    "dots1": Hint(changes=_ROUTED),
    "qwen2_vl_text": Hint(changes={"rope_parameters": SECTIONS}),
    "qwen2_5_vl_text": Hint(changes={"rope_parameters": SECTIONS}),
    "qwen2_5_omni_audio_encoder": Hint(changes={"n_window": 16}, inputs=sounds.packed_mels),
    "qwen3_omni_moe_audio_encoder": Hint(inputs=sounds.packed_mels),
    "qwen3_omni_moe_talker_text": Hint(changes={"shared_expert_intermediate_size": 64}, inputs=sounds.embedded_codes),
    "deepseek_ocr2_text": Hint(
        changes={"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    ),
    "diffusion_gemma_text": Hint(changes=_EXPERTS),
    "diffusion_gemma": Hint(changes={f"text_config.{key}": value for key, value in _EXPERTS.items()}),
    "fun_asr_nano_encoder": Hint(inputs=sounds.stacked_mels),
    "granite_speech5_encoder": Hint(inputs=sounds.joined_mels),
    "instructblipvideo": Hint(changes={"video_token_index": 200}),
    # Eight channels by default, of which a random state takes more than a layer does.
    "patchtsmixer": Hint(changes={"d_model": 64, "context_length": 128}),
    "qwen3_omni_moe_talker_code_predictor": Hint(
        model="Qwen3OmniMoeTalkerCodePredictorModel", inputs=sounds.embedded_codes
    ),
    "reformer": Hint(changes={"axial_pos_embds": False}),
    "esm": Hint(changes={"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    "encoder-decoder": Hint(config=pair("EncoderDecoderConfig", "from_encoder_decoder_configs", "bert", "bert")),
    "speech-encoder-decoder": Hint(
        config=pair("SpeechEncoderDecoderConfig", "from_encoder_decoder_configs", "wav2vec2", "bert"),
        inputs=sounds.wave_and_text,
    ),
    "rag": Hint(
        model="RagTokenForGeneration",
        config=pair("RagConfig", "from_question_encoder_generator_configs", "dpr", "bart"),
        inputs=parts.retrieved,
    ),
    "blt_local_encoder": Hint(inputs=parts.bytes_to_patches),
    "blt_local_decoder": Hint(inputs=parts.patches_to_bytes),
    "dia": Hint(inputs=sounds.several_codebooks),
    "dia_decoder": Hint(inputs=sounds.several_codebooks),
    "muse_glimmer_assistant": Hint(inputs=parts.noise_and_context),
    "idefics2_perceiver": Hint(inputs=parts.perceiver),
    "gemma3n_audio": Hint(inputs=sounds.mels_and_mask),
    "phi4_multimodal_audio": Hint(inputs=sounds.frames_and_mask),
    "mimi_decoder": Hint(inputs=sounds.latents),
    "pocket_tts_audio_tokenizer_decoder": Hint(inputs=sounds.latents),
}
