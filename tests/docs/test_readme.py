"""README.md and docs/: their snippets run, their tables name what there is, their imports work."""

from __future__ import annotations

import copy
import importlib
import json
import re
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.compat import deepspeed
from sac.config import parse_config
from sac.config_keys import CALL_KEYS, CONFIG_KEYS, FULL_CONFIG_KEYS, OWN_KEYS
from sac.full import RngTracker
from tests.docs.pages import rows, snippets, text_of
from tests.docs.snippet_models import WIDTH, Layer, Model
from tests.support.rank_programs import ModelParallelUnit
from tests.support.ranks import run_ranks

PAGE = "docs/full-recompute.md"


def names_of_a_user() -> dict[str, Any]:
    """What snippets take for granted."""
    models = {name: Model() for name in ("model", "other_model", "third_model")}
    return {
        **models,
        **{"Layer": Layer, "layer": Layer(), "projection": nn.Linear(WIDTH, WIDTH), "mpu": ModelParallelUnit()},
        "hidden": torch.randn(2, 3, WIDTH, requires_grad=True) * 1.5,
        "mask": torch.rand(2, 3, WIDTH) < 0.5,
        "tp_group": dist.group.WORLD,
        "rank": dist.get_rank(),
        "config": {"activation_checkpointing": "selective"},
    }


def megatron() -> dict[str, Any]:
    """What Megatron-Core would have, as far as the page reads it."""
    tracker = RngTracker()
    random = {"get_cuda_rng_tracker": lambda: tracker, "model_parallel_cuda_manual_seed": lambda seed: None}
    state = {"get_tensor_model_parallel_group": lambda check_initialized: dist.group.WORLD}
    return {"tensor_parallel.random": SimpleNamespace(**random), "parallel_state": SimpleNamespace(**state)}


def run_snippets(page: str) -> list[str]:
    """Run them in order, each with models and tensors of its own; train through what they made. Return what it was."""
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    trained = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(deepspeed, "_process", copy.copy(deepspeed._process))  # the process goes on to other tests
        for name, module in megatron().items():
            patch.setitem(sys.modules, f"megatron.core.{name}", module)
        Path("ds_config.json").write_text(json.dumps({"activation_checkpointing": {"partition_activations": True}}))
        for number, snippet in enumerate(snippets(page, "python")):
            names |= names_of_a_user()
            exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)
            trained += [f"{number}: {what}" for what in trained_in(names)]
    return trained


def trained_in(names: dict[str, Any]) -> list[str]:
    """Train through results and through models that sac is on; the results are taken out of `names`."""
    found = [name for name in ("out", "projected") if name in names]
    if found:
        torch.autograd.backward([names.pop(name).sum() for name in found])
    for name in ("model", "other_model", "third_model"):
        if next(regions_of(names[name]), None) is not None:
            names[name](names["hidden"].detach()).sum().backward()
            found.append(f"{name}, {str(sac.report(names[name])).splitlines()[0]}")
    return found


ON = "activation checkpointing:"
EXPECTED = {
    "README.md": [f"0: model, {ON} selective, 3 regions, policy general"],
    PAGE: [
        *("0: out", f"0: model, {ON} full, 3 regions"),
        *("1: out", "2: out", "3: out", "4: out", "5: out", "5: projected", "6: out"),
        *(f"7: other_model, {ON} full, 3 regions", f"8: third_model, {ON} selective, 3 regions, policy general"),
    ],
}


@pytest.mark.parametrize("page", EXPECTED)
def test_snippets_run_and_train(page: str) -> None:
    assert run_ranks(2, run_snippets, page) == [EXPECTED[page]] * 2


def _in_code(cell: str) -> str:
    return re.fullmatch(r"`([^`]*)`", cell)[1]  # type: ignore[index]


def table_of(head: str, names: tuple[str, ...]) -> str:
    """A table of config keys as pages have to show it: each key with its values and its line."""

    def row(name: str) -> str:
        key = CONFIG_KEYS[name]
        default = "–" if key.default in (None, ()) else f"`{getattr(key.default, 'form', key.default)}`".lower()
        others = ("`true`", "`false`") if isinstance(key.default, bool) else (f"`{word}`" for word in key.words)
        return f"| `{name}` | {', '.join(dict.fromkeys((default, *others)))} | {key.doc} |"

    return "\n".join([f"| {head} | values, the default first | |", "|---|---|---|", *map(row, names), ""])


@pytest.mark.parametrize(
    ("page", "head", "names"),
    [
        ("docs/choosing-a-policy.md", "key", OWN_KEYS),
        (PAGE, "key of `FullConfig`", FULL_CONFIG_KEYS),
        (PAGE, "key of the call", CALL_KEYS),
    ],
)
def test_tables_of_config_keys_show_the_lines_of_the_table_in_the_code(
    page: str, head: str, names: tuple[str, ...]
) -> None:
    """Where it fails, the page has to show `table`."""
    table = table_of(head, names)
    assert table in text_of(page), table


def test_stores_in_the_table_are_all_there_are():
    assert tuple(_in_code(store) for store, _ in rows(PAGE, "`store`")) == CONFIG_KEYS["store"].words


def test_config_values_for_arguments_of_megatron():
    for _, value in rows(PAGE, "Megatron's arguments"):
        assert parse_config(yaml.safe_load(_in_code(value))).mode in ("full", "selective")


def test_imports_that_take_the_place_of_others():
    for theirs, ours in ((cells[0], _in_code(cells[1])) for cells in rows(PAGE, "from")):
        names: dict[str, Any] = {}
        exec(ours, names)
        left = re.search(r" import ([\w, ]+)`", theirs)[1].split(", ")  # type: ignore[index]
        assert names.keys() >= set(left)
        for name in left:
            is_module = isinstance(names[name], ModuleType)
            public = (names[name] if is_module else importlib.import_module(ours.split()[1])).__all__
            assert public if is_module else name in public
        if "checkpoint_wrapper import" in theirs:  # the names of torch are those that torch has
            exec(theirs.strip("`"), {})


def test_the_page_of_the_api_has_the_whole_face_and_every_key_of_a_config_value():
    told = rows("docs/api.md", "name")
    assert {match for first, _ in told for match in re.findall(r"`sac\.(\w+)", first)} == set(sac.__all__)
    (line,) = [second for first, second in told if first.startswith("`sac.apply(")]
    assert set(OWN_KEYS) <= set(re.findall(r"`(\w+)`", line))
    assert "full-recompute.md" in line
