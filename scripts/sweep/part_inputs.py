"""Inputs of parts of models that have a configuration of their own: what the rest of the model would hand them."""

from __future__ import annotations

from typing import Any

import torch

from .drawing import BATCH, SEQ, SIDE, drawn_ids, first_linear, floats


def qformer(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "query_embeds": floats(BATCH, SIDE, config.hidden_size),
        "encoder_hidden_states": floats(BATCH, SEQ, config.encoder_hidden_size),
    }


def qformer_of_text(model: Any) -> dict[str, Any]:
    return {"input_ids": drawn_ids(100, BATCH, SEQ), **qformer(model)}


def bytes_to_patches(model: Any) -> dict[str, Any]:
    ids = torch.arange(SEQ).div(4, rounding_mode="floor").expand(BATCH, SEQ)
    return {"input_ids": drawn_ids(model.config.vocab_size, BATCH, SEQ), "num_patches": SEQ // 4, "patch_ids": ids}


def patches_to_bytes(model: Any) -> dict[str, Any]:
    width = first_linear(model, "patch_embedding_projection")
    return {"inputs_embeds": floats(BATCH, SEQ, model.config.hidden_size), "patch_embeds": floats(BATCH, 4, width)}


def noise_and_context(model: Any) -> dict[str, Any]:
    config = model.config
    width = first_linear(model, "fc")
    return {
        "noise_embeds": floats(BATCH, SIDE, config.hidden_size),
        "context_hidden_states": floats(BATCH, SEQ, width),
    }


def perceiver(model: Any) -> dict[str, Any]:
    return {
        "context": floats(BATCH, SEQ, model.config.hidden_size),
        "attention_mask": torch.ones(BATCH, SEQ, dtype=torch.long),
    }


def questions(model: Any) -> dict[str, Any]:
    return {
        "input_ids": drawn_ids(64, 1, SEQ),
        "marks": torch.tensor([[5, 9]]),
        "num_options": torch.tensor([[2, 2]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    }


def robot(model: Any) -> dict[str, Any]:
    config = model.config
    side = config.vlm_config.vision_config.image_size
    patches = (side // config.vlm_config.vision_config.patch_size) ** 2
    ids = drawn_ids(64, BATCH, SEQ) + 4
    ids = torch.cat([torch.full((BATCH, patches), config.vlm_config.image_token_id), ids], dim=1)
    return {
        "state": floats(BATCH, config.max_state_dim),
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": floats(BATCH, 1, 3, side, side),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
        "actions": floats(BATCH, config.chunk_size, config.max_action_dim),
    }


def decoder_ids(model: Any) -> dict[str, Any]:
    config = model.config
    return {
        "input_ids": drawn_ids(config.vocab_size - 8, BATCH, SEQ),
        "encoder_hidden_states": floats(BATCH, SEQ, config.d_model),
    }


def retrieved(model: Any) -> dict[str, Any]:
    documents = model.config.n_docs
    return {
        "input_ids": drawn_ids(64, BATCH, SEQ),
        "context_input_ids": drawn_ids(64, BATCH * documents, SEQ),
        "context_attention_mask": torch.ones(BATCH * documents, SEQ, dtype=torch.long),
        "doc_scores": floats(BATCH, documents),
        "decoder_input_ids": drawn_ids(64, BATCH, SIDE),
    }


def drafted(model: Any) -> dict[str, Any]:
    """What a model that drafts tokens is handed by the one that it drafts for: its keys and values."""
    config = model.config.get_text_config()
    shared = {}
    for kind, layer in zip(config.layer_types, model.model.layers, strict=True):
        attention = layer.self_attn
        heads = config.num_attention_heads // attention.num_key_value_groups
        shared[kind] = (floats(BATCH, heads, SEQ, attention.head_dim), floats(BATCH, heads, SEQ, attention.head_dim))
    width = model.pre_projection.in_features
    positions = torch.full((BATCH, 1), SEQ)
    return {"inputs_embeds": floats(BATCH, 1, width), "shared_kv_states": shared, "position_ids": positions}


def decoded(model: Any) -> dict[str, Any]:
    width = model.config.hidden_size
    return {"input_ids": drawn_ids(64, BATCH, SEQ) + 4, "encoder_hidden_states": floats(BATCH, SEQ, width)}


def plain_text(model: Any) -> dict[str, Any]:
    return {"input_ids": drawn_ids(64, BATCH, SEQ) + 4}


def short_text(model: Any) -> dict[str, Any]:
    return {"input_ids": drawn_ids(min(model.config.vocab_size, 64), BATCH, 4)}


def text_as_inputs(model: Any) -> dict[str, Any]:
    return {"inputs": drawn_ids(64, BATCH, SEQ) + 4}


def folded(model: Any) -> dict[str, Any]:
    """One chain of residues, with four atoms each."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    config, atoms = model.config, 4 * SIDE
    places = torch.arange(SIDE)[None]
    zeros = torch.zeros_like(places)
    of_atoms = places.repeat_interleave(4, dim=1)
    return {
        "token_index": places,
        "residue_index": places,
        "asym_id": zeros,
        "sym_id": zeros,
        "entity_id": zeros,
        "mol_type": zeros,
        "res_type": drawn_ids(config.num_res_types, 1, SIDE),
        "token_bonds": torch.zeros(1, SIDE, SIDE, 1),
        "attention_mask": torch.ones(1, SIDE, dtype=torch.bool),
        "atom_inputs": EsmFold2AtomInputs(
            ref_pos=floats(1, atoms, 3),
            ref_charge=torch.zeros(1, atoms),
            atom_attention_mask=torch.ones(1, atoms, dtype=torch.bool),
            ref_element=drawn_ids(config.max_atomic_number, 1, atoms),
            ref_atom_name_chars=drawn_ids(config.char_vocab_size, 1, atoms, config.max_chars),
            ref_space_uid=of_atoms,
            atom_to_token=of_atoms,
        ),
        "input_ids": drawn_ids(config.esmc_config.vocab_size - 40, 1, SIDE) + 4,
    }
