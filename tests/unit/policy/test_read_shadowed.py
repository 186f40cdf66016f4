"""Two rules of which one can never fire, and pairs that look like it but can."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.model import Policy


def load(*rules: str) -> Policy:
    """Load a file with these rules; what each does matters to none of the tests."""
    lines = "".join(f"  - {{{rule}, do: save}}\n" for rule in rules)
    Path("p.yaml").write_text(f"schema: sac/v1\nrules:\n{lines}")
    return load_policy("p.yaml")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ops: matmul", "ops: matmul, module: mlp"),
        ("ops: [matmul, attention]", "ops: attention"),
        ('ops: "*"', "ops: [attention, aten.mm]"),
        ("ops: aten.mm", "ops: aten.mm.default"),
        ("ops: aten::mm", "ops: aten.mm"),
        ('ops: "aten.*"', "ops: aten.mm"),
        ("ops: a, module: mlp", "ops: a, module: mlp, dtype: half"),
        ('ops: a, module: "**"', "ops: a, module: mlp"),
        ("ops: a, layers: all", "ops: a, layers: {first: 2}"),
        ("ops: a, dtype: [half, float]", "ops: a, dtype: float16, shape: [_, 8]"),
        ("ops: a, call: {index: 0}", "ops: a, call: {index: 0}, module: x"),
        ("module: mlp", "module: mlp"),
        ('function: "m.*"', "function: m.Fn"),
        ("ops: a, blocks: [enc.*, dec.*]", "ops: a, blocks: enc.*, module: mlp"),
        ('ops: a, blocks: "**"', "ops: a"),
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
        ("ops: attention", "ops: [attention, matmul]"),
        ("ops: aten.mm.default", "ops: aten.mm"),
        ("ops: aten.m", "ops: aten.mm"),
        ('ops: "a*"', "ops: attention"),
        ('ops: "aten.m*"', 'ops: "aten.*"'),
        ("ops: a, module: mlp", "ops: a"),
        ("ops: a, layers: {first: 2}", "ops: a, layers: {last: 2}"),
        ("ops: a, call: {index: 0}", "ops: a, call: {index: 1}"),
        ("ops: a, shape: [_, 8]", "ops: a"),
        ("ops: a, dtype: half", "ops: a, dtype: [half, float]"),
        ("module: mlp", "ops: a, module: mlp"),
        ("ops: a, blocks: enc.*", "ops: a, blocks: [enc.*, dec.*]"),
        ('ops: "*", module: mlp', "module: mlp"),
    ],
)
def test_rules_that_can_both_fire(first: str, second: str) -> None:
    assert len(load(first, second).rules) == 2


def test_a_childs_rule_may_cover_its_parents() -> None:
    Path("parent.yaml").write_text("schema: sac/v1\nrules: [{ops: attention, module: a, do: save}]\n")
    Path("child.yaml").write_text('schema: sac/v1\nextends: parent.yaml\nrules: [{ops: "*", do: save}]\n')
    assert len(load_policy("child.yaml").rules) == 2
