"""sac.apply on models of timm."""

from __future__ import annotations

import sys
from functools import partial

import pytest

import sac
from tests.stacks.composition import assert_full_and_selective, differences, train
from tests.stacks.other_trainers import TIMM, timm_model, vision


@pytest.mark.parametrize("name", TIMM)
def test_gradients_are_equal_and_kept_bytes_fall(name: str) -> None:
    assert_full_and_selective(partial(vision, model=name))


@pytest.mark.filterwarnings("error::sac.errors.SacWarning")
def test_a_model_of_convolutions_has_no_other_matmul_and_that_is_no_warning() -> None:
    model, images = timm_model("convnext_atto")
    sac.apply(model, "selective")
    model(images).sum().backward()
    assert "rule convolutions: 3 calls" in str(sac.report(model))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_full_does_what_its_own_checkpointing_does(name: str) -> None:
    (model, images), (theirs, _) = timm_model(name), timm_model(name)
    theirs.set_grad_checkpointing()
    own = train(theirs, lambda trained: trained(images).square().mean())
    ours = train(sac.apply(model, "full"), lambda trained: trained(images).square().mean())
    assert differences(ours, own) == []
    assert ours.flops == own.flops
    assert ours.kept_bytes <= own.kept_bytes


def test_nobody_finds_the_stand_in_for_torchvision() -> None:
    timm_model("vit_tiny_patch16_224")
    assert not hasattr(sys.modules.get("torchvision"), "FrozenBatchNorm2d")
