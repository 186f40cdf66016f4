"""sac as an activation checkpointing policy of torchtitan, next to torchtitan's own."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import sac
from tests.stacks.composition import assert_full_and_selective, differences
from tests.stacks.other_trainers import torchtitan
from tests.stacks.stand_ins import import_titan

import_titan("torchtitan.distributed.activation_checkpoint")

from tests.stacks import titan_models as titan  # noqa: E402  (needs torchtitan)

EVERY_SECOND = {
    "mode": "selective",
    "policy": {
        "schema": "sac/v1",
        "name": "as-titan",
        "default": "recompute",
        "rules": [
            {"id": "attention", "ops": "attention", "do": "save"},
            {"id": "matmuls", "ops": "matmul", "do": "alternate"},
        ],
    },
}
LAST_MATMUL_BYTES = titan.LAYERS * titan.BATCH * titan.TOKENS * titan.WIDTH * 4


def test_gradients_are_equal_and_kept_bytes_fall() -> None:
    assert_full_and_selective(torchtitan)


def test_every_second_matmul_is_that_of_torchtitan() -> None:
    theirs, ours = torchtitan("titan with CPU"), torchtitan(EVERY_SECOND)
    assert differences(ours, theirs) == []
    assert ours.flops == theirs.flops
    assert ours.kept_bytes == theirs.kept_bytes - LAST_MATMUL_BYTES  # of the product that backward does not read


def test_names_of_parameters_stay() -> None:
    plain, ours, theirs = titan.build(), titan.build(), titan.build()
    titan.SacAC.Config(value="full").build(dump_folder="").apply(ours)
    titan.own.FullAC.Config().build(dump_folder="").apply(theirs)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    assert [name for name, _ in theirs.named_parameters()] != names


def pipeline_part(layers: list[int]) -> nn.Module:
    """A model as torchtitan leaves it to one stage: layers that are elsewhere are taken out of the dictionary."""
    model = titan.build()
    for name in [name for name in model.layers if int(name) not in layers]:
        del model.layers[name]
    return model


@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_pipeline_part_without_layers_is_left_alone(value: str) -> None:
    part = pipeline_part([])
    policy = titan.SacAC.Config(value=value).build(dump_folder="")
    with pytest.warns(sac.errors.SacWarning, match="no block to checkpoint in this part of a model"):
        policy.apply(part)
    titan.loss(part).backward()


def test_a_pipeline_part_has_the_layers_of_the_whole() -> None:
    part = pipeline_part([1, 2])
    policy: dict[str, Any] = {"mode": "full", "layers": {"last": 1}}
    titan.SacAC.Config(value=policy).build(dump_folder="").apply(part)
    titan.loss(part).backward()
    assert "layers.2: keeps" in str(sac.report(part))


def test_a_wrong_value_is_an_error() -> None:
    with pytest.raises(sac.SacError, match="did you mean: selective"):
        titan.SacAC.Config(value="selectiv").build(dump_folder="").apply(titan.build())
