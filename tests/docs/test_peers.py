"""docs/peers.md: each claim about another system names tests, and each of these exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

import pytest

from tests.docs.pages import ROOT, sections

PAGE = "docs/peers.md"
PEERS = (
    "torch",
    "torchtitan",
    "NeMo Automodel",
    "DeepSpeed",
    "Megatron-Core",
    "TransformerEngine",
    "fairscale",
    "xformers",
)
HEADS = ("you may rely on", "differs by design")


def tables(text: str) -> dict[str, list[list[str]]]:
    """The rows of each table of a section, by the first cell of its head."""
    found = re.findall(r"^\| ([^|]+) \| test \|\n\|[-|]+\|\n((?:\|.*\n?)+)", text, flags=re.MULTILINE)
    return {
        head: [[cell.strip() for cell in line.split("|")[1:-1]] for line in body.splitlines()] for head, body in found
    }


@lru_cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def without_test(row: list[str]) -> bool:
    """Whether a row names no test, or one that does not exist."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[-1])
    rest = re.sub(r"`tests/[\w/]+\.py::test_\w+`|, ", "", row[-1])
    return (
        not named or bool(rest) or not all((ROOT / path).exists() and name in functions(path) for path, name in named)
    )


def test_every_peer_has_both_tables() -> None:
    found = sections(PAGE)
    assert tuple(found) == PEERS
    for peer, text in found.items():
        assert tuple(tables(text)) == HEADS, peer


@pytest.mark.parametrize("peer", PEERS)
def test_every_claim_has_a_test(peer: str) -> None:
    rows = [row for table in tables(sections(PAGE)[peer]).values() for row in table]
    assert len(rows) == len({row[0] for row in rows})
    assert [row for row in rows if without_test(row)] == []


def test_a_claim_without_a_test_would_be_seen() -> None:
    this = "tests/docs/test_peers.py"
    assert not without_test(["a claim", f"`{this}::test_every_claim_has_a_test`"])
    for cell in ("", "a word", f"`{this}`", f"`{this}::test_nothing`", "`tests/nowhere.py::test_x`"):
        assert without_test(["a claim", cell]), cell
