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


def ids(source: object) -> list[str]:
    return [rule.id for rule in load_policy(source).rules]  # type: ignore[arg-type]


def error(source: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)  # type: ignore[arg-type]
    return str(caught.value)


def test_rules_of_the_child_come_before_those_of_its_parent() -> None:
    write("child.yaml", "extends: general\nrules: [{id: own, ops: attention, do: save}]")
    child = load_policy("child.yaml")
    assert [(rule.id, rule.origin) for rule in child.rules] == [("own", "child"), ("general", "general")]
    assert child.extends == ("general",)
    assert child.name == "child"


def test_a_rule_hides_its_parents_rule_of_the_same_id() -> None:
    write("child.yaml", "extends: general\nrules: [{id: other, ops: a, do: save}, {id: general, ops: b, do: save}]")
    assert [(rule.id, rule.ops) for rule in load_policy("child.yaml").rules] == [("other", ("a",)), ("general", ("b",))]


def test_ids_that_sac_made_up_hide_nothing() -> None:
    write("parent.yaml", "name: same\nrules: [{ops: a, do: save}, {ops: b, do: save}]")
    write("child.yaml", "name: same\nextends: parent.yaml\nrules: [{ops: c, do: save}]")
    policy = load_policy("child.yaml")
    assert [(rule.id, rule.ops) for rule in policy.rules] == [
        ("same.1", ("c",)),
        ("same.1.2", ("a",)),
        ("same.2", ("b",)),
    ]


def test_default_and_regions_come_from_the_first_that_sets_them() -> None:
    write("old.yaml", "default: save\nregions: {blocks: [a.*], layers: {first: 2}}\nrules: []")
    write("mid.yaml", "extends: old.yaml\nregions: {blocks: b.*}")
    write("new.yaml", "extends: mid.yaml")
    policy = load_policy("new.yaml")
    assert policy.default is Decision.SAVE
    assert policy.blocks == (PathPattern.parse("b.*"),)
    assert policy.layers == Layers(first=2)
    assert policy.where("default") == "old.yaml:2:10"
    assert policy.where("blocks") == "mid.yaml:3:19"
    assert policy.where("layers") == "old.yaml:3:34"
    write("own.yaml", "extends: mid.yaml\ndefault: recompute\nregions: {layers: all}")
    assert load_policy("own.yaml").default is Decision.RECOMPUTE
    assert load_policy("own.yaml").layers == Layers()


def test_sets_are_joined_and_models_are_not_inherited() -> None:
    write("parent.yaml", "models: [llama]\nsets: {attention: [a, b], mine: c}\nrules: []")
    write("child.yaml", "extends: parent.yaml\nsets: {attention: [d, b]}")
    child = load_policy("child.yaml")
    assert child.sets == {"attention": ("d", "b", "a"), "mine": ("c",)}
    assert child.models == ()
    assert {name: str(mark) for name, mark in child.set_locations.items()} == {
        "attention": "child.yaml:3:8",
        "mine": "parent.yaml:3:27",
    }


def test_parents_are_followed_in_order_and_a_shared_one_comes_last() -> None:
    write("base.yaml", "rules: [{id: base, ops: a, do: save}, {id: x, ops: b, do: save}]")
    write("left.yaml", "extends: base.yaml\nrules: [{id: left, ops: c, do: save}]")
    write("right.yaml", "extends: base.yaml\nrules: [{id: right, ops: d, do: save}, {id: x, ops: e, do: save}]")
    write("child.yaml", "extends: [left.yaml, right.yaml]")
    policy = load_policy("child.yaml")
    assert [(rule.id, rule.ops[0]) for rule in policy.rules] == [
        ("left", "c"),
        ("right", "d"),
        ("x", "e"),
        ("base", "a"),
    ]
    assert policy.extends == ("left", "right", "base")


def test_relative_parents_start_at_the_file_that_names_them() -> None:
    write("sub/deep/child.yaml", "extends: ../parent.yaml")
    write("sub/parent.yaml", "rules: [{id: here, ops: a, do: save}]")
    write("parent.yaml", "rules: [{id: wrong, ops: a, do: save}]")
    assert ids("sub/deep/child.yaml") == ["here"]


def test_a_file_may_have_the_name_of_the_shipped_policy_it_extends() -> None:
    write("general.yaml", "extends: General\nrules: [{id: own, ops: attention, do: save}]")
    assert ids("general.yaml") == ["own", "general"]


def test_a_mapping_extends_names_and_paths() -> None:
    write("parent.yaml", "rules: [{id: here, ops: a, do: save}]")
    assert ids({"extends": ["parent.yaml", "general"]}) == ["here", "general"]
    assert ids({"extends": str(Path("parent.yaml").resolve())}) == ["here"]


def test_a_circle_is_told_with_its_whole_chain() -> None:
    write("start.yaml", "extends: a.yaml")
    write("a.yaml", "extends: b.yaml")
    write("b.yaml", "extends: [./a.yaml]")
    assert error("start.yaml") == (
        "b.yaml:2:11: extends goes in a circle: a.yaml -> b.yaml -> a.yaml\n    fix: remove one of these `extends`"
    )


def test_a_file_that_extends_itself() -> None:
    write("a.yaml", "extends: a.yaml")
    assert error("a.yaml") == (
        "a.yaml:2:10: extends goes in a circle: a.yaml -> a.yaml\n    fix: remove one of these `extends`"
    )


def test_a_chain_that_is_too_long() -> None:
    for place in range(20):
        write(f"p{place}.yaml", f"extends: p{place + 1}.yaml")
    assert error("p0.yaml") == "p15.yaml:2:10: extends goes more than 16 files deep\n    fix: join some of the files"


def test_parents_that_do_not_exist_are_told_beside_the_other_problems_of_the_file() -> None:
    write("child.yaml", "extends: [genral, no.yaml]\ndefault: svae")
    assert error("child.yaml") == (
        'child.yaml:2:11: no shipped policy is called "genral"\n'
        "    did you mean: general\n"
        "    legal: general\n"
        '    fix: to name a file, give a path that ends in .yaml or has a "/" in it\n'
        'child.yaml:2:19: there is no file "no.yaml"\n'
        "    fix: check the path\n"
        'child.yaml:3:10: default is "svae"\n'
        "    did you mean: save\n"
        "    legal: save, recompute, offload\n"
        '    fix: write "save"'
    )


def test_problems_of_child_and_parents_come_together() -> None:
    write("parent.yaml", "rules: [{ops: a}]")
    write("broken.yaml", "rules: [")
    write("child.yaml", "extends: [parent.yaml, broken.yaml]\nrules: 3")
    assert error("child.yaml") == (
        "child.yaml:3:8: rules is 3\n"
        "    legal: a list of rules\n"
        '    fix: start each rule with "- "\n'
        "parent.yaml:2:9: this rule says nothing to do\n"
        "    legal: save, recompute, offload, alternate\n"
        '    fix: add "do: save"\n'
        "broken.yaml:3:1: this is not YAML: while parsing a flow node: expected the node content, but found"
        " '<stream end>'\n"
        "    fix: check brackets, indentation and quotes"
    )


def test_a_mapping_with_a_missing_parent() -> None:
    assert error({"extends": ["general", "no/such.yaml"]}) == (
        'policy.extends[1]: there is no file "no/such.yaml"\n    fix: check the path'
    )
