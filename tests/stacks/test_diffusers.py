"""sac.apply on transformers of diffusers, and on a UNet; what they train is in test_matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.find import find_blocks

pytest.importorskip("diffusers", reason="diffusers is in the extra `stacks`")

from tests.stacks import diffusion_models


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = getattr(diffusion_models, name)()
    return model.train(), inputs


def test_blocks_of_each_of_its_stacks_are_found() -> None:
    model, _ = built("flux")
    paths = [f"{stack}.{index}" for stack in ("transformer_blocks", "single_transformer_blocks") for index in range(2)]
    assert [block.path for block in find_blocks(model)] == paths


def test_blocks_of_a_unet_are_its_residual_and_its_transformer_blocks() -> None:
    model, _ = built("unet")
    found = {block.path for block in find_blocks(model)}
    kinds = ("ResnetBlock2D", "BasicTransformerBlock")
    assert found == {path for path, part in model.named_modules() if type(part).__name__ in kinds}


def test_its_own_checkpointing_is_refused_before_and_after() -> None:
    model, inputs = built("flux")
    model.enable_gradient_checkpointing()
    with pytest.raises(sac.SacError, match=r"turn it off with model\.disable_gradient_checkpointing\(\)"):
        sac.apply(model, "full")
    model.disable_gradient_checkpointing()
    sac.apply(model, "full")
    with pytest.raises(sac.SacError, match="enable_gradient_checkpointing was called, and sac"):
        model.enable_gradient_checkpointing()
    diffusion_models.denoising_loss(model, inputs).backward()
    sac.remove(model)
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
