"""What a policy takes from its parents, and chains that cannot be followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy import load as shipped
from sac.policy.load import load_policy
from sac.policy.model import Decision, Layers
from sac.policy.patterns import PathPattern


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "shipped"
    directory.mkdir()
    (directory / "general.yaml").write_text("schema: sac/v1\nrules: [{id: general, ops: matmul, do: alternate}]\n")
    monkeypatch.setattr(shipped, "shipped_directory", lambda: directory)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(f"schema: sac/v1\n{text}\n")


def rules(source: object) -> list[tuple[str, str]]:
    """The rules of a policy: what each is called, and its first op."""
    return [(rule.id, rule.ops[0]) for rule in load_policy(source).rules]  # type: ignore[arg-type]


def error(source: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)  # type: ignore[arg-type]
    return str(caught.value)


def test_rules_of_the_child_come_before_those_of_its_parent() -> None:
    write("child.yaml", "extends: general\nrules: [{id: own, ops: attention, do: save}]")
    child = load_policy("child.yaml")
    assert [(rule.id, rule.origin) for rule in child.rules] == [("own", "child"), ("general", "general")]
    assert (child.extends, child.name) == (("general",), "child")


def test_a_rule_hides_its_parents_rule_of_the_same_id_unless_sac_made_up_the_id() -> None:
    write("child.yaml", "extends: general\nrules: [{id: other, ops: a, do: save}, {id: general, ops: b, do: save}]")
    assert rules("child.yaml") == [("other", "a"), ("general", "b")]
    write("parent.yaml", "name: same\nrules: [{ops: a, do: save}, {ops: b, do: save}]")
    write("child.yaml", "name: same\nextends: parent.yaml\nrules: [{ops: c, do: save}]")
    assert rules("child.yaml") == [("same.1", "c"), ("same.1.2", "a"), ("same.2", "b")]


def test_default_and_regions_come_from_the_first_that_sets_them() -> None:
    write("old.yaml", "default: save\nregions: {blocks: [a.*], layers: {first: 2}}\nrules: []")
    write("mid.yaml", "extends: old.yaml\nregions: {blocks: b.*}")
    write("new.yaml", "extends: mid.yaml")
    policy = load_policy("new.yaml")
    assert policy.default is Decision.SAVE
    assert policy.blocks == (PathPattern.parse("b.*"),)
    assert policy.layers == Layers(first=2)
    places = [policy.where(key) for key in ("default", "blocks", "layers")]
    assert places == ["old.yaml:2:10", "mid.yaml:3:19", "old.yaml:3:34"]
    write("own.yaml", "extends: mid.yaml\ndefault: recompute\nregions: {layers: all}")
    own = load_policy("own.yaml")
    assert (own.default, own.layers) == (Decision.RECOMPUTE, Layers())


def test_sets_are_joined_and_models_are_not_inherited() -> None:
    write("parent.yaml", "models: [llama]\nsets: {attention: [a, b], mine: c}\nrules: []")
    write("child.yaml", "extends: parent.yaml\nsets: {attention: [d, b]}")
    child = load_policy("child.yaml")
    assert child.sets == {"attention": ("d", "b", "a"), "mine": ("c",)}
    assert child.models == ()
    assert [str(mark) for mark in child.set_locations.values()] == ["child.yaml:3:8", "parent.yaml:3:27"]


def test_parents_are_followed_in_order_and_a_shared_one_comes_last() -> None:
    write("base.yaml", "rules: [{id: base, ops: a, do: save}, {id: x, ops: b, do: save}]")
    write("left.yaml", "extends: base.yaml\nrules: [{id: left, ops: c, do: save}]")
    write("right.yaml", "extends: base.yaml\nrules: [{id: right, ops: d, do: save}, {id: x, ops: e, do: save}]")
    write("child.yaml", "extends: [left.yaml, right.yaml]")
    assert rules("child.yaml") == [("left", "c"), ("right", "d"), ("x", "e"), ("base", "a")]
    assert load_policy("child.yaml").extends == ("left", "right", "base")


def test_where_parents_are_looked_for() -> None:
    """Relative paths start at the file that names them; a mapping has none; a name is a shipped policy."""
    write("sub/deep/child.yaml", "extends: ../parent.yaml")
    write("sub/parent.yaml", "rules: [{id: here, ops: a, do: save}]")
    write("parent.yaml", "rules: [{id: top, ops: a, do: save}]")
    assert rules("sub/deep/child.yaml") == [("here", "a")]
    assert rules({"extends": ["parent.yaml", "general"]}) == [("top", "a"), ("general", "matmul")]
    write("general.yaml", "extends: General\nrules: [{id: own, ops: attention, do: save}]")
    assert rules("general.yaml") == [("own", "attention"), ("general", "matmul")]


def test_chains_that_do_not_end() -> None:
    write("start.yaml", "extends: a.yaml")
    write("a.yaml", "extends: b.yaml")
    write("b.yaml", "extends: [./a.yaml]")
    assert error("start.yaml") == (
        "b.yaml:2:11: extends goes in a circle: a.yaml -> b.yaml -> a.yaml\n    fix: remove one of these `extends`"
    )
    write("self.yaml", "extends: self.yaml")
    assert error("self.yaml").startswith("self.yaml:2:10: extends goes in a circle: self.yaml -> self.yaml\n")
    for place in range(20):
        write(f"p{place}.yaml", f"extends: p{place + 1}.yaml")
    assert error("p0.yaml") == "p15.yaml:2:10: extends goes more than 16 files deep\n    fix: join some of the files"


def test_problems_of_child_and_parents_come_together() -> None:
    write("parent.yaml", "rules: [{ops: a}]")
    write("broken.yaml", "rules: [")
    write("child.yaml", "extends: [parent.yaml, broken.yaml, genral, no.yaml]\nrules: 3")
    assert [line for line in error("child.yaml").splitlines() if not line.startswith("    ")] == [
        'child.yaml:2:37: no shipped policy is called "genral"',
        'child.yaml:2:45: there is no file "no.yaml"',
        "child.yaml:3:8: rules is 3",
        "parent.yaml:2:9: this rule says nothing to do",
        "broken.yaml:3:1: this is not YAML: while parsing a flow node: expected the node content, but found"
        " '<stream end>'",
    ]
    assert error({"extends": ["general", "no/such.yaml"]}).startswith('policy.extends[1]: there is no file "no/such.')
