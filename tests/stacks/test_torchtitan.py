"""sac as an activation checkpointing policy of torchtitan, next to torchtitan's own."""

from __future__ import annotations

import pytest

import sac
from tests.stacks.composition import differences
from tests.stacks.other_trainers import torchtitan
from tests.stacks.stand_ins import import_titan
from tests.support.blocks import alternate, policy, save

import_titan("torchtitan.distributed.activation_checkpoint")

from tests.stacks import titan_models as titan  # noqa: E402  (needs torchtitan)

EVERY_SECOND = {"mode": "selective", "policy": policy(save("attention"), alternate("matmul"))}
LAST_MATMUL_BYTES = titan.LAYERS * titan.BATCH * titan.TOKENS * titan.WIDTH * 4


def test_every_second_matmul_is_that_of_torchtitan() -> None:
    theirs, ours = torchtitan("torchtitan's"), torchtitan(EVERY_SECOND)
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


@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_pipeline_part_may_have_no_layers_and_else_has_those_of_the_whole(value: str) -> None:
    """torchtitan takes the layers that are elsewhere out of the dictionary."""
    part = titan.build()
    del part.layers["0"]
    last = {"mode": value, "layers": {"last": 1}}
    titan.SacAC.Config(value=last).build(dump_folder="").apply(part)
    titan.loss(part).backward()
    assert "layers.2: keeps" in str(sac.report(part))
    part = titan.build()
    part.layers.clear()
    with pytest.warns(sac.errors.SacWarning, match="no block to checkpoint in this part of a model"):
        titan.SacAC.Config(value=value).build(dump_folder="").apply(part)
    titan.loss(part).backward()
