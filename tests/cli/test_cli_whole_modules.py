"""`sac check`, `sac trace` and `sac compare` of a policy whose rule saves a module as a whole."""

import json
from pathlib import Path

import pytest

from sac.tools.cli import main
from tests.cli.test_cli import tiny_llama

__all__ = ["tiny_llama"]

POLICY = """schema: sac/v1
name: whole
rules:
  - id: attention
    module: self_attn
    do: save
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "whole.yaml"
    file.write_text(POLICY)
    return str(file)


def test_check_says_that_it_is_the_module(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", path]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("attention"))
    assert "save   (the module as a whole)" in line
    assert "module self_attn" in line


def test_trace_has_one_row_for_the_module(
    tiny_llama: list[str],
    path: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers", reason="builds the model")
    assert main(["trace", *tiny_llama, "--policy", path]) == 0
    (saved,) = [line.split() for line in capsys.readouterr().out.splitlines() if "  save  " in line]
    assert saved[:7] == ["self_attn", "module", "LlamaAttention", "0", "save", "rule", "attention"]
    assert main(["trace", *tiny_llama, "--policy", path, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert not [row for row in rows if row["module"].startswith("self_attn.")]


def test_compare_runs_it(tiny_llama: list[str], path: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="builds the model")
    assert main(["compare", *tiny_llama, "--modes", f"full,{path}", "--steps", "2", "--json"]) == 0
    none, full, ours = json.loads(capsys.readouterr().out)["modes"]
    assert ours["max_gradient_difference"] == 0
    assert 0 < ours["recompute_flops"] < full["recompute_flops"]
    assert full["kept_bytes"] < ours["kept_bytes"] < none["kept_bytes"]
