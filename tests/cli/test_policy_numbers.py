"""The numbers in the headers of the shipped policies are those that their command prints today."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import torch
import transformers

from sac.policy.load import shipped_policies, shipped_policy_path

SCRIPT = Path(__file__).parents[2] / "scripts" / "policy_numbers"
QUICK = ("llama", "bert")
SHOWN = {"resnet": "resnet"}  # has the cheapest products


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module; it has no ending by which the import system would know it."""
    spec = spec_from_loader("policy_numbers", SourceFileLoader("policy_numbers", str(SCRIPT)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["policy_numbers"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed_in_header(name: str) -> list[str]:
    """Return the lines below the command in a policy's header."""
    text = shipped_policy_path(name).read_text(encoding="utf-8")
    found = re.search(rf"^#     scripts/policy_numbers {name}\n((?:#     .*\n)+)", text, re.MULTILINE)
    assert found, f"{name}.yaml has no table below its command"
    return [line.removeprefix("#     ") for line in found[1].splitlines()]


@cache
def table_of(script: ModuleType, name: str, models: tuple[str, ...], under: str) -> list[str]:
    with mock.patch.dict(script.MEASURED, {name: models}):
        return script.table(name, under)


def shown_of(script: ModuleType, name: str) -> tuple[str, ...]:
    """The models of a policy that are measured here: all for two policies, of the others one, the last if not SHOWN."""
    models: tuple[str, ...] = script.MEASURED[name]
    return models if name in QUICK else (SHOWN.get(name, models[-1]),)


def test_every_policy_is_measured(script: ModuleType) -> None:
    assert set(script.MEASURED) == set(shipped_policies())
    assert {label for labels in script.MEASURED.values() for label in labels} == set(script.SHAPES)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in shipped_policies()]
)
def test_numbers_of_the_header_are_those_of_today(script: ModuleType, name: str) -> None:
    header = printed_in_header(name)
    measured_with = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}, CPU, float32"
    )
    if header[0] != measured_with:
        pytest.skip(f"the header was measured with {header[0]}, and here is {measured_with}")
    models, shown = script.MEASURED[name], shown_of(script, name)
    assert len(header) == 2 + len(models)
    rows = [row for model, row in zip(models, header[2:], strict=True) if model in shown]
    assert table_of(script, name, shown, "") == [*header[:2], *rows]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model"), [("deepseek_v3", "deepseek_v3")])
def test_policy_of_the_header_keeps_less(script: ModuleType, name: str, model: str, tmp_path: Path) -> None:
    """The lines that a header offers for a policy of one's own are one, and do what it says."""
    header = shipped_policy_path(name).read_text(encoding="utf-8")
    offered = re.search(rf"^#     extends: {name}\n(?:#     .*\n)+", header, re.MULTILINE)
    assert offered
    lines = [line.removeprefix("#     ") for line in offered[0].splitlines()]
    (tmp_path / "own.yaml").write_text("\n".join(["schema: sac/v1", "name: own", *lines]), encoding="utf-8")
    shipped, own = (
        next(line for line in table if line.startswith(model))
        for table in (table_of(script, name, (model,), under) for under in ("", str(tmp_path / "own.yaml")))
    )
    (kept, _, again, _), (own_kept, _, own_again, _) = (
        [float(number) for number in re.findall(r"([\d.]+)%", line)] for line in (shipped, own)
    )
    assert own_kept < kept
    assert own_again > again


@pytest.mark.parametrize("name", shipped_policies())
def test_policy_lies_between_full_and_none(name: str) -> None:
    """Half of the bytes at most, and by far less FLOPs than in full.

    `general` does not know which product is wide: in a ViT it keeps that of the MLP. The FLOPs are not those of half a
    forward in GPT-2 and T5 1.1, which keep pointwise results instead of products: predicted times of a GPU are on
    docs/planning-numbers.md (test_policy_optimum.py).
    """
    for line in printed_in_header(name)[2:]:
        kept, full_kept, again, full_again = (float(number) for number in re.findall(r"([\d.]+)%", line))
        assert full_kept < kept <= (57 if name == "general" else 51), line
        assert again < (0.8 if line.startswith(("gpt2 ", "t5 1.1")) else 0.6) * full_again, line


def test_tables_are_written_below_their_command(script: ModuleType) -> None:
    text = "# Why.\n#\n#     scripts/policy_numbers llama\n#     old\n#     older\nschema: sac/v1\n"
    assert script.with_table(text, "llama", ["new \\1", "newer"]) == (
        "# Why.\n#\n#     scripts/policy_numbers llama\n#     new \\1\n#     newer\nschema: sac/v1\n"
    )
