"""transformers' Trainer: the same losses and weights as without us; its own switch is carried out by us.

Where it is refused: test_trl.py, whose trainers are this one.
"""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError, ModelError
from tests.stacks.composition import Outcome, assert_recomputed, differences
from tests.stacks.hf_training import applied, arguments, train, untouched
from tests.support.model_zoo import tiny

transformers = pytest.importorskip("transformers", reason="tests/stacks needs transformers")
pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

from sac.compat.huggingface import SacCallback, take_over  # noqa: E402  (needs transformers)

SELECTIVE = {"mode": "selective", "policy": "llama"}
LOGGER = "sac.compat.huggingface"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(tmp_path_factory.mktemp("plain"), untouched)


def region_paths(model: nn.Module) -> list[str]:
    return [one.region.path for one in regions_of(model)]


def assert_as(ours: Outcome, plain: Outcome) -> None:
    """The training is the same, and checkpointing was on."""
    assert_recomputed(lambda mode: plain if mode == "none" else ours, "ours")


def test_a_training_that_is_saved_and_taken_up_again(plain: Outcome, tmp_path: Path) -> None:
    train(tmp_path, applied("selective"), save_strategy="steps", save_steps=2)
    again = train(tmp_path, applied("selective"), resume=str(tmp_path / "checkpoint-2"))
    assert differences(again, plain) == []


# --- SacCallback


@pytest.mark.parametrize("model_init", [False, True])
def test_callback(model_init: bool, plain: Outcome, tmp_path: Path, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger=LOGGER):
        ours = train(tmp_path, untouched, callbacks=[SacCallback("selective")], model_init=model_init)
    assert_as(ours, train(tmp_path, untouched, model_init=True) if model_init else plain)
    (told,) = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert told.startswith(
        "activation checkpointing: selective, 2 regions, policy llama\nmodel.layers.0-1 (x2): keeps "
    )


def test_callback_with_a_value_that_means_nothing() -> None:
    with pytest.raises(ConfigError, match="selectiv"):
        SacCallback("selectiv")


# --- take_over


def test_arguments_in_json(plain: Outcome, tmp_path: Path) -> None:
    """The whole config goes through a file, as `HfArgumentParser` reads it."""
    written = json.loads(arguments(tmp_path, activation_checkpointing_kwargs=SELECTIVE).to_json_string())
    assert written["activation_checkpointing_kwargs"] == SELECTIVE
    options = {"activation_checkpointing": True, "activation_checkpointing_kwargs": SELECTIVE}
    assert_as(train(tmp_path, take_over, **options), plain)


@pytest.mark.parametrize(
    ("kwargs", "options", "mode", "paths"),
    [
        (None, {}, "selective", [0, 1, 2, 3]),
        ({"mode": "full"}, {}, "full", [0, 1, 2, 3]),
        ({"layers": {"last": 1}}, {}, "selective", [3]),
        ({"use_reentrant": False}, {"every_n_layers": 2}, "selective", [0, 2]),
        ({"mode": "full"}, {"every_n_layers": 2, "offload": True}, "full", [0, 2]),
    ],
)
def test_what_the_switch_is_given(
    kwargs: dict[str, Any] | None, options: dict[str, Any], mode: str, paths: list[int]
) -> None:
    model, batch = tiny("llama", num_hidden_layers=4)
    take_over(model)
    model.activation_checkpointing_enable(kwargs, **options)
    assert region_paths(model) == [f"model.layers.{number}" for number in paths]
    report = sac.report(model)
    assert report.mode == mode
    assert bool(report.kept_inputs) == ("offload" in options)
    assert not model.is_activation_checkpointing
    model(**batch).loss.backward()
    model.gradient_checkpointing_disable()
    assert region_paths(model) == []


def test_on_twice_and_off_and_on() -> None:
    model, batch = tiny("llama")
    take_over(model).activation_checkpointing_enable()
    model.gradient_checkpointing_enable({"mode": "full"})
    assert sac.report(model).mode == "full"
    model.model.activation_checkpointing_disable()
    model.activation_checkpointing_disable()
    assert region_paths(model) == []
    assert model.config.use_cache is True
    model.model.activation_checkpointing_enable()
    assert region_paths(model) == ["model.layers.0", "model.layers.1"]
    model(**batch).loss.backward()
    sac.remove(model).activation_checkpointing_enable()
    assert model.is_activation_checkpointing


def test_a_copy_is_taken_over_by_itself() -> None:
    model, _ = tiny("llama")
    twin = copy.deepcopy(take_over(model))
    twin.activation_checkpointing_enable()
    assert (len(region_paths(twin)), len(region_paths(model))) == (2, 0)


def test_what_cannot_be_taken_over() -> None:
    model, _ = tiny("llama")
    with pytest.raises(ModelError, match=r"Linear: this model has no activation_checkpointing_enable\(\)"):
        take_over(nn.Linear(2, 2))
    sac.apply(model, "full")
    with pytest.raises(ModelError, match="sac is on this module already"):
        take_over(model)


def test_arguments_that_mean_nothing_to_us() -> None:
    model, _ = tiny("llama")
    enable = take_over(model).activation_checkpointing_enable
    with pytest.raises(ConfigError, match='unknown key "context_fn"'):
        enable({"context_fn": print})
    with pytest.raises(ConfigError, match="mode selective has no reentrant form"):
        enable({"use_reentrant": True})
    assert region_paths(model) == []
