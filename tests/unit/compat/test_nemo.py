"""NeMo Automodel's functions, one import line changed: what its parallelizer does with them, and what each returns."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import sac
from sac.blocks.find import find_blocks
from sac.blocks.install import InstalledForward, ours_on, regions_of
from sac.compat.nemo import (
    apply_selective_checkpointing_to_layers,
    apply_submodule_checkpointing,
    detect_kv_sharing_and_maybe_disable_cache,
    is_selective_activation_checkpointing,
    make_selective_checkpoint_context_fn,
)
from sac.errors import ModelError, SacWarning
from tests.support.layers import stack
from tests.support.model_zoo import tiny
from tests.support.recording import Recorder


def step(model: nn.Module, inputs: Any) -> list[Tensor]:
    """The loss, all gradients and the random state after one step."""
    torch.manual_seed(0)
    loss = model(**inputs).loss if isinstance(inputs, dict) else model(*inputs).square().sum()
    loss.backward()
    found = [loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
    model.zero_grad()
    return [*found, torch.get_rng_state()]


def assert_same_step(model: nn.Module, plain: nn.Module, inputs: Any) -> None:
    expected = step(plain, inputs)
    for _ in range(2):
        found = step(model, inputs)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [block.module for block in find_blocks(model) if "vision" not in block.path and "visual" not in block.path]


def region_paths(model: nn.Module) -> list[str]:
    return [installed.region.path for installed in regions_of(model)]


def parallelize(model: nn.Module, value: Any) -> list[nn.Module]:
    """What NeMo's parallelizer does when activation checkpointing is asked for."""
    is_shared = detect_kv_sharing_and_maybe_disable_cache(model)
    layers = layers_of(model)
    if is_selective_activation_checkpointing(value):
        apply_selective_checkpointing_to_layers(model, layers, is_shared, enable_compile=False)
    else:
        apply_submodule_checkpointing(layers, is_shared)
    return layers


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("selective", True), ("Selective", True), ("SELECTIVE", True), ("full", False), ("true", False),
        (True, False), (False, False), (None, False), ({"mode": "selective"}, False), ("llama", False),
    ],
)  # fmt: skip
def test_only_the_word_is_selective(value: Any, expected: bool) -> None:
    assert is_selective_activation_checkpointing(value) is expected


@pytest.mark.parametrize("value", ["selective", "full", True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3n", "gemma4"])
@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
def test_training_is_that_without(family: str, value: Any) -> None:
    model, inputs = tiny(family)
    plain = copy.deepcopy(model)
    layers = parallelize(model, value)
    assert layers == layers_of(model)
    assert region_paths(model)
    assert_same_step(model, plain, inputs)


def test_selective_layers_are_regions_under_the_policy_of_the_family() -> None:
    model, inputs = tiny("llama")
    parallelize(model, "selective")
    count = len(layers_of(model))
    assert region_paths(model) == [f"model.layers.{place}" for place in range(count)]
    step(model, inputs)
    assert "attention" in str(sac.report(model).to_dict())
    assert {installed.region.group.table.policy.name for installed in regions_of(model)} == {"llama"}


def test_parts_of_layers_are_regions_norms_too() -> None:
    model, _ = tiny("llama")
    layers = layers_of(model)
    apply_submodule_checkpointing(layers, False)
    parts = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    assert region_paths(model) == [f"{place}.{part}" for place in range(len(layers)) for part in parts]


@pytest.mark.parametrize("family", ["gemma3n", "gemma4"])
def test_attention_that_shares_keys_and_values_is_left_alone(family: str) -> None:
    model, _ = tiny(family)
    assert detect_kv_sharing_and_maybe_disable_cache(model)
    assert model.config.get_text_config().use_cache
    with pytest.warns(SacWarning) as warned:
        apply_selective_checkpointing_to_layers(model, layers_of(model), True)
    assert [str(one.message) for one in warned] == [
        "these layers share keys and values, so that attention cannot be recomputed: their other sub-modules are "
        "recomputed as a whole"
    ]
    attention = {id(part) for layer in layers_of(model) for part in layer.self_attn.modules()}
    on = [module for module in model.modules() if isinstance(ours_on(module), InstalledForward)]
    assert on
    assert attention.isdisjoint(map(id, on))
    assert any(module is layers_of(model)[0].mlp for module in on)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_cache_is_turned_off_where_no_layer_reads_another(family: str) -> None:
    model, _ = tiny(family)
    assert model.config.get_text_config().use_cache
    assert detect_kv_sharing_and_maybe_disable_cache(model) is False
    assert not model.config.get_text_config().use_cache


def test_the_context_function_saves_attention_and_every_second_product() -> None:
    layer, context_fn = stack(1)[0], make_selective_checkpoint_context_fn()
    counts = {}
    for name, run in {
        "none": layer,
        "full": lambda x: checkpoint(layer, x, use_reentrant=False),
        "selective": lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=context_fn),
    }.items():
        out = run(torch.randn(2, 8, 32, requires_grad=True))
        with Recorder() as backward:
            out.sum().backward()
        attention = backward.ops["aten._scaled_dot_product_flash_attention_for_cpu.default"]
        counts[name] = (attention, backward.count("aten.addmm.default"))
    assert counts == {"none": (0, 0), "full": (1, 3), "selective": (0, 1)}


def test_layers_that_are_regions_already_are_refused() -> None:
    model = stack(2)
    apply_selective_checkpointing_to_layers(model, [model[1]], False)
    with pytest.raises(ModelError) as error:
        apply_selective_checkpointing_to_layers(model, list(model), False)
    assert str(error.value) == "1: this module is a region of sac already\n    fix: call sac.remove(model) first"
    assert region_paths(model) == ["1"]


def test_layers_with_checkpointing_of_their_own_are_refused() -> None:
    model = stack(2)
    model[0].up = checkpoint_wrapper(model[0].up)
    with pytest.raises(ModelError) as error:
        apply_selective_checkpointing_to_layers(model, list(model), False)
    assert str(error.value) == (
        "PreNormLayer: the model's own checkpointing is on: checkpoint_wrapper is around up (Linear) (build the model "
        "without it)\n"
        "    fix: turn it off, then call sac.apply; two at once would run every block three times"
    )
    assert region_paths(model) == []


def test_layers_that_nemo_has_flagged_are_left_alone() -> None:
    model = stack(2)
    model[0]._nemo_disable_activation_checkpointing = True
    apply_selective_checkpointing_to_layers(model, list(model), has_kv_sharing=False)
    assert [kind.count for kind in sac.report(model).kinds] == [1]
    assert not isinstance(ours_on(model[0]), InstalledForward)
