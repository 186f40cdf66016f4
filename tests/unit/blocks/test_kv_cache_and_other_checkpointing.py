"""The K/V cache switch, models that share keys and values, and checkpointing that a model brings along."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

from sac.blocks.kv_cache import (
    cache_configs,
    shares_kv,
    turn_off_cache,
)
from sac.blocks.other_checkpointing import existing_checkpointing
from sac.errors import ModelError
from tests.support.model_zoo import FAMILIES, tiny
from tests.support.plain_zoo import plain

WITHOUT_CACHE = {"distilbert", "albert", "vit", "dinov2", "siglip", "clip", "swin"}
SHARING = {"gemma3n", "gemma4"}


@pytest.mark.parametrize("family", FAMILIES)
def test_no_cache_is_made_once_it_is_off(family: str) -> None:
    model, inputs = tiny(family)
    turned = turn_off_cache(model)
    assert bool(turned) == (family not in WITHOUT_CACHE)
    output = model(**inputs)
    for name in ("past_key_values", "cache_params"):
        assert output.get(name) is None
    assert list(cache_configs(model)) == []


def test_layers_that_share_through_the_cache_keep_it() -> None:
    model = nn.Linear(1, 1)
    inner = SimpleNamespace(model_type="inner", use_cache=True, num_kv_shared_layers=2)
    model.config = SimpleNamespace(model_type="outer", use_cache=True, text_config=inner)
    assert turn_off_cache(model) == ()
    assert model.config.use_cache
    assert inner.use_cache


def test_config_that_cannot_be_written() -> None:
    @dataclass(frozen=True)
    class Frozen:
        use_cache: bool = True

    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].config, model[1].config = SimpleNamespace(use_cache=True), Frozen()
    with pytest.raises(ModelError, match=r"Frozen: use_cache is on, .*\n.*fix: build the model with use_cache=False"):
        turn_off_cache(model)
    assert model[0].config.use_cache is True


@pytest.mark.parametrize("family", FAMILIES)
def test_models_that_share_keys_and_values(family: str) -> None:
    assert shares_kv(tiny(family)[0]) == (family in SHARING)


def test_sharing_is_told_by_modes_and_by_modules() -> None:
    model = nn.Linear(1, 1)
    assert not shares_kv(model)
    model.config = SimpleNamespace(model_type="x", text_config=SimpleNamespace(model_type="y"))
    assert not shares_kv(model)
    model.config.text_config.kv_sharing_modes = ["store", None]
    assert not shares_kv(model)
    model.config.text_config.kv_sharing_modes = ["store", "reuse_but_indexer"]
    assert shares_kv(model)
    attention = nn.Linear(1, 1)
    attention.is_kv_shared_layer = True
    assert shares_kv(nn.Sequential(attention))


# Checkpointing of the model's own


def llama() -> nn.Module:
    model = tiny("llama")[0]
    model.activation_checkpointing_enable()
    return model


def with_values(model: nn.Module, path: str, **values: Any) -> nn.Module:
    vars(model.get_submodule(path)).update(values)
    return model


def wrapped(*parts: str, wrapper: Any = checkpoint_wrapper) -> nn.Module:
    model = plain("titan")[0]
    for part in parts:
        path, _, name = part.rpartition(".")
        setattr(model.get_submodule(path), name, wrapper(model.get_submodule(part)))
    return model


def composable() -> nn.Module:
    model = plain("titan")[0]
    checkpoint(model.layers["2"])
    return model


OWN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # name: (the model, what is told of it and how to turn it off)
    "nothing": (lambda: tiny("llama")[0], "^$"),
    "Hugging Face": (llama, r"is on in model \(LlamaModel\) and 2 more .*activation_checkpointing_disable\(\)"),
    "one layer": (
        lambda: with_values(tiny("bert")[0].bert.encoder, "layer.1", gradient_checkpointing=True),
        r"on in layer\.1 \(BertLayer\) \(set gradient_checkpointing=False\)",
    ),
    "timm": (
        lambda: with_values(plain("VisionTransformer")[0], "", grad_checkpointing=True),
        r"\(VisionTransformer\) \(turn it off with model.set_grad_checkpointing\(False\)\)",
    ),
    "a wrapped block": (lambda: wrapped("layers.1"), r"checkpoint_wrapper is around layers\.1 \(Block\)"),
    "wrapped parts": (
        lambda: wrapped("layers.0.feed_forward", "layers.1.feed_forward"),
        r"checkpoint_wrapper is around layers\.0\.feed_forward \(SwiGLU\) and 1 more",
    ),
    "offloaded": (lambda: wrapped("layers.1", wrapper=offload_wrapper), "^$"),
    "composable": (composable, r"composable checkpoint\(\) is on layers\.2 \(Block\)"),
    "Megatron": (
        lambda: with_values(plain("titan")[0], "", config=SimpleNamespace(recompute_granularity="selective")),
        r"recompute_granularity='selective' .* \(set it to None\)",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_model_checkpoints_itself_is_told(name: str) -> None:
    build, text = OWN[name]
    assert re.search(text, existing_checkpointing(build()))
