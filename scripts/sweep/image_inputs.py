"""Inputs of parts of models that see: what a processor of images or the rest of the model would hand them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .drawing import BATCH, SEQ, SIDE, drawn_ids, floats


def image(model: Any) -> dict[str, Any]:
    return {"hidden_states": floats(BATCH, 3, 64, 64)}


def detr_encoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "vision_features": [floats(BATCH, hidden, SIDE, SIDE)],
        "text_features": floats(BATCH, SEQ, hidden),
        "vision_pos_embeds": [floats(BATCH, hidden, SIDE, SIDE)],
    }


def detr_decoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "vision_features": floats(BATCH, SIDE * SIDE, hidden),
        "text_features": floats(BATCH, SEQ, hidden),
        "vision_pos_encoding": floats(BATCH, SIDE * SIDE, hidden),
        "spatial_shapes": torch.tensor([[SIDE, SIDE]]),
    }


def mask_decoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "decoder_queries": floats(BATCH, 10, hidden),
        "backbone_features": [floats(BATCH, hidden, side, side) for side in (4 * SIDE, 2 * SIDE, SIDE)],
        "encoder_hidden_states": floats(BATCH, SIDE * SIDE, hidden),
    }


def embedded_patches(model: Any) -> dict[str, Any]:
    return {"patch_embeds": floats(BATCH, model.config.hidden_size, SIDE, SIDE)}


def patches_as_prefix(model: Any) -> dict[str, Any]:
    return {"inputs_embeds": floats(BATCH, SEQ, model.config.hidden_size), "num_patches": SIDE}


def packed_patches(model: Any) -> dict[str, Any]:
    """Images of 4 x 4 patches, flattened, with where each patch is."""
    config = model.config
    channels = getattr(config, "num_channels", 3)
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), dim=-1).view(16, 2)
    return {
        "pixel_values": floats(BATCH, 16, channels * config.patch_size**2),
        "pixel_position_ids": place.expand(BATCH, 16, 2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def packed_grids(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "pixel_values": floats(BATCH * 16, config.num_channels * config.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "merge_sizes": torch.tensor([2] * BATCH),
    }


def image_pair(model: Any) -> dict[str, Any]:
    height, width = model.config.image_size
    return {
        "pixel_values": floats(BATCH, 3, height // 2, width),
        "prompt_pixel_values": floats(BATCH, 3, height // 2, width),
        "prompt_masks": floats(BATCH, 3, height // 2, width),
    }


def image_and_classes(model: Any) -> dict[str, Any]:
    side = model.config.image_size
    classes = 3
    return {
        "pixel_values": floats(1, 3, side, side),
        "classes_input_ids": drawn_ids(100, classes, 5),
        "classes_attention_mask": torch.ones(classes, 5, dtype=torch.long),
        "tasks_input_ids": drawn_ids(100, 1, 5),
        "tasks_attention_mask": torch.ones(1, 5, dtype=torch.long),
        "classes_structure": torch.tensor([classes]),
    }


def tiles(model: Any) -> dict[str, Any]:
    config = model.config
    side, most = config.image_size, config.max_num_tiles
    return {
        "pixel_values": floats(BATCH, 1, most, config.num_channels, side, side),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, most, dtype=torch.long),
    }


def patches_in_rows(model: Any) -> dict[str, Any]:
    config = model.config
    height, width = config.image_size
    count = height * width // config.patch_size**2
    return {"pixel_values": floats(BATCH, count, 3 * config.patch_size**2)}


def patches_in_one_row(model: Any) -> dict[str, Any]:
    config = model.config
    patches = floats(1, BATCH * 16, config.num_channels, config.patch_size, config.patch_size)
    return {"pixel_values": patches, "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


def grounded(model: Any) -> dict[str, Any]:
    """A text that begins with an image."""
    queries, side = model.config.latent_query_num, model.config.vision_config.image_size
    mask = torch.zeros(BATCH, queries + SEQ, dtype=torch.long)
    mask[:, :queries] = 1
    return {
        "input_ids": drawn_ids(64, BATCH, queries + SEQ) + 4,
        "pixel_values": floats(BATCH, 3, side, side),
        "image_embeds_position_mask": mask,
    }


def text_about_images(model: Any) -> dict[str, Any]:
    side = model.config.vision_config.image_size
    return {
        "input_ids": drawn_ids(64, BATCH, SEQ) + 4,
        "pixel_values": floats(BATCH, 1, 3, side, side),
        "image_attention_mask": torch.ones(BATCH, SEQ, 1, dtype=torch.long),
    }


def merged_patches(model: Any) -> dict[str, Any]:
    """Patches in groups: one piece for each token of the text, channels last."""
    config = model.config
    side = config.patch_size * config.spatial_merge_size
    return {
        "pixel_values": floats(BATCH * 4, side, side, config.num_channels),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * BATCH),
    }


def pairs_of_patches(model: Any) -> dict[str, Any]:
    config = model.config
    side = config.patch_size
    return {"pixel_values": floats(BATCH * 4, config.temporal_patch_size, side, side, config.num_channels)}


def patches_on_grids(model: Any) -> dict[str, Any]:
    """Patches as small images, with the grid that each image has of them."""
    side = model.config.patch_size
    return {
        "pixel_values": floats(BATCH * 16, 3, side, side),
        "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
    }


def patches_on_a_strip(model: Any) -> dict[str, Any]:
    """All patches of all images side by side."""
    config = model.config
    side = config.patch_size
    return {
        "pixel_values": floats(1, config.num_channels, side, BATCH * 16 * side),
        "target_sizes": torch.tensor([[4, 4]] * BATCH),
    }


def _pooled_pairs(count: int) -> Tensor:
    return torch.arange(2 * count).view(count, 2)


def features_of_crops(model: Any) -> dict[str, Any]:
    """Features of the patches of two crops, of which each token of the text pools two."""
    config = model.config
    width = config.hidden_size * len(config.vision_feature_layer)
    return {"image_features": floats(BATCH, 16, width), "pooled_patches_idx": _pooled_pairs(BATCH * 8)}


def text_about_crops(model: Any) -> dict[str, Any]:
    config = model.config
    vision = config.vision_config
    side = vision.image_size[0] if isinstance(vision.image_size, (list, tuple)) else vision.image_size
    patches = (side // vision.patch_size) ** 2
    tokens = torch.full((BATCH, patches // 2), config.image_token_id)
    ids = torch.cat([tokens, drawn_ids(64, BATCH, SEQ) + 4], dim=1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == config.image_token_id).long(),
        "pixel_values": floats(BATCH, patches, 3 * vision.patch_size**2),
        "image_token_pooling": _pooled_pairs(BATCH * (patches // 2)),
        "image_grids": torch.tensor([[1, patches // 2, 0, 0]] * BATCH),
    }


def frames_in_rows(model: Any) -> dict[str, Any]:
    config = model.config
    return {"pixel_values": floats(BATCH * config.num_frames, 3, config.image_size, config.image_size)}


def text_and_packed_patches(model: Any) -> dict[str, Any]:
    config = model.config
    seen = packed_patches(type("Vision", (), {"config": config.vision_config}))
    del seen["pixel_position_ids"]
    return {"input_ids": drawn_ids(64, BATCH, SEQ), **seen} if hasattr(model, "text_model") else seen


def text_and_clip(model: Any) -> dict[str, Any]:
    """One clip: its position embeddings are made for a batch of one."""
    config = model.config
    side = config.max_img_size
    return {"input_ids": drawn_ids(64, 1, SEQ) + 4, "pixel_values": floats(1, config.num_frames, 3, side, side)}


def frames(model: Any) -> dict[str, Any]:
    return {"pixel_values_videos": floats(BATCH, 4, 3, 64, 64)}


def text_and_frames(model: Any) -> dict[str, Any]:
    return {"input_ids": drawn_ids(64, BATCH, SEQ) + 4, **frames(model)}


def frames_and_sound(model: Any) -> dict[str, Any]:
    return {"input_values": floats(BATCH, 1, 4 * 1920), **frames(model)}


def text_frames_and_sound(model: Any) -> dict[str, Any]:
    return {**text_and_frames(model), **frames_and_sound(model)}
