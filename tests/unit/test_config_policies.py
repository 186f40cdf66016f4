"""Policies that can be read and not be carried out: refused at `apply`, with their place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sac
from sac.config import parse_config
from sac.engine.table import resolve_policy
from sac.errors import PolicyError
from sac.ops.save_sets import SAVE_SETS
from tests.promises.test_11_invisible import flat
from tests.support.blocks import llama_stack
from tests.support.training import built

OFFLOADS = """schema: sac/v1
default: offload
rules:
  - id: attention
    ops: attention
    do: offload
  - id: products
    ops: matmul
    do: save
"""
WHOLE_MODULE = """schema: sac/v1
rules:
  - id: mlp
    module: mlp
    do: save
"""
UNKNOWN = """schema: sac/v1
rules:
  - id: products
    ops: [aten.mm, aten.mmm,
          attentionn]
    do: save
"""
PASSED_OVER = "    fix: correct the name, or put it into a save-set under `sets:`, where a missing op is skipped"


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


def test_whole_module_rule_is_refused_where_torch_lacks_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sac.config.HAS_STACKS", False)
    assert told(WHOLE_MODULE, tmp_path) == (
        f'policy.yaml:4:13: rule "mlp" saves whole modules, for which torch {torch.__version__} lacks a '
        'way\n    fix: add `ops`, for example ops: "*"'
    )


def test_unknown_ops_are_told_with_their_places(tmp_path: Path) -> None:
    sets = ", ".join(SAVE_SETS)
    assert told(UNKNOWN, tmp_path) == (
        "policy.yaml:4:20: no op aten.mmm is registered\n    did you mean: aten.mm\n"
        f"{PASSED_OVER}\n"
        'policy.yaml:5:11: unknown save-set "attentionn"\n    did you mean: attention\n'
        f"    legal: {sets}; or an op (aten.mm, aten::mm), one overload (aten.mm.default), a glob (aten.*mm*)\n"
        "    fix: write an op with its namespace, or define the set under `sets:`"
    )


def test_binding_reads_on(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(OFFLOADS)
    policy = parse_config(path).policy
    assert policy is not None
    assert resolve_policy(policy).policy is policy
