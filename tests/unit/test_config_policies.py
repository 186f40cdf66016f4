"""Policies that can be read and not be carried out: refused at `apply`, with their place in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import sac
from sac.config import parse_config
from sac.errors import PolicyError
from tests.promises.test_11_invisible import flat
from tests.support.blocks import llama_stack
from tests.support.training import built

POLICY = """schema: sac/v1
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
    lines = told(POLICY, tmp_path).splitlines()
    assert [line.rpartition("; ")[2] for line in lines if "legal: " not in line] == [
        "policy.yaml:7:19: no op aten.mmm is registered",
        "    did you mean: aten.mm",
        "    fix: correct the name, or put it into a save-set under `sets:`, where a missing op is skipped",
        'policy.yaml:7:29: unknown save-set "attentionn"',
        "    did you mean: attention",
        "    fix: write an op with its namespace, or define the set under `sets:`",
    ]


def test_whole_modules_cannot_be_saved_where_torch_lacks_a_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sac.config.HAS_STACKS", False)
    assert told(POLICY, tmp_path).splitlines() == [
        f'policy.yaml:4:13: rule "mlp" saves whole modules, for which torch {torch.__version__} lacks a way',
        '    fix: add `ops`, for example ops: "*"',
    ]
