"""Inputs of parts of models that hear or speak: what a feature extractor or the rest of the model would hand them."""

from __future__ import annotations

from typing import Any

import torch

from .drawing import BATCH, SEQ, SIDE, drawn_ids, first_linear, floats


def speech_of_text(model: Any) -> dict[str, Any]:
    """All that the variance predictors of FastSpeech are trained on: two frames for each token."""
    config = getattr(model.config, "model_config", model.config)
    return {
        "input_ids": drawn_ids(config.vocab_size, BATCH, SIDE),
        "spectrogram_labels": floats(BATCH, 2 * SIDE, config.num_mel_bins),
        "duration_labels": torch.full((BATCH, SIDE), 2),
        "pitch_labels": floats(BATCH, SIDE, 1),
        "energy_labels": floats(BATCH, SIDE, 1),
    }


def several_codebooks(model: Any) -> dict[str, Any]:
    decoder = getattr(model.config, "decoder_config", model.config)
    codes = drawn_ids(decoder.vocab_size - 8, BATCH, SIDE, decoder.num_channels)
    if decoder is model.config:
        return {"input_ids": codes, "encoder_hidden_states": floats(BATCH, SEQ, decoder.cross_hidden_size)}
    return {"input_ids": drawn_ids(64, BATCH, SEQ), "decoder_input_ids": codes}


def mels_and_mask(model: Any) -> dict[str, Any]:
    frames = 64
    return {
        "audio_mel": floats(BATCH, frames, model.config.input_feat_size),
        "audio_mel_mask": torch.zeros(BATCH, frames, dtype=torch.bool),
    }


def frames_and_mask(model: Any) -> dict[str, Any]:
    return {"hidden_states": floats(BATCH, 64, model.config.input_size), "mask": None}


def latents(model: Any) -> dict[str, Any]:
    return {"latents": floats(BATCH, model.config.hidden_size, SEQ)}


def text_and_codes(model: Any) -> dict[str, Any]:
    """One text token and one of each codebook for each instant."""
    config = model.config
    return {
        "input_ids": drawn_ids(
            min(config.vocab_size, config.codebook_vocab_size) - 8, BATCH, SEQ, config.num_codebooks + 1
        )
    }


def one_of_each_codebook(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": drawn_ids(config.audio_vocab_size - 8, BATCH, config.num_codebooks),
        "last_hidden_state": floats(BATCH, 1, config.input_size),
    }


def codebooks_as_rows(model: Any) -> dict[str, Any]:
    config = model.config
    return {"input_ids": drawn_ids(config.vocab_size - 8, BATCH * config.num_codebooks, SEQ)}


def packed_mels(model: Any) -> dict[str, Any]:
    frames = 4 * model.config.n_window
    lengths = torch.tensor([frames // 2, frames // 2])
    return {"input_features": floats(model.config.num_mel_bins, frames), "feature_lens": lengths}


def embedded_codes(model: Any) -> dict[str, Any]:
    return {"inputs_embeds": floats(BATCH, SIDE, model.config.hidden_size)}


def stacked_mels(model: Any) -> dict[str, Any]:
    """Several frames of sound side by side."""
    width = model.config.input_size
    return {"input_features": floats(BATCH, 64, width), "input_features_mask": torch.ones(BATCH, 64, dtype=torch.long)}


def joined_mels(model: Any) -> dict[str, Any]:
    """Several frames of sound, and how fast each of their bins changes, side by side."""
    return {"input_features": floats(BATCH, 64, first_linear(model, "input_linear"))}


def whole_windows(model: Any) -> dict[str, Any]:
    return {"input_values": floats(BATCH, 4 * 1920)}


def waves_and_mels(model: Any) -> dict[str, Any]:
    """The same sound twice: as samples, and as frames of 20 ms."""
    frames = 16
    width = model.config.semantic_model_config.feature_projection_input_dim
    return {"input_values": floats(BATCH, 1, 320 * frames), "input_features": floats(BATCH, frames, width)}


def diffused_mels(model: Any) -> dict[str, Any]:
    config = model.config
    frames = SIDE * config.repeats
    return {
        "hidden_states": floats(BATCH, frames, config.mel_dim),
        "condition_vector": floats(BATCH, SEQ, config.mel_dim),
        "speaker_embedding": floats(BATCH, frames, config.enc_emb_dim),
        "quantized_code": drawn_ids(config.num_embeds, BATCH, SIDE),
        "time_step": torch.tensor(0.5),
    }


def conditioned_codes(model: Any) -> dict[str, Any]:
    config = model.config.dit_config
    return {
        "code": drawn_ids(config.num_embeds, 1, SIDE),
        "conditioning": floats(1, config.enc_emb_dim),
        "reference_mel": floats(1, SEQ, config.mel_dim),
        "num_steps": 2,
    }


def text_beside_sound(model: Any) -> dict[str, Any]:
    """One token of text for each step of sound."""
    config = model.config
    frames = 2 * SEQ * config.downsample_factor
    return {
        "input_ids": drawn_ids(64, BATCH, SEQ) + 4,
        "input_features": floats(BATCH, config.audio_config.num_mel_bins, frames),
        "num_delay_tokens": 2,
    }


def text_at_a_time(model: Any) -> dict[str, Any]:
    config = model.config
    return {"input_ids": drawn_ids(64, BATCH, SEQ) + 4, "t_cond": floats(1, 1, config.hidden_size)}


def chunks(model: Any) -> dict[str, Any]:
    config = model.config
    frames = 64
    lengths = torch.tensor([frames * config.hop_length] * BATCH)
    return {"input_features": floats(BATCH, config.feature_size, frames), "chunk_sample_lengths": lengths}


def mels_and_text(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "input_features": floats(BATCH, 64, config.input_feat_per_channel),
        "decoder_input_ids": drawn_ids(64, BATCH, SIDE) + 4,
    }


def mels_alone(model: Any) -> dict[str, Any]:
    return {"spectrogram": floats(BATCH, SIDE, model.config.model_in_dim)}


def wave_and_text(model: Any) -> dict[str, Any]:
    return {"inputs": floats(BATCH, 4000), "decoder_input_ids": drawn_ids(64, BATCH, SIDE) + 4}


def quantized_mels(model: Any) -> dict[str, Any]:
    config = model.config
    return {"audio_input_ids": drawn_ids(config.mel_vocab_size, BATCH, SEQ, config.n_mel_bins)}


def wave_as_states(model: Any) -> dict[str, Any]:
    return {"hidden_states": floats(BATCH, model.config.channels, 6400)}


def latents_as_states(model: Any) -> dict[str, Any]:
    return {"hidden_states": floats(BATCH, model.config.hidden_size, 2)}
