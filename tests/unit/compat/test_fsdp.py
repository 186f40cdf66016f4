"""torch's checkpoint_wrapper and apply_activation_checkpointing, one import line changed."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

import sac
from sac.blocks.install import regions_of
from sac.compat import fsdp as ours
from sac.config import FullConfig
from tests.support.layers import PreNormLayer
from tests.support.ranks import run_ranks
from tests.unit.compat.wrapping import (
    PUTS,
    Put,
    by_function,
    by_partial,
    inner_first,
    is_layer,
    model,
    on_layers,
    one_by_one,
    outer_first,
    region_paths,
    train,
)


def wrapped_paths(network: nn.Module) -> list[str]:
    """The clean paths of what torch has wrapped."""
    found = [name for name, one in network.named_modules() if isinstance(one, of_torch.CheckpointWrapper)]
    return [name.replace("._checkpoint_wrapped_module", "") for name in found]


@pytest.mark.parametrize("put", PUTS)
def test_training_is_that_without_and_with_torch(put: Put) -> None:
    plain, theirs, mine = train(model()), model(), model()
    put(of_torch, theirs)
    put(ours, mine)
    found = train(mine)
    assert all(map(torch.equal, found, plain))
    assert all(map(torch.equal, found, train(theirs)))


@pytest.mark.parametrize("put", [one for one in PUTS if one not in (one_by_one, inner_first, outer_first, by_function)])
def test_regions_are_on_the_modules_that_torch_wraps(put: Put) -> None:
    theirs, mine = model(), model()
    put(of_torch, theirs)
    put(ours, mine)
    assert region_paths(mine) == wrapped_paths(theirs) != []


def test_a_shared_module_is_one_region() -> None:
    mine = model()
    mine.layers[2] = mine.layers[0]
    plain = copy.deepcopy(mine)
    on_layers(ours, mine)
    assert region_paths(mine) == ["layers.0", "layers.1"]
    assert all(map(torch.equal, train(mine), train(plain)))


def test_options_reach_the_region() -> None:
    layer = PreNormLayer()
    config = FullConfig(keep="all", store="host")
    ours.checkpoint_wrapper(
        layer, ours.CheckpointImpl.REENTRANT, preserve_rng_state=False, determinism_check="none", config=config
    )
    (installed,) = regions_of(layer)
    settings = installed.applied.settings
    assert settings.use_reentrant
    assert (settings.preserve_rng_state, settings.checks_metadata) == (False, False)


@pytest.mark.parametrize(
    ("given", "is_reentrant"),
    [
        ({"checkpoint_impl": of_torch.CheckpointImpl.REENTRANT}, True),
        ({"checkpoint_impl": of_torch.CheckpointImpl.NO_REENTRANT}, False),
        ({"checkpoint_fn": torch_checkpoint, "use_reentrant": True}, True),
        ({"checkpoint_fn": torch_checkpoint, "use_reentrant": False}, False),
        ({"checkpoint_fn": sac.checkpoint}, False),
        ({"context_fn": noop_context_fn, "debug": False}, False),
    ],
)
def test_what_means_the_same_is_understood(given: dict[str, Any], is_reentrant: bool) -> None:
    layer = ours.checkpoint_wrapper(PreNormLayer(), **given)
    (installed,) = regions_of(layer)
    assert installed.applied.settings.use_reentrant == is_reentrant


# Host memory


def test_offload_to_cpu_keeps_inputs_in_host_memory() -> None:
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, offload_to_cpu=True)
    ours.apply_activation_checkpointing(mine, wrap, is_layer)
    assert all(map(torch.equal, train(mine), train(model())))
    assert [installed.applied.settings.input_storing is not None for installed in regions_of(mine)] == [True] * 3


@pytest.mark.parametrize("at_once", [True, False])
def test_offload_wrapper_around_a_region_keeps_its_inputs_in_host_memory(at_once: bool) -> None:
    mine = model()
    on_layers(ours, mine)
    if at_once:
        ours.apply_activation_checkpointing(mine, ours.offload_wrapper, is_layer)
    else:
        for layer in mine.layers:
            assert ours.offload_wrapper(layer) is layer
    assert all(map(torch.equal, train(mine), train(model())))
    assert [installed.applied.settings.input_storing is not None for installed in regions_of(mine)] == [True] * 3


# Per-op decisions


def test_a_policy_is_given_as_context_fn() -> None:
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, context_fn=sac.context_fn("general"))
    ours.apply_activation_checkpointing(mine, wrap, is_layer)
    assert all(map(torch.equal, train(mine), train(model())))
    report = sac.report(mine).to_dict()
    assert "attention" in str(report)


# Process groups


def sharded(put_first: bool, at: str) -> bool:
    """In one rank: train with `fully_shard`, with and without regions; whether all is the same."""
    found = []
    for with_regions in (False, True):
        network = model()
        if with_regions and put_first:
            by_partial(ours, network)
        if at == "ddp":
            network = DistributedDataParallel(network)  # type: ignore[assignment]
        else:
            for layer in network.layers:
                fully_shard(layer)
            fully_shard(network)
        if with_regions and not put_first:
            by_partial(ours, network)
        torch.manual_seed(dist.get_rank())
        found.append(train(network))
        assert len(region_paths(network)) == 3 * with_regions
    return all(map(torch.equal, *found))


@pytest.mark.parametrize("put_first", [True, False])
@pytest.mark.parametrize("at", ["fully_shard", "ddp"])
def test_training_over_ranks_is_that_without(put_first: bool, at: str) -> None:
    assert run_ranks(2, sharded, put_first, at) == [True, True]
