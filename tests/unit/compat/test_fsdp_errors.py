"""What checkpoint_wrapper and apply_activation_checkpointing of sac.compat.fsdp refuse, which leaves nothing behind."""

from __future__ import annotations

import functools

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch

import sac
from sac.compat import fsdp as ours
from sac.config import FullConfig
from sac.errors import ConfigError, ModelError
from tests.unit.compat.wrapping import (
    by_function,
    is_layer,
    model,
    on_layers,
    region_paths,
)

# What a region cannot do

REENTRANT = {"context_fn": sac.context_fn("general"), "checkpoint_impl": ours.CheckpointImpl.REENTRANT}
UNSUPPORTED = {  # what is given to checkpoint_wrapper, and what the error says of it
    "checkpoint_impl": (
        {"checkpoint_impl": "reentrant"},
        "'reentrant' is not an implementation\n    legal: CheckpointImpl.",
    ),
    "checkpoint_fn": (
        {"checkpoint_fn": len},
        "<built-in function len> cannot be made a region\n    legal: sac.checkpoint, ",
    ),
    "context_fn": (
        {"context_fn": int},
        "the caller's contexts around forward and recomputation are not entered\n    fix: ",
    ),
    "context_fn reentrant": (
        REENTRANT,
        "per-op decisions need the non-reentrant mode\n    fix: use CheckpointImpl.NO_",
    ),
    "debug": ({"debug": True}, "True is not supported: errors of recomputation name the saved tensor without it\n"),
    "offload_to_cpu": ({"offload_to_cpu": 1}, "1 is not true or false\n    legal: true, false"),
    "config": (
        {"config": {"store": "host"}},
        "{'store': 'host'} is not a FullConfig\n    legal: a sac.full.FullConfig",
    ),
    "offload_to_cpu and config": (
        {"config": FullConfig(store="host"), "offload_to_cpu": True},
        "config keeps inputs elsewhere (store 'host')\n    fix: leave one of the two out",
    ),
    "preserve_rng": ({"preserve_rng": True}, "it is not known\n    did you mean: preserve_rng_state\n    legal: use_"),
    "determinism_check": ({"determinism_check": "all"}, 'determinism_check is "all"\n    legal: default, none'),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("entry", ["wrapper", "apply", "function"])
def test_what_cannot_be_done_is_an_error_and_changes_nothing(name: str, entry: str) -> None:
    given, text = UNSUPPORTED[name]
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, **given)
    put = {
        "wrapper": lambda: wrap(mine.layers[0]),
        "apply": lambda: ours.apply_activation_checkpointing(mine, wrap, is_layer),
        "function": lambda: ours.apply_activation_checkpointing(mine, lambda one: wrap(one), is_layer),
    }[entry]
    with pytest.raises(ConfigError) as error:
        put()
    assert str(error.value).startswith(f"checkpoint_wrapper.{name.split()[0]}: {text}")
    assert all("forward" not in one.__dict__ for one in mine.modules())
    assert region_paths(mine) == []


def test_a_second_region_is_an_error() -> None:
    mine = model()
    on_layers(ours, mine)
    for again in (lambda: on_layers(ours, mine), lambda: by_function(ours, mine)):
        with pytest.raises(ModelError) as error:
            again()
        assert str(error.value).split("\n")[:2] == [
            "layers.0: this module is a region of sac already",
            "    fix: call sac.remove(model) first",
        ]
        assert len(region_paths(mine)) == 3


def test_a_function_that_fails_half_way_leaves_nothing() -> None:
    mine, count = model(), [0]

    def wrap(module: nn.Module) -> nn.Module:
        count[0] += 1
        if count[0] == 2:
            raise KeyError("half way")
        return ours.checkpoint_wrapper(module)

    with pytest.raises(KeyError):
        ours.apply_activation_checkpointing(mine, wrap, is_layer)
    assert all("forward" not in one.__dict__ for one in mine.modules())


def test_torchs_own_wrapper_is_not_mixed_in() -> None:
    mine = model()
    with pytest.raises(ConfigError) as error:
        ours.apply_activation_checkpointing(mine, of_torch.checkpoint_wrapper, is_layer)
    assert str(error.value) == (
        "apply_activation_checkpointing.checkpoint_wrapper_fn: it returned CheckpointWrapper around PreNormLayer, "
        "not the module itself\n"
        "    fix: let it call checkpoint_wrapper of sac.compat.fsdp"
    )
    of_torch.apply_activation_checkpointing(mine, check_fn=is_layer)
    with pytest.raises(ModelError) as refused:
        ours.checkpoint_wrapper(mine)
    assert str(refused.value).startswith("Model: the model's own checkpointing is on: checkpoint_wrapper is around ")
