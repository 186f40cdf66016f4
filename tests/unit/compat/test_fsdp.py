"""torch's checkpoint_wrapper, offload_wrapper and apply_activation_checkpointing, one import line changed."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

import sac
from sac.blocks.install import InstalledForward, ours_on, regions_of
from sac.compat import fsdp as ours
from sac.config import FullConfig
from sac.errors import ConfigError, ModelError
from tests.support.blocks import LlamaLikeBlock, Stack, llama_stack, tokens, with_dropout
from tests.support.training import assert_same, built, train


def model() -> Stack:
    return built(lambda: with_dropout(llama_stack(3)))


def assert_same_training(network: nn.Module) -> None:
    assert_same(train(model(), steps=2), train(network, steps=2))


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, LlamaLikeBlock)


def regions(network: nn.Module) -> list[str]:
    return [name for name, one in network.named_modules() if isinstance(ours_on(one), InstalledForward)]


# Ways of wrapping; each takes torch's functions or ours, and the model


def on_layers(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, check_fn=is_layer)


def by_partial(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.NO_REENTRANT)
    face.apply_activation_checkpointing(network, checkpoint_wrapper_fn=wrap, check_fn=is_layer)


def reentrant(face: Any, network: nn.Module) -> None:
    wrap = functools.partial(face.checkpoint_wrapper, checkpoint_impl=face.CheckpointImpl.REENTRANT)
    face.apply_activation_checkpointing(network, wrap, is_layer)


def by_function(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, lambda one: face.checkpoint_wrapper(one), is_layer)


def by_policy_object(face: Any, network: nn.Module) -> None:
    face.apply_activation_checkpointing(network, auto_wrap_policy=ModuleWrapPolicy({LlamaLikeBlock}))


def by_policy_with_arguments(face: Any, network: nn.Module) -> None:
    policy = CustomPolicy(lambda one: {"preserve_rng_state": True} if is_layer(one) else isinstance(one, nn.Linear))
    face.apply_activation_checkpointing(network, auto_wrap_policy=policy)


def one_by_one(face: Any, network: nn.Module) -> None:
    for place, layer in enumerate(network.blocks):
        layer.mlp = face.checkpoint_wrapper(layer.mlp)
        network.blocks[place] = face.checkpoint_wrapper(layer, preserve_rng_state=True)


WAYS = [on_layers, by_partial, reentrant, by_function, by_policy_object, by_policy_with_arguments, one_by_one]


@pytest.mark.parametrize("put", WAYS)
def test_training_and_regions_are_those_of_torch(put: Callable[[Any, nn.Module], None]) -> None:
    theirs, mine = model(), model()
    put(of_torch, theirs)
    put(ours, mine)
    wrapped = [name for name, one in theirs.named_modules() if isinstance(one, of_torch.CheckpointWrapper)]
    assert regions(mine) == [name.replace("._checkpoint_wrapped_module", "") for name in wrapped] != []
    assert_same_training(mine)
    sac.remove(mine)
    assert changed(mine) == []


def test_everything_is_a_region_by_default() -> None:
    mine = model()
    ours.apply_activation_checkpointing(mine)
    called = [name for name, one in mine.named_modules() if name and not isinstance(one, nn.ModuleList)]
    assert regions(mine) == called
    assert_same_training(mine)


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
    layer = LlamaLikeBlock()
    config = FullConfig(keep="all", store="host")
    assert ours.checkpoint_wrapper(layer, preserve_rng_state=False, config=config, **given) is layer
    (installed,) = regions_of(layer)
    settings = installed.applied.settings
    assert (settings.use_reentrant, settings.preserve_rng_state) == (is_reentrant, False)
    assert settings.input_storing is not None


def test_inputs_are_kept_in_host_memory() -> None:
    mine = model()
    wrap = functools.partial(ours.checkpoint_wrapper, config=FullConfig(store="host", keep="all"))
    ours.apply_activation_checkpointing(mine, wrap, is_layer)
    assert [installed.applied.settings.input_storing is not None for installed in regions_of(mine)] == [True] * 3
    assert_same_training(mine)


def assert_same_training_under_wrappers(network: nn.Module) -> None:
    found = train(network, steps=2)
    assert_same(
        train(model(), steps=2), {name.replace("_checkpoint_wrapped_module.", ""): found[name] for name in found}
    )


@pytest.mark.parametrize("context_fn", [noop_context_fn, sac.context_fn("general")])
def test_what_a_region_keeps_is_offloaded(context_fn: Any) -> None:
    layer = ours.offload_wrapper(ours.checkpoint_wrapper(LlamaLikeBlock(), context_fn=context_fn))
    h = torch.randn(1, 4, 32, requires_grad=True) * 1
    out, memory = layer(h), StorageWeakRef(h.untyped_storage())
    del h
    assert memory.expired()  # there is a copy
    out.sum().backward()
    mine = model()
    ours.apply_activation_checkpointing(
        mine, functools.partial(ours.checkpoint_wrapper, context_fn=context_fn), is_layer
    )
    ours.apply_activation_checkpointing(mine, ours.offload_wrapper, is_layer)
    assert_same_training_under_wrappers(mine)


@pytest.mark.parametrize("with_module", [False, True])
def test_a_policy_is_given_as_context_fn(with_module: bool) -> None:
    mine = model()
    for layer in mine.blocks:
        ours.checkpoint_wrapper(layer, context_fn=sac.context_fn("general", module=layer if with_module else None))
    assert_same_training(mine)
    assert "attention" in str(sac.report(mine).to_dict())


def test_what_modules_without_regions_save_is_offloaded() -> None:
    def shown(network: nn.Module) -> int:
        """How many saved tensors hooks around the model are given."""
        seen: list[Tensor] = []
        with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
            network(*tokens())
        return len(seen)

    mine = model()
    ours.apply_activation_checkpointing(mine, ours.offload_wrapper, is_layer)
    assert shown(mine) < shown(model())
    for layer in copy.deepcopy(mine).blocks:
        ours.checkpoint_wrapper(layer)
    assert_same_training_under_wrappers(mine)


# What is refused, which leaves nothing behind


def linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)))


def changed(network: nn.Module) -> list[str]:
    return [name for name, one in network.named_modules() if "forward" in one.__dict__]


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


CONTEXTS = {"context_fn": sac.context_fn("general"), "checkpoint_impl": ours.CheckpointImpl.REENTRANT}
UNSUPPORTED: list[tuple[dict[str, Any], str]] = [  # what is given to checkpoint_wrapper, and what the error says of it
    ({"checkpoint_impl": "reentrant"}, "checkpoint_impl: a region cannot do this\n    fix: pass a CheckpointImpl"),
    ({"checkpoint_fn": len}, "checkpoint_fn: a region cannot do this"),
    ({"context_fn": int}, "context_fn: a region cannot do this\n    fix: pass the result of sac.context_fn"),
    (CONTEXTS, "context_fn: a region cannot do this"),
    ({"offload_to_cpu": True}, 'unknown key "offload_to_cpu"'),
    ({"config": {"store": "host"}}, "config: .* is not a FullConfig"),
    ({"determinism_check": "all"}, 'determinism_check: determinism_check is "all"'),
]


@pytest.mark.parametrize(("given", "text"), UNSUPPORTED)
def test_what_cannot_be_done_is_an_error_and_changes_nothing(given: dict[str, Any], text: str) -> None:
    mine = linears()
    wrap = functools.partial(ours.checkpoint_wrapper, **given)
    for put in (wrap, lambda one: ours.apply_activation_checkpointing(one, wrap, is_linear)):
        with pytest.raises(ConfigError, match=rf"^checkpoint_wrapper(\.|: ){text}"):
            put(mine)
        assert changed(mine) == []


def a_second_region() -> None:
    mine = linears()
    ours.apply_activation_checkpointing(mine, check_fn=is_linear)
    ours.apply_activation_checkpointing(mine, check_fn=is_linear)


def beside_torchs_wrapper() -> None:
    mine = linears()
    of_torch.apply_activation_checkpointing(mine, check_fn=is_linear)
    ours.checkpoint_wrapper(mine)


REFUSED: dict[str, Callable[[], Any]] = {
    r"0\.0: sac is on this module already: .*\n    fix: call sac.remove": a_second_region,
    "Sequential: the model's own checkpointing is on: checkpoint_wrapper at ": beside_torchs_wrapper,
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises((ModelError, ConfigError), match=text):
        REFUSED[text]()
