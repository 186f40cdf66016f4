"""scripts/code_table counts what it says it counts."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "code_table"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("code_table", str(SCRIPT))
    spec = importlib.util.spec_from_loader("code_table", loader)
    assert spec is not None
    module = sys.modules["code_table"] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_lines_are_counted_by_what_is_on_them(script):
    code = 'x = 1  # why\n# because\n\n\ndef f():\n    """More."""\n    return """a\n    b"""\n'
    source = '"""Text\nof two lines."""\n\n' + code
    found = script.lines_of(source)
    assert (found.code, found.docstrings, found.comments, found.blank) == (4, 3, 1, 3)
    assert found.total == len(source.splitlines())


def test_an_argument_is_followed_under_other_names_and_into_other_files(script):
    package = script.Package()
    walk = package.walk("sac.recompute.regions", "Region.run", "args")
    assert walk[0] == "sac.recompute.regions"
    assert {"sac.region.inputs", "sac.stores.store"} <= set(walk)  # RegionInputs(args, …), and its leaves from there
    assert "sac.planner.planner" not in walk
    assert package.walk("sac.tensors", "describe", "tensor") == ["sac.tensors"]


def test_words_are_looked_for_in_names_of_classes_and_in_annotated_names(script):
    assert script.split_name("OpTraceRow") == ["op", "trace", "row"]
    assert "class StepRecord" in script.words_of(script.Package(), "record")
    assert not [one for one in script.words_of(script.Package(), "record") if "Recorder" in one]


def test_it_prints_a_table_and_json(script):
    table = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True).stdout
    found = json.loads(subprocess.run([sys.executable, str(SCRIPT), "--json"], capture_output=True, text=True).stdout)
    assert table.splitlines()[0].split()[-1] == str(found["files"])
    paths = list((SCRIPT.parents[1] / "sac").rglob("*.py"))
    assert found["files"] == len(paths)
    assert sum(found["lines"].values()) == sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_list_of_files_in_internals_is_the_printed_one(script):
    page = (SCRIPT.parents[1] / "docs" / "internals.md").read_text(encoding="utf-8")
    begin, end = "<!-- files: scripts/code_table --files -->\n", "\n<!-- end of files -->"
    assert page[page.index(begin) + len(begin) : page.index(end)] == script.files()
