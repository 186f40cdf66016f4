"""The page of the Hugging Face sweep: no family is left out, its counts are those of its rows, some rows are true."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="tests/stacks needs transformers")

ROOT = Path(__file__).resolve().parents[2]
SOME = ("llama", "gemma2", "gpt2", "bert", "t5", "vit", "qwen3_moe", "mamba", "whisper", "clip", "albert", "encodec")


def page() -> str:
    return (ROOT / "docs/hf-sweep.md").read_text(encoding="utf-8")


def rows() -> dict[str, str]:
    """The result of each family on the page."""
    found = re.findall(r"^\| ([^|]+) \|.*\| ([^|]+) \|$", page().replace("\\|", "/"), re.MULTILINE)
    return {name: result for name, result in found if name != "family"}


def test_every_family_of_the_tested_transformers_is_a_row() -> None:
    pinned = re.search(r"transformers (\S+),", page())
    assert pinned is not None
    if transformers.__version__ != pinned.group(1):
        pytest.skip(f"the page was printed with transformers {pinned.group(1)}")
    assert set(rows()) == set(transformers.CONFIG_MAPPING.keys())


def test_the_counts_are_those_of_the_rows() -> None:
    told = re.search(r"(\d+) families: (\d+) pass, (\d+) FAIL, (\d+) not trainable, (\d+) cannot be built", page())
    assert told is not None
    counts = Counter(re.split(r"[:,] ", result)[0] for result in rows().values())
    kinds = ("passes", "FAILS", "not trainable", "cannot be built")
    assert [int(one) for one in told.groups()] == [len(rows()), *(counts[kind] for kind in kinds)]


def test_the_readme_tells_the_counts() -> None:
    told = re.search(r"(\d+ families: \d+ pass, \d+ FAIL, \d+ not trainable, \d+ cannot be built)", page())
    assert told is not None
    assert told.group(1) in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_some_families_pass_as_the_page_says(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/hf_sweep.py", "--family", *SOME, "--json", str(tmp_path / "rows.json")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    found = {row["family"]: row["status"] for row in json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))}
    assert found == dict.fromkeys(SOME, "passes"), run.stderr[-2000:]
    assert run.returncode == 0
