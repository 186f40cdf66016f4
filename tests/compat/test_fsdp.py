"""torch's checkpoint_wrapper and apply_activation_checkpointing, one import line changed."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

import sac
from sac.blocks.wrap import regions_of
from sac.compat import fsdp as ours
from sac.errors import ConfigError, ModelError
from sac.full.full_config import FullConfig
from tests.full.layers import PreNormLayer
from tests.full.ranks import run_ranks
from tests.semantics.recording import Recorder

Put = Callable[[Any, nn.Module], Any]  # a face (torch's or ours) and the model


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(PreNormLayer() for _ in range(layers))
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = self.dropout(layer(h))
        return self.head(h)


def model(layers: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(layers)


def train(network: nn.Module, steps: int = 3) -> list[Tensor]:
    """Losses, gradients, weights and the random state after some steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    seen = []
    for _ in range(steps):
        ids = torch.randint(16, (2, 8))
        loss = network(ids).square().mean()
        loss.backward()
        seen += [loss.detach(), *(local(one.grad).clone() for one in network.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(local(one.detach()) for one in network.parameters()), torch.get_rng_state()]


def local(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, PreNormLayer)


def on_layers(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, check_fn=is_layer)


def by_partial(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.NO_REENTRANT)
    face.apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrap, check_fn=is_layer)


def reentrant(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.REENTRANT)
    face.apply_activation_checkpointing(network, wrap, is_layer)


def by_partial_of_partial(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, preserve_rng_state=False)
    wrap = functools.partial(wrap, preserve_rng_state=True, early_stop=False, determinism_check="none")
    face.apply_activation_checkpointing(network, wrap, is_layer)


def by_function(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, lambda one: face.checkpoint_wrapper(one), is_layer)


def by_policy_object(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, auto_wrap_policy=ModuleWrapPolicy({PreNormLayer}))


def by_policy_with_arguments(face: Any, network: nn.Module) -> None:
    policy = CustomPolicy(lambda one: {"preserve_rng_state": True} if is_layer(one) else isinstance(one, nn.Linear))
    face.apply_activation_checkpointing(network, auto_wrap_policy=policy)


def by_policy_function(face: Any, network: nn.Module) -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=5000)
    face.apply_activation_checkpointing(network, auto_wrap_policy=policy)


def one_by_one(face: Any, network: nn.Module) -> None:
    for place, layer in enumerate(network.layers):
        network.layers[place] = face.checkpoint_wrapper(layer, preserve_rng_state=True)


def inside_one_another(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, check_fn=lambda one: isinstance(one, (PreNormLayer, nn.Linear)))


def inner_first(face: Any, network: nn.Module) -> None:
    for place, layer in enumerate(network.layers):
        layer.up = face.checkpoint_wrapper(layer.up)
        network.layers[place] = face.checkpoint_wrapper(layer)


def outer_first(face: Any, network: nn.Module) -> None:
    for layer in network.layers:
        wrapped = face.checkpoint_wrapper(layer)
        inner = getattr(wrapped, "_checkpoint_wrapped_module", wrapped)
        inner.up = face.checkpoint_wrapper(inner.up)


PUTS: list[Put] = [
    on_layers, by_partial, reentrant, by_partial_of_partial, by_function, by_policy_object, by_policy_with_arguments,
    by_policy_function, one_by_one, inside_one_another, inner_first, outer_first,
]  # fmt: skip


def region_paths(network: nn.Module) -> list[str]:
    return [installed.region.path for installed in regions_of(network)]


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
    config = FullConfig(freeze_buffers=False)
    ours.checkpoint_wrapper(
        layer, ours.CheckpointImpl.REENTRANT, preserve_rng_state=False, determinism_check="none", config=config
    )
    (installed,) = regions_of(layer)
    settings = installed.applied.settings
    assert settings.use_reentrant
    assert (settings.preserve_rng_state, settings.checks_metadata, settings.freeze_buffers) == (False, False, False)


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
    assert [installed.applied.settings.keeping is not None for installed in regions_of(mine)] == [True] * 3


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
    assert [installed.applied.settings.keeping is not None for installed in regions_of(mine)] == [True] * 3


def test_offload_wrapper_needs_a_region() -> None:
    with pytest.raises(ModelError) as error:
        ours.offload_wrapper(nn.Linear(2, 2))
    assert str(error.value) == (
        "Linear: it is no region: what its ops save for backward cannot be moved to the host\n"
        "    fix: make it a region: checkpoint_wrapper(module, offload_to_cpu=True) moves its inputs"
    )


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


# What a region cannot do

UNSUPPORTED = {
    "checkpoint_impl": (
        {"checkpoint_impl": "reentrant"},
        "checkpoint_wrapper.checkpoint_impl: 'reentrant' is no implementation\n"
        "    legal: CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT",
    ),
    "checkpoint_fn": (
        {"checkpoint_fn": len},
        "checkpoint_wrapper.checkpoint_fn: <built-in function len> cannot be made a region\n"
        "    legal: sac.checkpoint, torch's checkpoint\n"
        "    fix: leave it out, or call the function in the module's own forward",
    ),
    "context_fn": (
        {"context_fn": int},
        "checkpoint_wrapper.context_fn: contexts of the caller's around forward and recomputation are not entered\n"
        "    fix: choose per op with context_fn=sac.context_fn(policy), or put state back with FullConfig(state=...)",
    ),
    "reentrant context_fn": (
        {"context_fn": sac.context_fn("general"), "checkpoint_impl": ours.CheckpointImpl.REENTRANT},
        "checkpoint_wrapper.context_fn: per-op decisions need the non-reentrant mode\n"
        "    fix: use CheckpointImpl.NO_REENTRANT",
    ),
    "debug": (
        {"debug": True},
        "checkpoint_wrapper.debug: True is not supported: errors of recomputation name the saved tensor without it\n"
        "    legal: false",
    ),
    "offload_to_cpu": (
        {"offload_to_cpu": 1},
        "checkpoint_wrapper.offload_to_cpu: 1 is not true or false\n    legal: true, false",
    ),
    "config": (
        {"config": {"store": "host"}},
        "checkpoint_wrapper.config: {'store': 'host'} is no FullConfig\n    legal: a sac.full.FullConfig",
    ),
    "both stores": (
        {"config": FullConfig(store="host"), "offload_to_cpu": True},
        "checkpoint_wrapper.offload_to_cpu: config keeps inputs elsewhere (store 'host')\n"
        "    fix: leave one of the two out",
    ),
    "unknown": (
        {"preserve_rng": True},
        "checkpoint_wrapper.preserve_rng: it is not known\n"
        "    did you mean: preserve_rng_state\n"
        "    legal: use_reentrant, distribute_saved_activations, tp_group, get_rng_state_tracker, preserve_rng_state, "
        "early_stop, determinism_check, config, context_fn, debug",
    ),
    "determinism_check": (
        {"determinism_check": "all"},
        "checkpoint_wrapper.determinism_check: 'all' is no check\n    legal: default, none",
    ),
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
    assert str(error.value) == text
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


def test_sac_apply_on_top_is_refused() -> None:
    mine = model()
    on_layers(ours, mine)
    with pytest.raises(ModelError) as error:
        sac.apply(mine, "full")
    assert str(error.value).startswith("layers.0: sac.apply has been called on this model before")
