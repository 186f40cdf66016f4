"""What a few families need to be told: a relation between fields, an input that no name explains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import part_inputs as parts
from .shrinking import Size, small_config


@dataclass(frozen=True)
class Hint:
    """How one family differs from what is done for all."""

    model: str = ""  # the class to take
    size: str = ""  # the only size that is tried
    changes: Mapping[str, Any] = field(default_factory=dict)  # fields of the configuration, by path
    config: Callable[[Size], Any] | None = None
    inputs: parts.Inputs | None = None
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
_ROUTED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "n_routed_experts": 8}

HINTS: dict[str, Hint] = {
    "autoformer": _SERIES,
    "informer": _SERIES,
    "time_series_transformer": _SERIES,
    "bamba": Hint(changes={"attn_layer_indices": [1]}),
    "deepseek_v2": Hint(changes=_ROUTED),
    "dots1": Hint(changes=_ROUTED),
    "chameleon": Hint(changes={"vocabulary_map": {"<image>": 5}}),
    # The widths of the two parts that its default configuration puts together are those of two releases.
    "qwen2_vl": Hint(changes={"vision_config.hidden_size": 512}),
    "encoder-decoder": Hint(config=_pair("EncoderDecoderConfig", "from_encoder_decoder_configs", "bert", "bert")),
    "vision-encoder-decoder": Hint(
        config=_pair("VisionEncoderDecoderConfig", "from_encoder_decoder_configs", "vit", "gpt2")
    ),
    "speech-encoder-decoder": Hint(
        config=_pair("SpeechEncoderDecoderConfig", "from_encoder_decoder_configs", "wav2vec2", "bert")
    ),
    "rag": Hint(
        model="RagTokenForGeneration",
        config=_pair("RagConfig", "from_question_encoder_generator_configs", "dpr", "bart"),
        inputs=parts.retrieved,
    ),
    "blip_2_qformer": Hint(inputs=parts.qformer),
    "instructblip_qformer": Hint(inputs=parts.qformer),
    "instructblipvideo_qformer": Hint(inputs=parts.qformer),
    "blt_local_encoder": Hint(inputs=parts.bytes_to_patches),
    "blt_local_decoder": Hint(inputs=parts.patches_to_bytes),
    "sam3_detr_encoder": Hint(inputs=parts.detr_encoder),
    "sam3_lite_text_detr_encoder": Hint(inputs=parts.detr_encoder),
    "sam3_detr_decoder": Hint(inputs=parts.detr_decoder),
    "sam3_lite_text_detr_decoder": Hint(inputs=parts.detr_decoder),
    "sam3_mask_decoder": Hint(inputs=parts.mask_decoder),
    "sam3_lite_text_mask_decoder": Hint(inputs=parts.mask_decoder),
    "dia": Hint(inputs=parts.several_codebooks),
    "dia_decoder": Hint(inputs=parts.several_codebooks),
    "unlimited_ocr_vision_encoder": Hint(inputs=parts.embedded_patches),
    "muse_glimmer_assistant": Hint(inputs=parts.noise_and_context),
    "idefics2_perceiver": Hint(inputs=parts.perceiver),
    "deepseek_ocr2_encoder": Hint(inputs=parts.patches_as_prefix),
    "gemma4_vision": Hint(inputs=parts.packed_patches),
    "siglip2_vision_model": Hint(inputs=parts.packed_patches),
    "video_llama_3_vision": Hint(inputs=parts.packed_grids),
    "gemma3n_audio": Hint(inputs=parts.mels_and_mask),
    "phi4_multimodal_audio": Hint(inputs=parts.frames_and_mask),
    "mimi_decoder": Hint(inputs=parts.latents),
    "pocket_tts_audio_tokenizer_decoder": Hint(inputs=parts.latents),
    "seggpt": Hint(inputs=parts.image_pair),
    "omdet-turbo": Hint(inputs=parts.image_and_classes),
    "jev": Hint(inputs=parts.questions),
}
