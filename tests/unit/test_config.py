"""The config value of `activation_checkpointing:`: each legal form, and what is told of others."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.config import Config, FullConfig, parse_config
from sac.config_keys import CALL_DEFAULTS, DEFAULTS, OWN_KEYS, read_keys
from sac.engine.settings import PLAIN
from sac.errors import ConfigError, PolicyError, RegionError
from sac.policy.load import load_policy
from sac.policy.model import Layers
from sac.policy.patterns import PathPattern
from tests.promises.test_11_invisible import flat
from tests.support.blocks import llama_stack
from tests.support.training import built

GENERAL = Path(__file__).parents[2] / "policies" / "general.yaml"
MODES = [
    *((value, "none") for value in (None, False, "NONE", " none ", "False", {"mode": "None"})),
    *((value, "full") for value in (True, "Full", "true", {"mode": " FULL "}, Config("full"))),
    *((value, "selective") for value in ("Selective", {"mode": "selective"})),
]


@pytest.mark.parametrize(("value", "mode"), MODES)
def test_forms_of_a_mode(value: Any, mode: str) -> None:
    """A policy is left to the family of the model."""
    assert parse_config(value) == Config(mode)


POLICIES = {
    "name": "general",
    "capitals": "GENERAL",
    "text path": str(GENERAL),
    "PathLike": GENERAL,
    "Policy": load_policy("general"),
    "name in a mapping": {"mode": "selective", "policy": "General"},
    "PathLike in a mapping": {"mode": "selective", "policy": GENERAL},
    "Policy in a mapping": {"mode": "selective", "policy": load_policy("general")},
    "mapping in a mapping": {"mode": "selective", "policy": {"schema": "sac/v1", "extends": "general"}},
}


@pytest.mark.parametrize("value", POLICIES.values(), ids=POLICIES.keys())
def test_forms_of_a_policy(value: Any) -> None:
    parsed = parse_config(value)
    assert parsed.mode == "selective"
    assert parsed.policy is not None
    assert parsed.policy.rules == load_policy("general").rules


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
    llama = load_policy("llama")
    assert parsed == Config("selective", llama, "replay", "always", blocks, Layers("last", 2), "submodule", True)
    assert parse_config(parsed) is parsed


def test_defaults_of_the_table_are_legal_and_those_of_every_holder() -> None:
    assert parse_config({"mode": "none"}) == Config()
    assert {key: getattr(Config(), key) for key in OWN_KEYS} == {key: DEFAULTS[key] for key in OWN_KEYS}
    arguments = inspect.signature(sac.checkpoint).parameters
    assert {key: arguments[key].default for key in CALL_DEFAULTS} == CALL_DEFAULTS
    for holder in (FullConfig(), PLAIN):
        held = {one.name for one in dataclasses.fields(holder)} & DEFAULTS.keys()
        assert {key: getattr(holder, key) for key in held} == {key: DEFAULTS[key] for key in held}
    found_later = ("policy", "blocks", "layers")  # in the model
    written = {key: value for key, value in DEFAULTS.items() if key not in found_later}
    assert read_keys(written, "here") == written


# What is given, and how the text goes on after the place (` / ` begins a line of it).
ILLEGAL: list[tuple[Any, str]] = [
    (1, ": a value of type int: 1"),
    (["full"], ": a value of type list: ['full']"),
    (nn.Sequential(nn.Linear(2, 2)), ": a value of type Sequential"),
    ("selectiv", ': "selectiv" is not known / did you mean: selective / legal: none, full, selective'),
    ("checkpoint-all", ': "checkpoint-all" is not known / legal: none, full, selective'),
    ("no/such.yaml", ': the file "no/such.yaml" cannot be read: No such file or directory / fix: check'),
    ({}, ".mode: the key `mode` is missing"),
    ({"mode": None}, ".mode: mode is empty / legal: none, full, selective"),
    ({"mode": "ful"}, '.mode: mode is "ful" / did you mean: full'),
    ({"mode": "full", "stric": True}, ': unknown key "stric" / did you mean: strict'),
    ({"mode": "full", 3: 4}, ": unknown key 3"),
    ({"mode": "full", "generators": []}, ': unknown key "generators" / legal: mode, policy'),
    ({"mode": "full", "tp_group": None}, ': unknown key "tp_group" / legal: mode, policy'),
    ({"mode": "full", "policy": "llama"}, ".policy: mode full takes no policy"),
    ({"mode": "selective", "policy": "lama"}, '.policy: no shipped policy is called "lama" / did you mean: llama'),
    ({"mode": "selective", "policy": 3}, ".policy: a policy is meant, this is 3"),
    ({"mode": "full", "verify": "frist"}, '.verify: verify is "frist" / did you mean: first'),
    ({"mode": "full", "engine": "re-run"}, '.engine: engine is "re-run" / did you mean: rerun'),
    (
        {"mode": "full", "blocks": ["layers.*", "a..b"]},
        '.blocks[1]: blocks[1] is "a..b": a segment between dots is empty',
    ),
    ({"mode": "full", "layers": {"frist": 3}}, '.layers: unknown key "frist" in layers'),
    ({"mode": "full", "granularity": "blocks"}, '.granularity: granularity is "blocks" / did you mean: block'),
    ({"mode": "full", "strict": "yes"}, '.strict: strict is "yes" / legal: true, false'),
]


@pytest.mark.parametrize(("value", "text"), ILLEGAL)
def test_illegal_values(value: Any, text: str) -> None:
    beginning = f"activation_checkpointing{text}".replace(" / ", "\n    ")
    with pytest.raises(sac.SacError, match=f"^{re.escape(beginning)}") as caught:
        sac.apply(nn.Linear(2, 2), value)
    assert isinstance(caught.value, ValueError)
    assert not issubclass(RegionError, ValueError)


def test_illegal_values_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        sac.apply(nn.Linear(2, 2), {"mode": "ful", "strict": 5, "bad": 1, "engine": None})
    assert [problem.found for problem in caught.value.problems] == [
        'mode is "ful"',
        "strict is 5",
        'unknown key "bad"',
        "engine is empty",
    ]


@pytest.mark.parametrize(
    ("key", "fix"), [("tp_group", r"pass it as an argument: sac\.apply\(model, value, tp_group=…\)")]
)
def test_what_to_write_instead_of_a_key_that_is_none(key: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"fix: {fix}"):
        parse_config({"mode": "full", key: None})


# -- Policies that can be read and not be carried out: refused at `apply`, with their place in the file

UNFIT = """schema: sac/v1
rules:
  - id: mlp
    module: mlp
    do: save
  - id: misspelled
    ops: [matmul, aten.mmm, attentionn]
    do: save
"""


def told(text: str, folder: Path) -> str:
    """Write the file, see it refused by `apply` with nothing changed, and return the text without the folder."""
    path = folder / "policy.yaml"
    path.write_text(text)
    model = built(llama_stack)
    before = flat(model)
    value: Any = {"mode": "selective", "policy": path, "blocks": "blocks.*"}
    assert parse_config(value).policy is not None
    with pytest.raises(PolicyError) as caught:
        sac.apply(model, value)
    assert flat(model) == before
    return str(caught.value).replace(f"{folder}/", "")


def test_all_that_is_wrong_is_told_with_its_place(tmp_path: Path) -> None:
    lines = told(UNFIT, tmp_path).splitlines()
    assert [line.rpartition("; ")[2] for line in lines if "legal: " not in line] == [
        "policy.yaml:7:19: no op aten.mmm is registered",
        "    did you mean: aten.mm",
        "    fix: correct the name: `sac trace` without --policy lists the ops that a model runs, by their names",
        'policy.yaml:7:29: unknown save-set "attentionn"',
        "    did you mean: attention",
        "    fix: write an op with its namespace, or define the set under `sets:`",
    ]
