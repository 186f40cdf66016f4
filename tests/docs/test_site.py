"""`scripts/docs`: a site of all pages, whose links lead somewhere, and that describes every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

import sac
from tests.docs.pages import ROOT, pages

pytest.importorskip("sphinx", reason="the site needs sphinx, furo and myst-parser: pip install -e '.[docs]'")
pytestmark = pytest.mark.slow
MODULES = ("sac", "sac.full", *(f"sac.compat.{path.stem}" for path in (ROOT / "sac/compat").glob("*.py")))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "out"
    environment = {**os.environ, "SAC_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    run = subprocess.run([ROOT / "scripts/docs", folder], env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout == f"{folder}/index.html\n"
    return folder


def test_every_page_is_there_and_in_the_side_bar(site: Path) -> None:
    front = (site / "README.html").read_text(encoding="utf-8")
    for page in [*pages()[1:], "CONTRIBUTING.md", "CHANGELOG.md", "docs/site/examples.md", "docs/site/reference.md"]:
        assert (site / page).with_suffix(".html").exists(), page
        assert f'class="reference internal" href="{page.removesuffix(".md")}.html"' in front, page
    assert "url=README.html" in (site / "index.html").read_text(encoding="utf-8")


def test_links_lead_somewhere(site: Path) -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    count = 0
    for path, text in texts.items():
        for target, anchor in re.findall(r'(?:href|src)="([^"#?]*)[^"#]*#?([^"]*)"', text):
            if re.match(r"\w+:", target):
                continue
            file = (path.parent / unquote(target)).resolve() if target else path
            assert file.exists(), (path, target)
            assert not anchor or anchor in anchors[file], (path, target, anchor)
            count += 1
    assert count > 1000


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    ids = set(re.findall(r'\bid="([^"]+)"', (site / "docs/site/reference.html").read_text(encoding="utf-8")))
    for module in MODULES:
        if module.endswith(("__init__", "keywords", "output_discarding")):
            continue
        source = (ROOT / module.replace(".", "/")).with_suffix(".py")
        names = sac.__all__ if module == "sac" else _all_of(source)
        missing = {name for name in names if f"{module}.{name}" not in ids}
        assert missing - ({"SacError"} if module == "sac" else set()) == set(), module
    assert "sac.errors.SacError" in ids


def _all_of(source: Path) -> list[str]:
    (listed,) = re.findall(r"^__all__ = (\[.*?\])", source.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r'"(\w+)"', listed)


def test_a_broken_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# sac\n\n[a page](docs/nothing.md) [a part](#nothing)\n", encoding="utf-8")
    arguments = ["-q", "-W", "--keep-going", "-b", "dummy", "-c", str(ROOT / "docs/site"), str(tmp_path)]
    run = subprocess.run(
        [sys.executable, "-m", "sphinx", *arguments, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "cross-reference target not found: 'docs/nothing.md'" in run.stderr
    assert "cross-reference target not found: 'nothing'" in run.stderr
