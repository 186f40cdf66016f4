"""mypy --strict sees the public names and their types: what is right passes, `sac.aply` does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

SETTINGS = "[mypy]\nstrict = True\n[mypy-sac.*]\nfollow_imports = silent\n"
RIGHT = """
import torch
import sac

def train(model: torch.nn.Linear, hidden: torch.Tensor) -> str:
    policy = sac.load_policy("llama")
    policy.save("mine.yaml")
    sac.apply(model, {"mode": "selective", "policy": policy})
    sac.checkpoint(model, hidden)
    sac.plan(model, (hidden,), budget="8GiB").save("plan.yaml")
    return str(sac.report(sac.remove(model)))
"""
MISSPELLED = "import sac\nsac.aply\nsac.full.FulConfig\nsac.load_policy(1)\n"
EXPECTED = [
    'misspelled.py:2: error: Module has no attribute "aply"; maybe "apply"?  [attr-defined]',
    'misspelled.py:3: error: Module has no attribute "FulConfig"; maybe "FullConfig"?  [attr-defined]',
    'misspelled.py:4: error: Argument 1 to "load_policy" has incompatible type "int"; expected '
    '"str | PathLike[str] | Mapping[str, object] | Policy"  [arg-type]',
    "Found 3 errors in 1 file (checked 2 source files)",
]


def test_types_of_the_public_names(tmp_path: Path) -> None:
    for name, text in (("mypy.ini", SETTINGS), ("right.py", RIGHT), ("misspelled.py", MISSPELLED)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    arguments = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", ROOT / ".mypy_cache" / "pages"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, "--python-version", "3.10", *sorted(tmp_path.glob("*.py"))],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    told = [line.rpartition("/")[2] for line in run.stdout.splitlines()]  # without the path of an earlier, cached run
    assert told == EXPECTED, run.stdout + run.stderr
