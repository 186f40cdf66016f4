"""Two rules of which one can never fire, and pairs that look like it but can."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.model import Policy


def load(first: str, second: str) -> Policy:
    rules = [dict(part.split(": ", 1) for part in rule.split("; ")) for rule in (first, second)]
    Path("p.yaml").write_text(
        "schema: sac/v1\nrules:\n"
        + "".join(f"  - {{{', '.join(f'{k}: {v}' for k, v in rule.items())}}}\n" for rule in rules)
    )
    return load_policy("p.yaml")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ops: matmul; do: save", "ops: matmul; do: recompute"),
        ("ops: matmul; do: alternate", "ops: matmul; module: mlp; do: save"),
        ("ops: [matmul, attention]; do: save", "ops: attention; do: save"),
        ('ops: "*"; do: save', "ops: [attention, aten.mm]; do: save"),
        ("ops: aten.mm; do: save", "ops: aten.mm.default; do: save"),
        ("ops: aten::mm; do: save", "ops: aten.mm; do: save"),
        ('ops: "aten.*"; do: save', "ops: aten.mm; do: save"),
        ("ops: a; module: mlp; do: save", "ops: a; module: mlp; dtype: half; do: save"),
        ('ops: a; module: "**"; do: save', "ops: a; module: mlp; do: save"),
        ("ops: a; layers: all; do: save", "ops: a; layers: {first: 2}; do: save"),
        ("ops: a; layers: {first: 2}; do: save", "ops: a; layers: {first: 2}; shape: [_, 8]; do: save"),
        ("ops: a; dtype: [half, float]; do: save", "ops: a; dtype: float16; do: save"),
        ("ops: a; call: {index: 0}; do: save", "ops: a; call: {index: 0}; module: x; do: save"),
        ("module: mlp; do: save", "module: mlp; do: recompute"),
        ("ops: a; do: save", "ops: a; blocks: enc.*; do: save"),
        ("ops: a; blocks: [enc.*, dec.*]; do: save", "ops: a; blocks: enc.*; module: mlp; do: save"),
        ('ops: a; blocks: "**"; do: save', "ops: a; do: save"),
    ],
)
def test_a_rule_that_can_never_fire(first: str, second: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load(first, second)
    assert str(caught.value) == (
        'p.yaml:4:5: the rule "p.2" can never fire: "p.1" at p.yaml:3:5 matches all it matches\n'
        '    fix: put "p.2" before "p.1", or remove it'
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ops: attention; do: save", "ops: [attention, matmul]; do: save"),
        ("ops: aten.mm.default; do: save", "ops: aten.mm; do: save"),
        ("ops: aten.m; do: save", "ops: aten.mm; do: save"),
        ('ops: "a*"; do: save', "ops: attention; do: save"),
        ('ops: "aten.m*"; do: save', 'ops: "aten.*"; do: save'),
        ("ops: a; module: mlp; do: save", "ops: a; do: save"),
        ("ops: a; module: mlp; do: save", "ops: a; module: attn; do: save"),
        ("ops: a; layers: {first: 2}; do: save", "ops: a; layers: {last: 2}; do: save"),
        ("ops: a; call: {index: 0}; do: save", "ops: a; call: {index: 1}; do: save"),
        ("ops: a; shape: [_, 8]; do: save", "ops: a; do: save"),
        ("ops: a; dtype: half; do: save", "ops: a; do: save"),
        ("ops: a; dtype: half; do: save", "ops: a; dtype: [half, float]; do: save"),
        ("module: mlp; do: save", "ops: a; module: mlp; do: save"),
        ("ops: a; blocks: enc.*; do: save", "ops: a; do: save"),
        ("ops: a; blocks: enc.*; do: save", "ops: a; blocks: dec.*; do: save"),
        ("ops: a; blocks: enc.*; do: save", "ops: a; blocks: [enc.*, dec.*]; do: save"),
        ('ops: "*"; module: mlp; do: save', "module: mlp; do: save"),
    ],
)
def test_rules_that_can_both_fire(first: str, second: str) -> None:
    assert len(load(first, second).rules) == 2


def test_a_broken_rule_shadows_nothing() -> None:
    with pytest.raises(PolicyError) as caught:
        load("ops: a; module: a/b; do: save", "ops: a; module: c; do: save")
    assert len(caught.value.problems) == 1


def test_a_childs_rule_may_cover_its_parents() -> None:
    Path("parent.yaml").write_text("schema: sac/v1\nrules: [{ops: attention, module: a, do: save}]\n")
    Path("child.yaml").write_text('schema: sac/v1\nextends: parent.yaml\nrules: [{ops: "*", do: save}]\n')
    assert len(load_policy("child.yaml").rules) == 2
