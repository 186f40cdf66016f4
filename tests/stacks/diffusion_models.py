"""Tiny models of diffusers with random weights, each with the inputs of one step of training."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

HEADS, HEAD_WIDTH = 2, 16
WIDTH = HEADS * HEAD_WIDTH
HEAD = {"num_attention_heads": HEADS, "attention_head_dim": HEAD_WIDTH}
GRID = {"sample_size": 8, "patch_size": 2, "in_channels": 4}
IMAGE, TEXT, POOLED = (2, 4, 8, 8), (2, 5, WIDTH), (2, 16)
TIMES = (1, 5)

Model = tuple[nn.Module, dict[str, Any]]


def dit() -> Model:
    model = diffusers.DiTTransformer2DModel(**HEAD, **GRID, out_channels=4, num_layers=3, num_embeds_ada_norm=10)
    return model, {"hidden_states": _noise(IMAGE), "timestep": _times(), "class_labels": torch.tensor([1, 2])}


def flux() -> Model:
    model = diffusers.FluxTransformer2DModel(
        **HEAD,
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=POOLED[1],
        axes_dims_rope=(4, 4, 8),
    )
    places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(TEXT[1], 3)}
    return model, {"hidden_states": _noise((2, 16, 4)), **_text(), **places, "timestep": _times() / 10}


def unet() -> Model:
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=WIDTH,
        attention_head_dim=HEAD_WIDTH,
        norm_num_groups=8,
    )
    return model, {"sample": _noise(IMAGE), "encoder_hidden_states": _noise(TEXT), "timestep": _times()}


def denoising_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The mean square of what the model predicts."""
    return model(**inputs, return_dict=False)[0].square().mean()


def _noise(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _times() -> Tensor:
    return torch.tensor(TIMES)


def _text() -> dict[str, Tensor]:
    return {"encoder_hidden_states": _noise(TEXT), "pooled_projections": _noise(POOLED)}
