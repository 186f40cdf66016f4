"""`FullConfig` and the keys of the full path in a config value: what is legal, and what is told of the rest."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch

import sac
from sac.config import parse_config, settings_of
from sac.engine.settings import PLAIN
from sac.errors import ConfigError
from sac.full import FullConfig
from tests.support.blocks import FULL, llama_stack
from tests.support.training import built


class Counter:
    """A provider of state."""

    def snapshot(self) -> int:
        return 0

    def restore(self, state: int) -> None:
        pass

    def __repr__(self) -> str:
        return "Counter()"


COUNTER = Counter()
FLAG = " / legal: true, false"
STORE = " / legal: whole, scattered, host, contiguous, or some of the last three joined by +"
KEEP = " / legal: first, all, or a predicate (position, tensor) -> bool"
COUNT = " / legal: a whole number, 1 or more"

# What is given, and how the text goes on after the place (` / ` begins a line of it).
ILLEGAL: list[tuple[dict[str, Any], str]] = [
    ({"keep": "frist"}, 'keep: keep is "frist" / did you mean: first / legal: first, all, or a pred'),
    ({"keep": True}, f"keep: keep is true{KEEP}"),
    ({"keep": None}, f"keep: keep is empty{KEEP}"),
    ({"store": "scatered"}, 'store: store is "scatered" / did you mean: scattered / legal: whole, scattered'),
    ({"store": "scattered+hots"}, 'store: store is "scattered+hots" / did you mean: host / legal: whole, scattered'),
    ({"store": False}, f"store: store is false{STORE}"),
    ({"store": ""}, f'store: store is ""{STORE}'),
    ({"store": ["scattered", "Host"]}, f"store: store is a list{STORE}"),
    ({"store": "scattered, host"}, 'store: store is "scattered, host" / did you mean: scattered'),
    ({"store": "host+host"}, f'store: store is "host+host"{STORE}'),
    ({"store": "whole+host"}, f'store: store is "whole+host"{STORE}'),
    ({"store": "contiguous", "num_checkpoints": 4.5}, f"num_checkpoints: num_checkpoints is 4.5{COUNT}"),
    ({"store": "contiguous", "num_checkpoints": 0}, f"num_checkpoints: num_checkpoints is 0{COUNT}"),
    ({"store": "contiguous"}, "num_checkpoints: a contiguous store needs to know how many checkpoints it is to hold"),
    ({"store": "host", "num_checkpoints": 4}, "num_checkpoints: it counts the slots of a contiguous store, but"),
    ({"host_memory": "much"}, 'host_memory: host_memory is "much": it is not a number with a unit'),
    ({"state": (COUNTER, 3)}, "state: 3 is not a provider of state / legal: a tuple of objects with snapshot() and"),
    ({"state": (Counter,)}, "state: <class 'tests.unit.test_config_full.Counter'> is not a provider of state"),
]


def told(call: Any, *args: Any, **kwargs: Any) -> str:
    """The text of the error that the call raises, with ` / ` for the beginning of a line."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value).replace("\n    ", " / ")


@pytest.mark.parametrize(("given", "text"), ILLEGAL)
def test_illegal_values(given: dict[str, Any], text: str) -> None:
    assert told(FullConfig, **given).startswith(f"FullConfig.{text}")
    for mode in ("none", "full", "selective"):
        assert told(parse_config, {"mode": mode, **given}).startswith(f"activation_checkpointing.{text}")


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("use_reentrant", "no", f'use_reentrant is "no"{FLAG}'),
        ("distribute_saved_activations", "tp", f'distribute_saved_activations is "tp"{FLAG}'),
        ("preserve_rng_state", None, f"preserve_rng_state is empty{FLAG}"),
        ("early_stop", 0, f"early_stop is 0{FLAG}"),
        ("early_stop", torch.ones(2), f"early_stop is a value of type Tensor{FLAG}"),
        ("use_reentrant", torch.tensor(False), f"use_reentrant is a value of type Tensor{FLAG}"),
    ],
)
def test_illegal_switches(key: str, value: Any, text: str) -> None:
    x = torch.ones(2, requires_grad=True)
    assert told(parse_config, {"mode": "full", key: value}) == f"activation_checkpointing.{key}: {text}"
    assert told(sac.checkpoint, torch.sin, x, **{key: value}) == f"sac.checkpoint.{key}: {text}"


def test_illegal_arguments() -> None:
    x = torch.ones(2, requires_grad=True)
    text = told(sac.checkpoint, torch.sin, x, determinism_check="defualt")
    assert text.startswith('sac.checkpoint.determinism_check: determinism_check is "defualt" / did you mean: default')
    for config in ({"store": "host"}, 0, FullConfig):
        text = told(sac.checkpoint, torch.sin, x, config=config)
        assert text.startswith(f"sac.checkpoint.config: {config!r} is not a FullConfig / legal: a FullConfig / fix: ")
    model = built(llama_stack)
    text = told(sac.apply, model, "full", get_rng_state_tracker=3)
    assert text.startswith("sac.apply.get_rng_state_tracker: 3 cannot be called / legal: a function that returns a")
    assert not any("forward" in vars(module) for module in model.modules())


def test_mode_selective_has_no_reentrant_form() -> None:
    text = told(parse_config, {"mode": "selective", "use_reentrant": True})
    assert text.startswith("activation_checkpointing.use_reentrant: mode selective has no reentrant form / fix: leave")


def test_mode_none_makes_nothing_of_the_keys() -> None:
    """A base config is turned off by its mode, whatever else it says; without a group, too."""
    model = built(llama_stack)
    base = {"distribute_saved_activations": True, "use_reentrant": True, "layers": "sqrt"}
    sac.apply(model, {**base, "mode": "none", "policy": "llama", "granularity": "submodule"})
    assert not any("forward" in vars(module) for module in model.modules())


def test_words_in_any_spelling() -> None:
    parsed = parse_config({"mode": "Full", "keep": " ALL ", "store": "Host + Scattered"})
    assert (parsed.mode, parsed.full) == ("full", FullConfig(keep="all", store="scattered+host"))
    assert not settings_of(FullConfig(), "here", determinism_check="NONE").checks_metadata


def test_group_that_nothing_is_scattered_over_is_not_looked_at() -> None:
    """One launcher gives its group to every config."""
    assert settings_of(FullConfig(), "here", tp_group="no group") == PLAIN
    model = sac.apply(built(llama_stack), FULL, tp_group="no group")
    assert any("forward" in vars(module) for module in model.modules())


def test_a_config_is_a_value_with_one_buffer() -> None:
    config = FullConfig(store="Contiguous", num_checkpoints=2)
    wider = dataclasses.replace(config, num_checkpoints=4)
    assert (config.placement.num_checkpoints, wider.placement.num_checkpoints) == (2, 4)
    assert FullConfig().placement is None
    config.reset()
    for one in (config, FullConfig(), FullConfig(store="host", keep="all")):
        assert hash(one) == hash(dataclasses.replace(one))
        assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.keep = "all"  # type: ignore[misc]
    assert told(dataclasses.replace, FullConfig(), num_checkpoints=2).startswith("FullConfig.num_checkpoints")
