"""The config value of `activation_checkpointing:`: each legal form, and the whole text told of others."""

from __future__ import annotations

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.config import CallOptions, Config, FullConfig, parse_config
from sac.config_keys import CALL_KEYS, DEFAULTS, OWN_KEYS, read_keys
from sac.engine.settings import PLAIN
from sac.errors import ConfigError, PolicyError, RegionError
from sac.policy.load import load_policy, shipped_policies
from sac.policy.model import Layers
from sac.policy.patterns import PathPattern

KEYS = (
    "mode, policy, engine, verify, blocks, layers, granularity, strict, "
    "budget, optimizer, use_reentrant, "
    "distribute_saved_activations, preserve_rng_state, early_stop, keep, store, num_checkpoints, "
    "state, generators, freeze_buffers, host_memory"
)
WORDS = "none, full, selective, a shipped policy's name, a path to a YAML file, or a mapping"
SHIPPED = ", ".join(shipped_policies())
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


MODE_MISSING = "activation_checkpointing.mode: the key `mode` is missing\n    legal: none, full, selective"
LAYERS_LEGAL = (
    "    legal: all, {first: n}, {block: n}, {last: n}, {every: k, offset: j}, {fraction: f}, a list such as "
    '["0-7", "12"], or chunks of layers: sqrt, {uniform: n}'
)
ILLEGAL: dict[str, tuple[Any, str]] = {
    "number": (3, f"activation_checkpointing: a value of type int: 3\n    legal: {WORDS}"),
    "one is not true": (1, f"activation_checkpointing: a value of type int: 1\n    legal: {WORDS}"),
    "list": (["full"], f"activation_checkpointing: a value of type list: ['full']\n    legal: {WORDS}"),
    "bytes": (b"full", f"activation_checkpointing: a value of type bytes: b'full'\n    legal: {WORDS}"),
    "model": (
        nn.Sequential(*(nn.Linear(100, 100) for _ in range(9))),
        "activation_checkpointing: a value of type Sequential: Sequential(\\n  (0): Linear(in_features=100, "
        f"out_features=1...\n    legal: {WORDS}",
    ),
    "misspelled": (
        "selectiv",
        'activation_checkpointing: "selectiv" is not known\n    did you mean: selective\n'
        f"    legal: none, full, selective, {SHIPPED}, a path to a YAML file, or a mapping",
    ),
    "nothing near": (
        "checkpoint-all",
        'activation_checkpointing: "checkpoint-all" is not known\n    legal: none, full, selective, '
        f"{SHIPPED}, a path to a YAML file, or a mapping",
    ),
    "empty mapping": ({}, MODE_MISSING),
    "no mode": ({"policy": "llama"}, MODE_MISSING),
    "mode is null": (
        {"mode": None},
        "activation_checkpointing.mode: None is not a mode\n    did you mean: none\n    legal: none, full, selective",
    ),
    "mode is true": (
        {"mode": True},
        "activation_checkpointing.mode: True is not a mode\n    did you mean: full\n    legal: none, full, selective",
    ),
    "mode misspelled": (
        {"mode": "ful"},
        "activation_checkpointing.mode: 'ful' is not a mode\n    did you mean: full\n    legal: none, full, selective",
    ),
    "unknown key": (
        {"mode": "full", "stric": True},
        f"activation_checkpointing: unknown key 'stric'\n    did you mean: strict\n    legal: {KEYS}",
    ),
    "key that is no text": (
        {"mode": "full", 3: 4},
        f"activation_checkpointing: unknown key 3\n    legal: {KEYS}",
    ),
    "policy with mode full": (
        {"mode": "full", "policy": "llama"},
        "activation_checkpointing.policy: mode full takes no policy\n"
        "    fix: write `mode: selective`, or leave the policy out",
    ),
    "policy unknown": (
        {"mode": "selective", "policy": "lama"},
        'activation_checkpointing.policy: no shipped policy is called "lama"\n    did you mean: llama\n'
        f'    legal: {SHIPPED}\n    fix: to name a file, give a path that ends in .yaml or has a "/" in it',
    ),
    "policy of the wrong type": (
        {"mode": "selective", "policy": 3},
        "activation_checkpointing.policy: a policy is meant, this is a value of type int\n"
        f"    legal: a path, a mapping, a Policy, or one of {SHIPPED}",
    ),
    "verify misspelled": (
        {"mode": "full", "verify": "frist"},
        "activation_checkpointing.verify: 'frist' is not a time to verify at\n    did you mean: first\n"
        "    legal: first, always, never",
    ),
    "engine misspelled": (
        {"mode": "full", "engine": "re-run"},
        "activation_checkpointing.engine: 're-run' is not an engine\n    did you mean: rerun\n"
        "    legal: auto, rerun, replay",
    ),
    "blocks": (
        {"mode": "full", "blocks": ["layers.*", "a..b"]},
        'activation_checkpointing.blocks[1]: blocks is "a..b": it has an empty segment: two dots in a row, or a dot '
        'at an end\n    legal: a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"',
    ),
    "layers": (
        {"mode": "full", "layers": 3},
        f"activation_checkpointing.layers: layers is 3\n{LAYERS_LEGAL}\n"
        "    fix: write [3] for that layer alone, {first: 3} for the first ones",
    ),
    "layers misspelled": (
        {"mode": "full", "layers": {"frist": 3}},
        'activation_checkpointing.layers.frist: unknown key "frist" in layers\n    did you mean: first\n'
        '    legal: first, block, last, every, offset, fraction, uniform\n    fix: write "first"',
    ),
    "granularity": (
        {"mode": "full", "granularity": "blocks"},
        "activation_checkpointing.granularity: 'blocks' is not a granularity\n    did you mean: block\n"
        "    legal: block, submodule",
    ),
    "strict": (
        {"mode": "full", "strict": "yes"},
        "activation_checkpointing.strict: 'yes' is not true or false\n    legal: true, false\n"
        "    fix: write true, without quotes",
    ),
    "all at once": (
        {"strict": 5, "bad": 1, "engine": None},
        f"activation_checkpointing: unknown key 'bad'\n    legal: {KEYS}\n{MODE_MISSING}\n"
        "activation_checkpointing.engine: None is not an engine\n    legal: auto, rerun, replay\n"
        "activation_checkpointing.strict: 5 is not true or false\n    legal: true, false",
    ),
}


@pytest.mark.parametrize(("value", "text"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_illegal_values(value: Any, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), value)
    assert str(caught.value) == text
    assert isinstance(caught.value, sac.SacError)
    assert isinstance(caught.value, ValueError)


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
