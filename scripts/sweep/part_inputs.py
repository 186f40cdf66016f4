"""Inputs of parts of models that have a configuration of their own: what the rest of the model would hand them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH, SEQ, SIDE = 2, 32, 8

Inputs = Callable[[Any], dict[str, Any]]  # from a model


def _floats(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


def _first_linear(model: nn.Module, name: str) -> int:
    return int(next(m.in_features for n, m in model.named_modules() if n.endswith(name) and isinstance(m, nn.Linear)))


def qformer(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "query_embeds": _floats(BATCH, SIDE, config.hidden_size),
        "encoder_hidden_states": _floats(BATCH, SEQ, config.encoder_hidden_size),
    }


def qformer_of_text(model: Any) -> dict[str, Any]:
    return {"input_ids": _ids(100, BATCH, SEQ), **qformer(model)}


def image(model: Any) -> dict[str, Any]:
    return {"hidden_states": _floats(BATCH, 3, 64, 64)}


def speech_of_text(model: Any) -> dict[str, Any]:
    """All that the variance predictors of FastSpeech are trained on: two frames for each token."""
    config = getattr(model.config, "model_config", model.config)
    return {
        "input_ids": _ids(config.vocab_size, BATCH, SIDE),
        "spectrogram_labels": _floats(BATCH, 2 * SIDE, config.num_mel_bins),
        "duration_labels": torch.full((BATCH, SIDE), 2),
        "pitch_labels": _floats(BATCH, SIDE, 1),
        "energy_labels": _floats(BATCH, SIDE, 1),
    }


def bytes_to_patches(model: Any) -> dict[str, Any]:
    ids = torch.arange(SEQ).div(4, rounding_mode="floor").expand(BATCH, SEQ)
    return {"input_ids": _ids(model.config.vocab_size, BATCH, SEQ), "num_patches": 4, "patch_ids": ids}


def patches_to_bytes(model: Any) -> dict[str, Any]:
    width = _first_linear(model, "patch_embedding_projection")
    return {"inputs_embeds": _floats(BATCH, SEQ, model.config.hidden_size), "patch_embeds": _floats(BATCH, 4, width)}


def detr_encoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "vision_features": [_floats(BATCH, hidden, SIDE, SIDE)],
        "text_features": _floats(BATCH, SEQ, hidden),
        "vision_pos_embeds": [_floats(BATCH, hidden, SIDE, SIDE)],
    }


def detr_decoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "vision_features": _floats(BATCH, SIDE * SIDE, hidden),
        "text_features": _floats(BATCH, SEQ, hidden),
        "vision_pos_encoding": _floats(BATCH, SIDE * SIDE, hidden),
        "spatial_shapes": torch.tensor([[SIDE, SIDE]]),
    }


def mask_decoder(model: Any) -> dict[str, Any]:
    hidden = model.config.hidden_size
    return {
        "decoder_queries": _floats(BATCH, 10, hidden),
        "backbone_features": [_floats(BATCH, hidden, side, side) for side in (4 * SIDE, 2 * SIDE, SIDE)],
        "encoder_hidden_states": _floats(BATCH, SIDE * SIDE, hidden),
    }


def several_codebooks(model: Any) -> dict[str, Any]:
    decoder = getattr(model.config, "decoder_config", model.config)
    codes = _ids(decoder.vocab_size - 8, BATCH, SIDE, decoder.num_channels)
    if decoder is model.config:
        return {"input_ids": codes, "encoder_hidden_states": _floats(BATCH, SEQ, decoder.cross_hidden_size)}
    return {"input_ids": _ids(64, BATCH, SEQ), "decoder_input_ids": codes}


def embedded_patches(model: Any) -> dict[str, Any]:
    return {"patch_embeds": _floats(BATCH, model.config.hidden_size, SIDE, SIDE)}


def noise_and_context(model: Any) -> dict[str, Any]:
    config = model.config
    width = _first_linear(model, "fc")
    return {
        "noise_embeds": _floats(BATCH, SIDE, config.hidden_size),
        "context_hidden_states": _floats(BATCH, SEQ, width),
    }


def perceiver(model: Any) -> dict[str, Any]:
    return {
        "context": _floats(BATCH, SEQ, model.config.hidden_size),
        "attention_mask": torch.ones(BATCH, SEQ, dtype=torch.long),
    }


def patches_as_prefix(model: Any) -> dict[str, Any]:
    return {"inputs_embeds": _floats(BATCH, SEQ, model.config.hidden_size), "num_patches": SIDE}


def packed_patches(model: Any) -> dict[str, Any]:
    """Images of 4 x 4 patches, flattened, with where each patch is."""
    config = model.config
    channels = getattr(config, "num_channels", 3)
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), dim=-1).view(16, 2)
    return {
        "pixel_values": _floats(BATCH, 16, channels * config.patch_size**2),
        "pixel_position_ids": place.expand(BATCH, 16, 2),
        "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * BATCH),
    }


def packed_grids(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "pixel_values": _floats(BATCH * 16, config.num_channels * config.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4]] * BATCH),
        "merge_sizes": torch.tensor([2] * BATCH),
    }


def mels_and_mask(model: Any) -> dict[str, Any]:
    frames = 64
    return {
        "audio_mel": _floats(BATCH, frames, model.config.input_feat_size),
        "audio_mel_mask": torch.zeros(BATCH, frames, dtype=torch.bool),
    }


def frames_and_mask(model: Any) -> dict[str, Any]:
    return {"hidden_states": _floats(BATCH, 64, model.config.input_size), "mask": None}


def latents(model: Any) -> dict[str, Any]:
    return {"latents": _floats(BATCH, model.config.hidden_size, SEQ)}


def image_pair(model: Any) -> dict[str, Any]:
    height, width = model.config.image_size
    return {
        "pixel_values": _floats(BATCH, 3, height // 2, width),
        "prompt_pixel_values": _floats(BATCH, 3, height // 2, width),
        "prompt_masks": _floats(BATCH, 3, height // 2, width),
    }


def image_and_classes(model: Any) -> dict[str, Any]:
    side = model.config.image_size
    classes = 3
    return {
        "pixel_values": _floats(1, 3, side, side),
        "classes_input_ids": _ids(100, classes, 5),
        "classes_attention_mask": torch.ones(classes, 5, dtype=torch.long),
        "tasks_input_ids": _ids(100, 1, 5),
        "tasks_attention_mask": torch.ones(1, 5, dtype=torch.long),
        "classes_structure": torch.tensor([classes]),
    }


def questions(model: Any) -> dict[str, Any]:
    return {
        "input_ids": _ids(64, 1, SEQ),
        "marks": torch.tensor([[5, 9]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    }


def text_and_codes(model: Any) -> dict[str, Any]:
    """One text token and one of each codebook for each instant."""
    config = model.config
    return {
        "input_ids": _ids(min(config.vocab_size, config.codebook_vocab_size) - 8, BATCH, SEQ, config.num_codebooks + 1)
    }


def one_of_each_codebook(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": _ids(config.audio_vocab_size - 8, BATCH, config.num_codebooks),
        "last_hidden_state": _floats(BATCH, 1, config.input_size),
    }


def codebooks_as_rows(model: Any) -> dict[str, Any]:
    config = model.config
    return {"input_ids": _ids(config.vocab_size - 8, BATCH * config.num_codebooks, SEQ)}


def tiles(model: Any) -> dict[str, Any]:
    config = model.config
    side, most = config.image_size, config.max_num_tiles
    return {
        "pixel_values": _floats(BATCH, 1, most, config.num_channels, side, side),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(BATCH, 1, most, dtype=torch.long),
    }


def patches_in_rows(model: Any) -> dict[str, Any]:
    config = model.config
    height, width = config.image_size
    count = height * width // config.patch_size**2
    return {"pixel_values": _floats(BATCH, count, 3 * config.patch_size**2)}


def patches_in_one_row(model: Any) -> dict[str, Any]:
    config = model.config
    patches = _floats(1, BATCH * 16, config.num_channels, config.patch_size, config.patch_size)
    return {"pixel_values": patches, "grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


def robot(model: Any) -> dict[str, Any]:
    config = model.config
    side = config.vlm_config.vision_config.image_size
    patches = (side // config.vlm_config.vision_config.patch_size) ** 2
    ids = _ids(64, BATCH, SEQ) + 4
    ids = torch.cat([torch.full((BATCH, patches), config.vlm_config.image_token_id), ids], dim=1)
    return {
        "state": _floats(BATCH, config.max_state_dim),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": _floats(BATCH, 1, 3, side, side),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "actions": _floats(BATCH, config.chunk_size, config.max_action_dim),
    }


def decoder_ids(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": _ids(config.vocab_size - 8, BATCH, SEQ),
        "encoder_hidden_states": _floats(BATCH, SEQ, config.d_model),
    }


def packed_mels(model: Any) -> dict[str, Any]:
    frames = 4 * model.config.n_window
    lengths = torch.tensor([frames // 2, frames // 2])
    return {"input_features": _floats(model.config.num_mel_bins, frames), "feature_lens": lengths}


def embedded_codes(model: Any) -> dict[str, Any]:
    return {"inputs_embeds": _floats(BATCH, SIDE, model.config.hidden_size)}


def stacked_mels(model: Any) -> dict[str, Any]:
    """Several frames of sound side by side."""
    config = model.config
    width = config.input_size if hasattr(config, "input_size") else 2 * config.input_dim
    return {"input_features": _floats(BATCH, 64, width), "input_features_mask": torch.ones(BATCH, 64, dtype=torch.long)}


def grounded(model: Any) -> dict[str, Any]:
    """A text that begins with an image."""
    queries, side = model.config.latent_query_num, model.config.vision_config.image_size
    mask = torch.zeros(BATCH, queries + SEQ, dtype=torch.long)
    mask[:, :queries] = 1
    return {
        "input_ids": _ids(64, BATCH, queries + SEQ) + 4,
        "pixel_values": _floats(BATCH, 3, side, side),
        "image_embeds_position_mask": mask,
    }


def retrieved(model: Any) -> dict[str, Any]:
    documents = model.config.n_docs
    return {
        "input_ids": _ids(64, BATCH, SEQ),
        "context_input_ids": _ids(64, BATCH * documents, SEQ),
        "context_attention_mask": torch.ones(BATCH * documents, SEQ, dtype=torch.long),
        "doc_scores": _floats(BATCH, documents),
        "decoder_input_ids": _ids(64, BATCH, SIDE),
    }
