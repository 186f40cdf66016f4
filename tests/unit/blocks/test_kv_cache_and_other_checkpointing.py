"""The K/V cache switch, models that share keys and values, and checkpointing that a model brings along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

import sac
from sac.blocks.kv_cache import shares_kv, turn_off_cache
from sac.blocks.other_checkpointing import refuse_existing_checkpointing
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
    assert turn_off_cache(model) == ()


class SharesThroughCache(nn.Linear):
    is_kv_shared_layer = True


def test_layers_that_share_through_the_cache_keep_it() -> None:
    model = nn.Sequential(SharesThroughCache(1, 1))
    model.config = SimpleNamespace(model_type="outer", use_cache=True)
    assert turn_off_cache(model) == ()
    assert model.config.use_cache
    with pytest.raises(ModelError, match=r"they pass through the K/V cache\n.*fix: use a later release"):
        sac.apply(model, {"mode": "full", "blocks": "*"})


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
    # name: (the model, what is told of it)
    "Hugging Face": (llama, "gradient_checkpointing at model"),
    "one layer": (
        lambda: with_values(tiny("bert")[0].bert.encoder, "layer.1", gradient_checkpointing=True),
        r"gradient_checkpointing at layer\.1",
    ),
    "timm": (
        lambda: with_values(plain("VisionTransformer")[0], "", grad_checkpointing=True),
        "grad_checkpointing at the model",
    ),
    "a wrapped block": (lambda: wrapped("layers.1"), r"checkpoint_wrapper at layers\.1"),
    "composable": (composable, r"composable checkpoint\(\) at layers\.2"),
    "Megatron": (
        lambda: with_values(plain("titan")[0], "", config=SimpleNamespace(recompute_granularity="selective")),
        "recompute_granularity='selective' at the model",
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_what_the_model_checkpoints_itself_is_told(name: str) -> None:
    build, text = OWN[name]
    with pytest.raises(ModelError, match=f"own checkpointing is on: .*{text}\n.*fix: turn it off"):
        refuse_existing_checkpointing(build())


def test_offloading_is_no_checkpointing() -> None:
    for model in (wrapped("layers.1", wrapper=offload_wrapper), tiny("llama")[0]):
        refuse_existing_checkpointing(model)
