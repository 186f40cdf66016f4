"""The site of the documentation: Sphinx's settings. `scripts/docs` builds it, from the pages as they are.

The root of the sources is that of the repository, so that links between pages mean here what they mean there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FRONT = "README"
OVERVIEW, REFERENCE, EXAMPLES = "docs/api", "docs/site/reference", "docs/site/examples"

project = "sac"
release = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text("utf-8"), flags=re.MULTILINE)[1]  # type: ignore[index]
author = "the authors of sac"
html_title = f"sac {release}"
html_theme = "furo"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = FRONT
include_patterns = ["*.md", "docs/*.md", "docs/site/*.md", "tests/*.md"]
highlight_language = "text"
suppress_warnings = ["myst.header"]  # a page may begin with a heading of the second level

myst_heading_anchors = 4

default_role = "code"  # docstrings write code between single or double backquotes
autodoc_mock_imports = ["lightning", "torchtitan", "transformers"]  # which need not be installed
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
maximum_signature_line_length = 88


def navigation() -> Iterator[str]:
    """Yield the tables of contents of the side bar: the groups of the table in the README, then all other pages."""
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Documentation\n")[1].split("\n## ")[0]
    named: set[str] = {FRONT, EXAMPLES}
    for group, cell in re.findall(r"^\| (\w[\w ]*) \| (.+) \|$", table, flags=re.MULTILINE):
        pages = [
            (title, page or EXAMPLES) for title, page in re.findall(r"\[([^]]+)\]\((?:([\w/-]+)\.md|examples)\)", cell)
        ]
        pages += [("reference", REFERENCE)] if OVERVIEW in dict(pages).values() else []
        named |= {page for _, page in pages}
        yield _contents(group, [f"{title[0].upper()}{title[1:]} </{page}>" for title, page in pages])
    every = (path.relative_to(ROOT).with_suffix("").as_posix() for one in include_patterns for path in ROOT.glob(one))
    yield _contents("more", [f"/{page}" for page in sorted(every) if page not in named])


def _contents(caption: str, lines: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *lines, "```"])


def examples() -> Iterator[str]:
    """Yield the page of the examples: the code of each."""
    yield "# Examples"
    for path in sorted((ROOT / "examples").glob("[!_]*.py")):
        name = path.relative_to(ROOT).as_posix()
        yield f"## {name.removeprefix('examples/')}"
        yield f"```{{literalinclude}} /{name}\n:language: python\n```"


def _read(app: Any, page: str, source: list[str]) -> None:
    """Add what only the site has: tables of contents, the code of the examples, links to these."""
    text = re.sub(r"\]\(examples\)", f"](/{EXAMPLES}.md)", source[0])
    if page == FRONT:
        text = "\n\n".join([text, *navigation()])
    if page == EXAMPLES:
        text = "\n\n".join(examples())
    source[0] = text


def _finish(app: Any, error: Exception | None) -> None:
    """Lead from the folder to the front page."""
    if error is None and app.builder.name == "html":
        front = f'<!doctype html><meta http-equiv="refresh" content="0; url={FRONT}.html"><title>sac</title>'
        Path(app.outdir, "index.html").write_text(front, encoding="utf-8")


def setup(app: Any) -> None:
    """Connect the steps of this file."""
    app.connect("source-read", _read)
    app.connect("build-finished", _finish)
