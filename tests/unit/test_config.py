"""The config value of `activation_checkpointing:`: each legal form, and the whole text told of others."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.config import CallOptions, Config, FullConfig, parse_config
from sac.config_keys import CALL_KEYS, DEFAULTS, OWN_KEYS, read_keys
from sac.engine.settings import PLAIN
from sac.errors import ConfigError, PolicyError, RegionError
from sac.policy.load import load_policy
from sac.policy.model import Layers
from sac.policy.patterns import PathPattern

GENERAL = str(Path(__file__).parents[2] / "policies" / "general.yaml")


@pytest.mark.parametrize("value", [None, False, "none", "NONE", " none ", "False", {"mode": "none"}, {"mode": "None"}])
def test_forms_of_none(value: Any) -> None:
    assert parse_config(value) == Config("none")


@pytest.mark.parametrize("value", [True, "full", "Full", "true", {"mode": "full"}, {"mode": " FULL "}])
def test_forms_of_full(value: Any) -> None:
    assert parse_config(value) == Config("full")


@pytest.mark.parametrize("value", ["selective", "Selective", {"mode": "selective"}])
def test_selective_alone_leaves_the_policy_to_the_family(value: Any) -> None:
    assert parse_config(value) == Config("selective", None)


def policy_forms() -> dict[str, Any]:
    loaded = load_policy("general")
    mapping = {"schema": "sac/v1", "extends": "general"}
    return {
        "name": "general",
        "capitals": "GENERAL",
        "text path": GENERAL,
        "relative path": os.path.relpath(GENERAL),
        "PathLike": Path(GENERAL),
        "Policy": loaded,
        "name in a mapping": {"mode": "selective", "policy": "General"},
        "path in a mapping": {"mode": "selective", "policy": GENERAL},
        "PathLike in a mapping": {"mode": "selective", "policy": Path(GENERAL)},
        "Policy in a mapping": {"mode": "selective", "policy": loaded},
        "mapping in a mapping": {"mode": "selective", "policy": mapping},
    }


@pytest.mark.parametrize("value", policy_forms().values(), ids=policy_forms().keys())
def test_forms_of_a_policy(value: Any) -> None:
    parsed = parse_config(value)
    assert parsed.mode == "selective"
    assert parsed.policy is not None
    assert parsed.policy.rules == load_policy("general").rules


def test_hyphens_of_shipped_names_do_not_matter() -> None:
    assert parse_config("DeepSeek-V3") == parse_config("deepseek_v3")


def test_every_key() -> None:
    parsed = parse_config(
        {
            "mode": "Selective",
            "policy": "llama",
            "engine": "Replay",
            "verify": "Always",
            "blocks": ["model.layers.*"],
            "layers": {"last": 2},
            "granularity": "SubModule",
            "strict": True,
        }
    )
    blocks = (PathPattern.parse("model.layers.*"),)
    assert parsed == Config(
        "selective",
        load_policy("llama"),
        "replay",
        "always",
        blocks,
        Layers(last=2),
        "submodule",
        True,
    )


def test_parsed_config_passes_through() -> None:
    parsed = parse_config("full")
    assert parse_config(parsed) is parsed


def test_defaults_of_the_table_are_those_of_every_holder() -> None:
    assert parse_config({"mode": "none"}) == Config()
    assert {key: getattr(Config(), key) for key in OWN_KEYS} == {key: DEFAULTS[key] for key in OWN_KEYS}
    arguments = inspect.signature(sac.checkpoint).parameters
    assert {key: arguments[key].default for key in CALL_KEYS} == {key: DEFAULTS[key] for key in CALL_KEYS}
    for holder in (CallOptions(), FullConfig(), PLAIN):
        held = {one.name for one in dataclasses.fields(holder)} & DEFAULTS.keys()
        assert {key: getattr(holder, key) for key in held} == {key: DEFAULTS[key] for key in held}


def test_defaults_are_legal_as_they_are() -> None:
    found_later = ("policy", "blocks", "layers")  # in the model
    written = {key: value for key, value in DEFAULTS.items() if key not in found_later}
    assert read_keys(written, "here") == (written, [])


ILLEGAL: list[tuple[Any, str]] = [
    (3, ": a value of type int: 3"),
    (1, ": a value of type int: 1"),
    (["full"], ": a value of type list: ['full']"),
    (nn.Sequential(nn.Linear(2, 2)), ": a value of type Sequential"),
    ("selectiv", ': "selectiv" is not known\n    did you mean: selective\n    legal: none, full, selective'),
    ("checkpoint-all", ': "checkpoint-all" is not known\n    legal: none, full, selective'),
    ({}, ".mode: the key `mode` is missing"),
    ({"mode": None}, ".mode: mode is empty\n    legal: none, full, selective"),
    ({"mode": "ful"}, '.mode: mode is "ful"\n    did you mean: full'),
    ({"mode": "full", "stric": True}, ": unknown key 'stric'\n    did you mean: strict"),
    ({"mode": "full", 3: 4}, ": unknown key 3"),
    (
        {"mode": "full", "freeze_buffers": True},
        ": freeze_buffers is no longer a key of a config value\n    fix: leave it out",
    ),
    ({"mode": "full", "generators": []}, ": generators is no longer a key of a config value\n    fix: leave it out"),
    ({"mode": "full", "policy": "llama"}, ".policy: mode full takes no policy"),
    ({"mode": "selective", "policy": "lama"}, '.policy: no shipped policy is called "lama"\n    did you mean: llama'),
    ({"mode": "selective", "policy": 3}, ".policy: a policy is meant, this is a value of type int"),
    ({"mode": "full", "verify": "frist"}, '.verify: verify is "frist"\n    did you mean: first'),
    ({"mode": "full", "engine": "re-run"}, '.engine: engine is "re-run"\n    did you mean: rerun'),
    ({"mode": "full", "blocks": ["layers.*", "a..b"]}, '.blocks[1]: blocks is "a..b": it has an empty segment'),
    ({"mode": "full", "layers": 3}, ".layers: layers is 3"),
    ({"mode": "full", "layers": {"frist": 3}}, '.layers.frist: unknown key "frist" in layers'),
    ({"mode": "full", "granularity": "blocks"}, '.granularity: granularity is "blocks"\n    did you mean: block'),
    (
        {"mode": "full", "strict": "yes"},
        '.strict: strict is "yes"\n    legal: true, false\n    fix: write one of these, without quotes',
    ),
]


@pytest.mark.parametrize(("value", "text"), ILLEGAL)
def test_illegal_values(value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^activation_checkpointing{re.escape(text)}") as caught:
        sac.apply(nn.Linear(2, 2), value)
    assert isinstance(caught.value, sac.SacError)
    assert isinstance(caught.value, ValueError)


def test_illegal_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), {"strict": 5, "bad": 1, "engine": None})
    assert [problem.found for problem in caught.value.problems] == [
        "unknown key 'bad'",
        "the key `mode` is missing",
        "engine is empty",
        "strict is 5",
    ]


def test_file_that_is_not_there() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_config("no/such.yaml")
    assert str(caught.value) == ('activation_checkpointing: there is no file "no/such.yaml"\n    fix: check the path')


def test_shipped_name_written_as_a_path() -> None:
    with pytest.raises(PolicyError) as caught:
        parse_config(Path("llama"))
    assert str(caught.value) == (
        'activation_checkpointing: there is no file "./llama"\n    did you mean: llama\n'
        '    fix: the shipped policy is written "llama", without a path'
    )


def test_kinds_of_errors() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(PolicyError, ValueError)
    assert issubclass(sac.SacError, Exception)
    assert issubclass(RegionError, RuntimeError)
    assert not issubclass(RegionError, ValueError)
