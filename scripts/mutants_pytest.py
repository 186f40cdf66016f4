"""The part of `scripts/mutants` inside pytest: which tests run a mutated line, which are run, and which one failed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_hits: set[str] = set()
_tells = "MUTANTS_HITS" in os.environ  # this is a process that a test has started: what it hits lies there as files


def hit(name: str) -> None:
    """A line that the mutation ``name`` changes is about to run: put before it in the copy that tells of coverage."""
    if name not in _hits or _tells:
        _hits.add(name)
        if _tells:
            Path(os.environ["MUTANTS_HITS"], name).touch()


def pytest_configure() -> None:
    global _tells
    _tells = False
    os.environ["MUTANTS_HITS"] = tempfile.mkdtemp(prefix="mutants-hits-")


def pytest_unconfigure() -> None:
    shutil.rmtree(os.environ.pop("MUTANTS_HITS"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: Any) -> Iterator[None]:
    _hits.clear()
    begun = time.perf_counter()
    yield
    for told in Path(os.environ["MUTANTS_HITS"]).iterdir():
        _hits.add(told.name)
        told.unlink()
    if _hits and "MUTANTS_COVERED" in os.environ:
        line = {"test": item.nodeid, "seconds": round(time.perf_counter() - begun, 2), "hits": sorted(_hits)}
        with Path(os.environ["MUTANTS_COVERED"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Run just the tests in `only`, if there are any, and none of those in `but`."""
    chosen = json.loads(os.environ.get("MUTANTS_CHOSEN", "{}"))
    if chosen:
        chosen = json.loads(Path(chosen).read_text(encoding="utf-8"))
        only, but = set(chosen["only"]), set(chosen["but"])
        items[:] = [one for one in items if (not only or one.nodeid in only) and one.nodeid not in but]


def _note(report: Any) -> None:
    told = os.environ.get("MUTANTS_FAILED")
    if told and report.failed and not Path(told).exists():
        Path(told).write_text(report.nodeid, encoding="utf-8")


def pytest_runtest_logreport(report: Any) -> None:
    _note(report)


def pytest_collectreport(report: Any) -> None:
    _note(report)
