"""sac.apply on models of timm; what they train is in test_matrix."""

from __future__ import annotations

import pytest

import sac
from tests.stacks.composition import differences, train
from tests.stacks.other_trainers import timm_model


@pytest.mark.filterwarnings("error::sac.errors.SacWarning")
def test_a_model_of_convolutions_has_no_other_matmul_and_that_is_no_warning() -> None:
    model, images = timm_model("convnext_atto")
    sac.apply(model, "selective")
    model(images).sum().backward()
    assert "rule convolutions: 3 calls" in str(sac.report(model))


def test_full_does_what_its_own_checkpointing_does() -> None:
    name = "swin_tiny_patch4_window7_224"
    (model, images), (theirs, _) = timm_model(name), timm_model(name)
    theirs.set_grad_checkpointing()
    own = train(theirs, lambda trained: trained(images).square().mean())
    ours = train(sac.apply(model, "full"), lambda trained: trained(images).square().mean())
    assert differences(ours, own) == []
    assert ours.flops == own.flops
    assert ours.kept_bytes <= own.kept_bytes
