"""sac.apply on transformers of diffusers, and on a UNet."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.blocks.find import find_blocks
from tests.stacks.composition import assert_full_and_selective, differences, train
from tests.stacks.other_trainers import diffusion

pytest.importorskip("diffusers", reason="diffusers is in the extra `stacks`")

from tests.stacks import diffusion_models

BLOCKS = {
    "dit": {"transformer_blocks": 3},
    "pixart": {"transformer_blocks": 3},
    "sd3": {"transformer_blocks": 3},
    "flux": {"transformer_blocks": 2, "single_transformer_blocks": 2},
}


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = getattr(diffusion_models, name)()
    return model.train(), inputs


@pytest.mark.parametrize("name", [*BLOCKS, "unet"])
def test_gradients_are_equal_and_kept_bytes_fall(name: str) -> None:
    assert_full_and_selective(partial(diffusion, model=name))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_transformer_block_is_a_block(name: str) -> None:
    model, _ = built(name)
    paths = [f"{stack}.{index}" for stack, count in BLOCKS[name].items() for index in range(count)]
    assert [block.path for block in find_blocks(model)] == paths


def test_blocks_of_a_unet_are_its_residual_and_its_transformer_blocks() -> None:
    model, _ = built("unet")
    found = {block.path for block in find_blocks(model)}
    kinds = ("ResnetBlock2D", "BasicTransformerBlock")
    assert found == {path for path, part in model.named_modules() if type(part).__name__ in kinds}


def test_full_does_what_its_own_checkpointing_does() -> None:
    model, inputs = built("dit")
    loss = partial(_loss, inputs)
    theirs = copy.deepcopy(model)
    theirs.enable_gradient_checkpointing()
    own, ours = train(theirs, loss), train(sac.apply(model, "full"), loss)
    assert differences(ours, own) == []
    assert ours.flops == own.flops
    spare = sum(one.nbytes for one in inputs.values() if not one.is_floating_point())  # small: each block has a copy
    assert ours.kept_bytes <= own.kept_bytes + spare * len(model.transformer_blocks)


def _loss(inputs: dict[str, Any], model: nn.Module) -> torch.Tensor:
    return diffusion_models.denoising_loss(model, inputs)


def test_its_own_checkpointing_on_before_is_refused() -> None:
    model, _ = built("flux")
    model.enable_gradient_checkpointing()
    with pytest.raises(sac.SacError) as error:
        sac.apply(model, "full")
    assert str(error.value) == (
        "FluxTransformer2DModel: the model's own checkpointing is on: gradient_checkpointing is on in the model "
        "(FluxTransformer2DModel) (turn it off with model.disable_gradient_checkpointing())\n"
        "    fix: turn it off, then call sac.apply; two at once would run every block three times"
    )
    model.disable_gradient_checkpointing()
    sac.apply(model, "full")


def test_its_own_checkpointing_turned_on_afterwards_is_refused_at_that_call() -> None:
    model, inputs = built("flux")
    sac.apply(model, "full")
    with pytest.raises(sac.SacError, match="enable_gradient_checkpointing was called, and sac"):
        model.enable_gradient_checkpointing()
    diffusion_models.denoising_loss(model, inputs).backward()
    sac.remove(model)
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
