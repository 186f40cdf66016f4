"""torch's checkpoint_wrapper and apply_activation_checkpointing, one import line changed."""

from __future__ import annotations

import copy
import functools
import pickle
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
from sac.errors import ModelError
from tests.support.layers import PreNormLayer
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder
from tests.unit.compat.wrapping import (
    PUTS,
    Put,
    by_function,
    by_partial,
    inner_first,
    inside_one_another,
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


def test_everything_is_a_region_by_default() -> None:
    mine = model()
    ours.apply_activation_checkpointing(mine)
    called = [name for name, one in mine.named_modules() if name and not isinstance(one, nn.ModuleList)]
    assert region_paths(mine) == called
    assert all(map(torch.equal, train(mine), train(model())))


def test_a_shared_module_is_one_region() -> None:
    mine = model()
    mine.layers[2] = mine.layers[0]
    plain = copy.deepcopy(mine)
    on_layers(ours, mine)
    assert region_paths(mine) == ["layers.0", "layers.1"]
    assert all(map(torch.equal, train(mine), train(plain)))


def test_layers_are_recomputed_up_to_their_last_product() -> None:
    mine = model(1)
    on_layers(ours, mine)
    ids = torch.randint(16, (2, 8))
    with Recorder() as forward:
        model(1).layers[0](torch.randn(2, 8, 32))
    counts = []
    for network in (model(1), mine):
        out = network(ids).sum()
        with Recorder() as backward:
            out.backward()
        counts.append(backward.product_flops)
    assert counts[1] - counts[0] == forward.product_flops * 2 / 3


def test_names_and_classes_stay() -> None:
    mine, plain = model(), model()
    on_layers(ours, mine)
    assert list(mine.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in plain.named_modules()]
    assert type(mine.layers[0]) is PreNormLayer
    mine.load_state_dict(plain.state_dict())


def test_copies_and_pickles_are_regions_too() -> None:
    mine = model()
    on_layers(ours, mine)
    for other in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert region_paths(other) == region_paths(mine)
        assert all(map(torch.equal, train(other), train(model())))


def test_remove_gives_the_model_back() -> None:
    mine = model()
    for put in (inside_one_another, outer_first, inner_first):
        put(ours, mine)
        sac.remove(mine)
        assert region_paths(mine) == []
        assert all("forward" not in one.__dict__ for one in mine.modules())


def test_the_wrapper_returns_the_module_itself() -> None:
    layer = PreNormLayer()
    assert ours.checkpoint_wrapper(layer) is layer
    assert region_paths(layer) == ["PreNormLayer"]


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


def test_offload_wrapper_twice() -> None:
    layer = ours.offload_wrapper(ours.checkpoint_wrapper(nn.Linear(2, 2)))
    with pytest.raises(ModelError) as error:
        ours.offload_wrapper(layer)
    assert str(error.value) == "Linear: its inputs are kept elsewhere already"


# Per-op decisions


def test_a_policy_is_given_as_context_fn() -> None:
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, context_fn=sac.context_fn("general"))
    ours.apply_activation_checkpointing(mine, wrap, is_layer)
    assert all(map(torch.equal, train(mine), train(model())))
    report = sac.report(mine).to_dict()
    assert "attention" in str(report)


def test_a_policy_is_given_for_each_layer() -> None:
    mine = model()
    for layer in mine.layers:
        ours.checkpoint_wrapper(layer, context_fn=sac.context_fn("general", module=layer))
    assert all(map(torch.equal, train(mine), train(model())))


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
