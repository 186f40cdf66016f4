"""What scripts write into the pages of this repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

sys.path.insert(0, str(SCRIPTS))
from pages import write_between  # noqa: E402

sys.path.remove(str(SCRIPTS))


def test_text_goes_between_the_comments_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- table -->\nold\n<!-- /table -->\nbelow <!-- /table -->\n", encoding="utf-8")
    for text in ("a \\1 b", "two\nlines"):
        write_between(page, "table", text)
        assert page.read_text(encoding="utf-8") == (
            f"above\n<!-- table -->\n{text}\n<!-- /table -->\nbelow <!-- /table -->\n"
        )


def test_a_page_without_the_comments_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- other -->\nold\n<!-- /other -->\n", encoding="utf-8")
    with pytest.raises(ValueError) as error:
        write_between(page, "table", "new")
    assert str(error.value) == f"{page} has no <!-- table --> … <!-- /table -->"
    assert page.read_text(encoding="utf-8") == "<!-- other -->\nold\n<!-- /other -->\n"


@pytest.mark.parametrize(
    "name", ["hf-sweep", "plan-accuracy", "plan-pareto", "config-keys", "full-config-keys", "call-keys"]
)
def test_the_pages_have_the_comments_that_scripts_look_for(name: str) -> None:
    pages = [page.read_text(encoding="utf-8") for page in (SCRIPTS.parent / "docs").glob("*.md")]
    assert sum(page.count(f"<!-- {name} -->\n") for page in pages) == 1
    assert sum(page.count(f"\n<!-- /{name} -->") for page in pages) == 1
