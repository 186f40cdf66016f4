"""What `scripts/test` runs is there, with every promise, and a model on one process and on ranks."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def listed() -> tuple[set[str], set[str]]:
    """The paths of tests/quick.txt, and those that it leaves out."""
    lines = (ROOT / "tests" / "quick.txt").read_text(encoding="utf-8").splitlines()
    paths = {line for line in lines if line and not line.startswith("#")}
    left_out = {path for path in paths if path.startswith("!")}
    return paths - left_out, {path[1:] for path in left_out}


def test_every_path_is_there() -> None:
    paths, left_out = listed()
    assert [path for path in paths | left_out if not (ROOT / path.partition("::")[0]).exists()] == []
    assert [path for path in left_out if not any(path.startswith(f"{folder}/") for folder in paths)] == []


def test_it_has_every_promise_and_a_stack() -> None:
    paths, left_out = listed()
    assert {"tests/promises", "tests/stacks/test_matrix.py::test_a_row_of_the_page[FSDP2]"} <= paths
    assert [path for path in left_out if path.startswith("tests/promises")] == []
    assert len(list((ROOT / "tests" / "promises").glob("test_[01][0-9]_*.py"))) == 12
