"""mypy --strict accepts the Python on the pages: the public names and their types are seen, `sac.aply` is not."""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages, snippets

pytest.importorskip("mypy")
pytestmark = pytest.mark.slow

# sac's own code is checked by its own settings. Types of other packages are not looked into, and a page need not
# annotate its own functions.
SETTINGS = """
[mypy]
strict = True
disallow_untyped_defs = False
disallow_incomplete_defs = False
disallow_untyped_calls = False
disallow_subclassing_any = False
[mypy-sac.*]
follow_imports = silent
[mypy-transformers.*,lightning.*,torchtitan.*,torchao.*,timm.*,peft.*,trl.*,accelerate.*,diffusers.*,deepspeed.*]
follow_imports = skip
ignore_missing_imports = True
"""
KNOWN = {  # what snippets take for granted; all else that they do not define is Any
    "model": "Model",
    "other_model": "Model",
    "third_model": "Model",
    "layer": "Model",
    "hidden": "torch.Tensor",
    "mask": "torch.Tensor",
    "config": "dict[str, str]",
    "optimizer": "torch.optim.Optimizer",
}
MISSPELLED = "import sac\nsac.aply\nsac.full.FulConfig\nsac.load_policy(1)\n"
EXPECTED = [
    'misspelled.py:2: error: Module has no attribute "aply"; maybe "apply"?  [attr-defined]',
    'misspelled.py:3: error: Module has no attribute "FulConfig"; maybe "FullConfig"?  [attr-defined]',
    'misspelled.py:4: error: Argument 1 to "load_policy" has incompatible type "int"; expected '
    '"str | PathLike[str] | Mapping[str, object] | Policy"  [arg-type]',
    "Found 3 errors in 1 file (checked {} source files)",
]
HEAD = "from typing import Any\nimport torch\nclass Model(torch.nn.Module):\n    layers: torch.nn.ModuleList\n"


def modules() -> Iterator[tuple[str, str]]:
    """Yield for each snippet a name and a module: it imports what earlier ones do, and declares what no one defines."""
    for page in pages():
        imports: dict[str, str] = {}
        for number, snippet in enumerate(snippets(page, "python")):
            tree = ast.parse(snippet)
            used = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
            own = {node.id for node in used if isinstance(node.ctx, ast.Store)}
            own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            own |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
            mine = dict(imported(tree))
            known = own | mine.keys() | imports.keys() | set(dir(builtins)) | {"torch", "Model"}
            names = ({node.id for node in used} - known) | (own & KNOWN.keys() & read_first(tree))
            head = [imports[name] for name in imports if name not in mine]
            head += [f"{name}: {KNOWN.get(name, 'Any')}" for name in sorted(names)]
            yield f"{Path(page).stem}_{number}".replace("-", "_"), "\n".join([HEAD, *head, snippet])
            imports |= mine


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            origin = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
            for one in node.names:
                text = f"{origin}import {one.name}" + (f" as {one.asname}" if one.asname else "")
                yield (one.asname or one.name).partition(".")[0], text


def read_first(tree: ast.Module) -> set[str]:
    """Return the names that are read before they are assigned, as in ``model = f(model)``."""
    first: dict[str, bool] = {}
    for statement in tree.body:
        nodes = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        if isinstance(statement, ast.Assign):  # the value comes before the target
            nodes.sort(key=lambda node: isinstance(node.ctx, ast.Store))
        else:
            nodes.sort(key=lambda node: (node.lineno, node.col_offset))
        for node in nodes:
            first.setdefault(node.id, isinstance(node.ctx, ast.Load))
    return {name for name, is_read in first.items() if is_read}


def test_pages(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    written = {**dict(modules()), "misspelled": MISSPELLED}
    assert len(written) > 30
    for name, text in written.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    arguments = ["--config-file", tmp_path / "mypy.ini", "--cache-dir", ROOT / ".mypy_cache" / "pages"]
    run = subprocess.run(
        [sys.executable, "-m", "mypy", *arguments, "--python-version", "3.10", *sorted(tmp_path.glob("*.py"))],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    told = [
        line.rpartition("/")[2] for line in run.stdout.splitlines()
    ]  # what is cached has the path of an earlier run
    assert told == [line.replace("{}", str(len(written))) for line in EXPECTED], run.stdout + run.stderr
