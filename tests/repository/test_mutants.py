"""The mutations that the tests are measured by are slips in the engine as it is today, in every promise."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MUTATIONS: tuple[Any, ...] = runpy.run_path(str(ROOT / "scripts" / "mutations.py"))["MUTATIONS"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[one.name for one in MUTATIONS])
def test_it_can_be_made(mutation: Any) -> None:
    source = (ROOT / "sac" / mutation.file).read_text(encoding="utf-8")
    assert source.count(mutation.old) == 1
    if mutation.is_cpp:
        assert mutation.new != mutation.old
        return
    mutated = ast.parse(source.replace(mutation.old, mutation.new))
    assert ast.dump(mutated) != ast.dump(ast.parse(source))


def test_there_are_enough_and_every_promise_is_broken() -> None:
    assert len(MUTATIONS) == len({one.name for one in MUTATIONS}) >= 44
    assert {one.promise for one in MUTATIONS} == set(range(1, 13))
