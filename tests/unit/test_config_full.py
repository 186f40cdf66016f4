"""`FullConfig` and the keys of the full path in a config value: what is legal, and the whole text told of the rest."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import sac
from sac.config import CallOptions, parse_config, settings_of
from sac.config_keys import CALL_KEYS, FULL_CONFIG_KEYS
from sac.engine.settings import PLAIN
from sac.errors import ConfigError
from sac.full import FullConfig
from tests.support.blocks import FULL, llama_stack
from tests.support.training import built

FLAG = "    legal: true, false\n    fix: write one of these, without quotes"
QUOTE = "    fix: quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
STORES = "    legal: whole, scattered, host, contiguous, or some of the last three joined by +"
KEEPS = "    legal: first, all, or a predicate (position, tensor) -> bool"
COUNT = "    legal: a whole number, 1 or more"
PROVIDERS = "    legal: a tuple of objects with snapshot() and restore(state)"


class Counter:
    """A provider of state."""

    def snapshot(self) -> int:
        return 0

    def restore(self, state: int) -> None:
        pass

    def __repr__(self) -> str:
        return "Counter()"


COUNTER = Counter()

# What is given, and what follows `FullConfig.` (or the place of the config value).
ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "keep misspelled": (
        {"keep": "frist"},
        f'keep: keep is "frist"\n    did you mean: first\n{KEEPS}\n    fix: write "first"',
    ),
    "keep is a boolean": ({"keep": True}, f"keep: keep is true\n{KEEPS}\n{QUOTE}"),
    "keep is empty": ({"keep": None}, f"keep: keep is empty\n{KEEPS}"),
    "store misspelled": (
        {"store": "scatered"},
        f"store: store is 'scatered'\n    did you mean: scattered\n{STORES}",
    ),
    "one of two stores misspelled": (
        {"store": "scattered+hots"},
        f"store: store is 'scattered+hots'\n    did you mean: host\n{STORES}",
    ),
    "store is off": ({"store": False}, f"store: store is False\n{STORES}"),
    "store is empty": ({"store": None}, f"store: store is None\n{STORES}"),
    "store is an empty text": ({"store": ""}, f"store: store is ''\n{STORES}"),
    "stores in a list": (
        {"store": ["scattered", "Host"]},
        f"store: store is ['scattered', 'Host']\n{STORES}",
    ),
    "stores with a comma": (
        {"store": "scattered, host"},
        f"store: store is 'scattered, host'\n    did you mean: scattered\n{STORES}",
    ),
    "store twice": ({"store": "host+host"}, f"store: store is 'host+host'\n{STORES}"),
    "whole and another": ({"store": "whole+host"}, f"store: store is 'whole+host'\n{STORES}"),
    "count in quotes": (
        {"store": "contiguous", "num_checkpoints": "4"},
        f'num_checkpoints: num_checkpoints is "4"\n{COUNT}\n    fix: remove the quotes',
    ),
    "count that YAML 1.1 reads as text": (
        {"store": "contiguous", "num_checkpoints": "1e1"},
        f'num_checkpoints: num_checkpoints is "1e1"\n{COUNT}\n    fix: remove the quotes',
    ),
    "half a checkpoint": (
        {"store": "contiguous", "num_checkpoints": 4.5},
        f"num_checkpoints: num_checkpoints is 4.5\n{COUNT}",
    ),
    "no checkpoints": (
        {"store": "contiguous", "num_checkpoints": 0},
        f"num_checkpoints: num_checkpoints is 0\n{COUNT}",
    ),
    "count is a boolean": (
        {"store": "contiguous", "num_checkpoints": True},
        f"num_checkpoints: num_checkpoints is true\n{COUNT}",
    ),
    "contiguous without a count": (
        {"store": "contiguous"},
        "num_checkpoints: a contiguous store needs to know how many checkpoints it is to hold\n    fix: give "
        "num_checkpoints, the number of regions whose backward is pending at once: as a rule, of layers",
    ),
    "count without contiguous": (
        {"store": "host", "num_checkpoints": 4},
        "num_checkpoints: it counts the slots of a contiguous store, but `store` is not contiguous\n"
        "    fix: choose store contiguous, or leave num_checkpoints out",
    ),
    "memory is a word": (
        {"host_memory": "much"},
        "host_memory: 'much' is not an amount of host memory: it is not a number with a unit\n"
        '    legal: a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"',
    ),
    "no provider": ({"state": (COUNTER, 3)}, f"state: 3 is none of them\n{PROVIDERS}"),
    "a class of providers": (
        {"state": (Counter,)},
        f"state: <class 'tests.unit.test_config_full.Counter'> is none of them\n{PROVIDERS}",
    ),
    "two at once": (
        {"keep": 1, "num_checkpoints": "x"},
        f'keep: keep is 1\n{KEEPS}\n%snum_checkpoints: num_checkpoints is "x"\n{COUNT}',
    ),
}


def told(where: str, text: str) -> str:
    return f"{where}." + text.replace("%s", f"{where}.")


@pytest.mark.parametrize(("given", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_values_of_a_full_config(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FullConfig(**given)
    assert str(caught.value) == told("FullConfig", text)


@pytest.mark.parametrize(("given", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_illegal_values_in_a_config_value(mode: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), {"mode": mode, **given})
    assert str(caught.value) == told("activation_checkpointing", text)


CALL_ILLEGAL = {
    "use_reentrant": ("no", f'use_reentrant is "no"\n{FLAG}'),
    "distribute_saved_activations": ("tp", f'distribute_saved_activations is "tp"\n{FLAG}'),
    "preserve_rng_state": (None, f"preserve_rng_state is empty\n{FLAG}"),
    "early_stop": (0, f"early_stop is 0\n{FLAG}"),
}


@pytest.mark.parametrize(("key", "value", "text"), [(key, *rest) for key, rest in CALL_ILLEGAL.items()])
def test_illegal_switches(key: str, value: Any, text: str) -> None:
    assert CALL_ILLEGAL.keys() == set(CALL_KEYS)
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), {"mode": "full", key: value})
    assert str(caught.value) == f"activation_checkpointing.{key}: {text}"
    with pytest.raises(ConfigError) as caught:
        sac.checkpoint(torch.sin, torch.ones(2, requires_grad=True), **{key: value})
    assert str(caught.value) == f"sac.checkpoint.{key}: {text}"


def test_a_check_that_there_is_not() -> None:
    with pytest.raises(ConfigError) as caught:
        sac.checkpoint(torch.sin, torch.ones(2, requires_grad=True), determinism_check="defualt")
    assert str(caught.value) == (
        'sac.checkpoint.determinism_check: determinism_check is "defualt"\n    did you mean: default\n'
        '    legal: default, none\n    fix: write "default"'
    )


@pytest.mark.parametrize("key", ["tp_group", "get_rng_state_tracker"])
def test_arguments_are_no_keys(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), {"mode": "full", key: None})
    assert str(caught.value) == (
        f"activation_checkpointing: {key} is not a key of a config value\n"
        f"    fix: pass it as an argument: sac.apply(model, value, {key}=…)"
    )


def test_mode_none_makes_nothing_of_the_keys() -> None:
    """A base config is turned off by its mode, whatever else it says; without a group, too."""
    model = built(llama_stack)
    base = {"distribute_saved_activations": True, "use_reentrant": True, "layers": "sqrt"}
    sac.apply(model, {**base, "mode": "none", "policy": "llama", "granularity": "submodule"})
    assert not any("forward" in vars(module) for module in model.modules())


def test_words_in_any_spelling() -> None:
    value = {"mode": "Full", "keep": " ALL ", "store": "Host + Scattered"}
    parsed = parse_config(value)
    assert (parsed.mode, parsed.full.keep, parsed.full.store) == ("full", "all", "scattered+host")
    assert parsed.full == FullConfig(keep="all", store="scattered+host")
    assert not settings_of(FullConfig(), CallOptions(determinism_check="NONE"), "here").checks_metadata


def test_every_key_reaches_the_regions() -> None:
    value = {
        "mode": "full",
        "use_reentrant": True,
        "preserve_rng_state": False,
        "early_stop": False,
        "keep": "all",
        "store": "contiguous",
        "num_checkpoints": 3,
        "state": [COUNTER],
        "host_memory": "1GiB",
    }
    parsed = parse_config(value)
    settings = settings_of(parsed.full, parsed.options, "here")
    assert settings.input_storing is not None
    assert settings.input_storing.store is parsed.full.buffer
    assert settings.input_storing.which == "all"
    assert settings.providers == (COUNTER,)
    assert (settings.preserve_rng_state, settings.early_stop) == (False, False)
    assert settings.use_reentrant
    assert settings.transfers.host == 1 << 30
    assert {*FULL_CONFIG_KEYS, *CALL_KEYS} - value.keys() == {"distribute_saved_activations"}  # it needs a group


def test_group_that_nothing_is_scattered_over_is_not_looked_at() -> None:
    """One launcher gives its group to every config."""
    assert settings_of(FullConfig(), CallOptions(tp_group="no group"), "here") == PLAIN
    model = sac.apply(built(llama_stack), FULL, tp_group="no group")
    assert any("forward" in vars(module) for module in model.modules())


def test_a_config_is_a_value() -> None:
    config = FullConfig(store="host", keep="all")
    assert hash(config) == hash(dataclasses.replace(config))
    assert dataclasses.replace(config, keep="first").keep == "first"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.keep = "first"  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"FullConfig\.num_checkpoints"):
        dataclasses.replace(config, num_checkpoints=2)


def test_one_config_has_one_buffer() -> None:
    config = FullConfig(store="contiguous", num_checkpoints=2)
    wider = dataclasses.replace(config, num_checkpoints=4)
    assert config.buffer is not None
    assert wider.buffer is not None
    assert (config.buffer.num_checkpoints, wider.buffer.num_checkpoints) == (2, 4)
    assert config == FullConfig(store="contiguous", num_checkpoints=2)
    assert FullConfig().buffer is None
    config.reset()
    FullConfig().reset()


@pytest.mark.parametrize(
    "config", [FullConfig(), FullConfig(store="host"), FullConfig(store="Contiguous", num_checkpoints=2)]
)
def test_copies_are_equal(config: FullConfig) -> None:
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_tracker_that_cannot_be_called() -> None:
    text = "get_rng_state_tracker: 3 cannot be called\n    legal: a function that returns a tracker"
    model = built(llama_stack)
    with pytest.raises(ConfigError) as caught:
        sac.apply(model, "full", get_rng_state_tracker=3)  # type: ignore[arg-type]
    assert str(caught.value) == f"sac.apply.{text}"
    assert not any("forward" in vars(module) for module in model.modules())


def test_mode_selective_has_no_reentrant_form() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"mode": "selective", "use_reentrant": True})
    assert str(caught.value) == (
        "activation_checkpointing.use_reentrant: mode selective has no reentrant form\n"
        "    fix: leave it out: per-op decisions need the non-reentrant mode"
    )


@pytest.mark.parametrize("config", [{"store": "host"}, 0, "host", FullConfig])
def test_what_is_no_full_config(config: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        sac.checkpoint(torch.sin, torch.ones(2, requires_grad=True), config=config)
    assert str(caught.value) == (
        f"sac.checkpoint.config: {config!r} is not a FullConfig\n    legal: a FullConfig\n    fix: write "
        "sac.full.FullConfig(…); for a keyword of the function's own, functools.partial(function, config=…)"
    )
