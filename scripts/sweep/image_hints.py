"""What families that see need to be told: how images come to them, sizes that have to fit."""

from __future__ import annotations

from typing import Any

from . import image_inputs as images
from . import part_inputs as parts
from .hint import GLM, GLM_HEADS, HALF_ROTARY, SECTIONS, Hint, pair

_GLM_IMAGE = Hint(size="whole heads", changes={"text_config.rope_parameters": HALF_ROTARY})
_GLM_MOE_IMAGE = Hint(size="whole heads", changes={f"text_config.{key}": value for key, value in GLM_HEADS.items()})
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


IMAGE_HINTS: dict[str, Hint] = {
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
    "lw_detr": Hint(changes={"projector_scale_factors": [1.0]}),
    "lxmert": Hint(added=("visual_feats", "visual_pos")),
    "minicpm_ocr_vision": Hint(inputs=images.patches_on_a_strip),
    "minicpmv4_6_vision": Hint(inputs=images.patches_on_a_strip),
    "minicpmv4_7_vision": Hint(inputs=images.patches_on_a_strip),
    "molmo2_adapter": Hint(inputs=images.features_of_crops),
    "oneformer": Hint(changes={"conv_dim": 64, "mask_dim": 64, "hidden_dim": 64}),
    "pp_ocrv5_server_det": Hint(changes=_SERVER_DET),
    "pp_ocrv5_mobile_rec": Hint(image=128),
    "sam2": Hint(size="small", changes={"vision_config.backbone_feature_sizes": _FEATURE_SIZES}),
    "sam2_vision_model": Hint(size="small", changes={"backbone_feature_sizes": _FEATURE_SIZES}),
    "slanext": Hint(
        model="SLANeXtForTableRecognition",
        size="small",
        changes={"max_text_length": 8, "post_conv_in_channels": 16, "post_conv_out_channels": 32},
    ),
    "siglip2": Hint(inputs=images.text_and_packed_patches),
    "sam3_tracker": Hint(size="small", changes={"vision_config.backbone_feature_sizes": _FEATURE_SIZES}),
    "seggpt": Hint(
        changes={"num_hidden_layers": 4, "merge_index": 0, "intermediate_hidden_state_indices": [0, 1, 2, 3]},
        inputs=images.image_pair,
    ),
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
    "swin2sr": Hint(changes={"image_size": 16, "depths": [2, 2], "num_heads": [6, 6]}),
    "timm_backbone": Hint(changes={"backbone": "resnet18"}),
    "tvp": Hint(changes={"max_img_size": 64, "visual_prompt_size": 16, "num_frames": 2}, inputs=images.text_and_clip),
    "uvdoc": Hint(changes={"backbone_config.out_features": [f"stage{number}" for number in range(1, 7)]}),
    "xclip_vision_model": Hint(inputs=images.frames_in_rows),
    "zoedepth": Hint(size="whole width"),
    "idefics": Hint(inputs=images.text_about_images),
    "inkling2_vision": Hint(inputs=images.merged_patches),
    "inkling_vision": Hint(inputs=images.pairs_of_patches),
    "kimi_k25_vision": Hint(inputs=images.patches_on_grids),
    "janus_vqgan": Hint(changes={"base_channels": 32, "num_patches": 4}),
    "llama4_vision_model": Hint(
        size="small", changes={"intermediate_size": 192, "projector_input_dim": 256, "projector_output_dim": 256}
    ),
    "mllama_vision_model": Hint(inputs=images.tiles, changes={"intermediate_layers_indices": [0, 1]}),
    "molmo2": Hint(changes={"adapter_config.vision_feature_layer": [1, 0]}, inputs=images.text_about_crops),
    "molmo2_vision": Hint(inputs=images.patches_in_rows),
    "paddleocr_vl_vision": Hint(inputs=images.patches_in_one_row),
    "pi0": Hint(inputs=parts.robot),
    "glm_image_text": GLM,
    "glm46v": _GLM_IMAGE,
    "glm4v": _GLM_IMAGE,
    "glm4v_moe": _GLM_MOE_IMAGE,
    "glm_image": _GLM_IMAGE,
    "florence_vision": Hint(inputs=images.image),
    "chameleon": Hint(changes={"vocabulary_map": {"<image>": 5}}),
    # The widths of the two parts that its default configuration puts together are those of two releases.
    "qwen2_vl": Hint(changes={"vision_config.hidden_size": 512, "text_config.rope_parameters": SECTIONS}),
    "colqwen2": Hint(
        changes={
            "vlm_config.vision_config.hidden_size": 512,
            "vlm_config.text_config.rope_parameters": SECTIONS,
        }
    ),
    "qwen2_5_vl": Hint(changes={"text_config.rope_parameters": SECTIONS}),
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
    "instructblip": Hint(changes={"image_token_index": 200}),
    "kosmos-2": Hint(inputs=images.grounded),
    "donut-swin": Hint(changes={"image_size": [320, 320]}),
    "vision-encoder-decoder": Hint(
        config=pair("VisionEncoderDecoderConfig", "from_encoder_decoder_configs", "vit", "gpt2")
    ),
    "blip_2_qformer": Hint(inputs=parts.qformer),
    "instructblip_qformer": Hint(inputs=parts.qformer_of_text),
    "instructblipvideo_qformer": Hint(inputs=parts.qformer_of_text),
    "sam3_detr_encoder": Hint(inputs=images.detr_encoder),
    "sam3_lite_text_detr_encoder": Hint(inputs=images.detr_encoder),
    "sam3_detr_decoder": Hint(inputs=images.detr_decoder),
    "sam3_lite_text_detr_decoder": Hint(inputs=images.detr_decoder),
    "sam3_mask_decoder": Hint(inputs=images.mask_decoder),
    "sam3_lite_text_mask_decoder": Hint(inputs=images.mask_decoder),
    "unlimited_ocr_vision_encoder": Hint(inputs=images.embedded_patches),
    "deepseek_ocr2_encoder": Hint(inputs=images.patches_as_prefix),
    "gemma4_vision": Hint(inputs=images.packed_patches),
    "siglip2_vision_model": Hint(inputs=images.packed_patches),
    "video_llama_3_vision": Hint(inputs=images.packed_grids),
    "omdet-turbo": Hint(inputs=images.image_and_classes),
    "jev": Hint(inputs=parts.questions),
}
