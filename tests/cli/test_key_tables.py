"""The tables of config keys in the pages are those that scripts/key_tables prints from the table in the code."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import yaml

from sac.config_keys import CALL_KEYS, DEFAULTS, FULL_CONFIG_KEYS, OWN_KEYS
from tests.docs.pages import rows

SCRIPT = Path(__file__).parents[2] / "scripts" / "key_tables"
TABLES = {
    "key": ("docs/choosing-a-policy.md", OWN_KEYS),
    "key of `FullConfig`": ("docs/full-recompute.md", FULL_CONFIG_KEYS),
    "key of the call": ("docs/full-recompute.md", CALL_KEYS),
}


def test_the_tables_in_the_pages_are_the_printed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [*sys.path])  # the script adds to it
    assert runpy.run_path(str(SCRIPT))["stale"]() == [], "run scripts/key_tables"


@pytest.mark.parametrize("head", TABLES)
def test_a_table_has_every_key_once_and_a_meaning_for_each(head: str) -> None:
    page, keys = TABLES[head]
    assert [cells[0] for cells in rows(page, head)] == [f"`{key}`" for key in keys]
    assert all(cells[1] and cells[2] for cells in rows(page, head))


@pytest.mark.parametrize("head", ["key of `FullConfig`", "key of the call"])
def test_defaults_are_written_as_a_file_has_them(head: str) -> None:
    page, keys = TABLES[head]
    told = {cells[0].strip("`"): yaml.safe_load(cells[1].strip("`")) for cells in rows(page, head)}
    assert told == {key: "()" if DEFAULTS[key] == () else DEFAULTS[key] for key in keys}
