"""Where a policy comes from: names, paths, mappings, and files that are no policies."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from sac.errors import PolicyError, SacError
from sac.policy import load as shipped
from sac.policy.load import load_policy, shipped_policies
from sac.policy.model import Decision, Layers, Policy
from sac.policy.patterns import PathPattern

EMPTY = "schema: sac/v1\nrules: []\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and two shipped policies of its own."""
    directory = tmp_path / "shipped"
    directory.mkdir()
    for name in ("llama", "deepseek_v3"):
        (directory / f"{name}.yaml").write_text(f"{EMPTY}name: {name}\n")
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(shipped, "shipped_directory", lambda: directory)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "work"))
    return tmp_path / "work"


def error(source: object) -> str:
    with pytest.raises(PolicyError) as caught:
        load_policy(source)  # type: ignore[arg-type]
    assert isinstance(caught.value, (SacError, ValueError))
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["deepseek_v3", "DeepSeek-V3", " deepseek-v3 "])
def test_a_shipped_name_is_case_and_hyphen_insensitive(here: Path, name: str) -> None:
    assert load_policy(name) == Policy("deepseek_v3")
    assert shipped_policies() == ("deepseek_v3", "llama")


@pytest.mark.parametrize("source", ["mine.yml", Path("mine.yml"), "./mine.yml", "~/mine.yml"])
def test_a_path_is_text_or_path_like(here: Path, source: str | Path) -> None:
    (here / "mine.yml").write_text(EMPTY)
    assert load_policy(source) == Policy("mine")


def test_a_path_like_needs_no_ending(here: Path) -> None:
    (here / "llama").write_text(f"{EMPTY}name: mine\n")
    assert [load_policy(one).name for one in (Path("llama"), "./llama", "llama")] == ["mine", "mine", "llama"]


def test_an_unknown_name(here: Path) -> None:
    assert error("lama") == (
        'policy: no shipped policy is called "lama"\n'
        "    did you mean: llama\n"
        "    legal: deepseek_v3, llama\n"
        '    fix: to name a file, give a path that ends in .yaml or has a "/" in it'
    )


# What is given, and how the error begins (` / ` begins a line of it).
SOURCES = [
    (None, "policy: a policy is meant, this is empty / legal: a path, a mapping, a Policy, or one"),
    ([], "policy: a policy is meant, this is a list / legal: "),
    (" ", 'policy: no shipped policy is called " " / legal: '),
    ("lama.yaml", 'policy: the file "lama.yaml" cannot be read: No such file or directory / did you mean: llama'),
    ("a\0b.yaml", 'policy: the file "a\\x00b.yaml" cannot be read: embedded null byte / fix: check the path'),
    ("x" * 5000 + ".yaml", f'policy: the file "{"x" * 57}..." cannot be read: File name too long / fix: check'),
    ("loop.yaml", 'policy: the file "loop.yaml" cannot be read: Symlink loop'),
    ("folder.yaml", 'policy: the file "folder.yaml" cannot be read: it is not a regular file of at most 1 MiB'),
    ("pipe.yaml", 'policy: the file "pipe.yaml" cannot be read: it is not'),
    ("long.yaml", 'policy: the file "long.yaml" cannot be read: it is not'),
    ("binary.yaml", "binary.yaml:1:1: this is not YAML: "),
    ("latin.yaml", "latin.yaml:2:1: this is not YAML: "),
]


@pytest.mark.parametrize(("source", "text"), SOURCES)
def test_what_is_no_policy(here: Path, source: object, text: str) -> None:
    os.symlink("loop.yaml", "loop.yaml")
    os.mkdir("folder.yaml")
    os.mkfifo("pipe.yaml")
    Path("long.yaml").write_text(EMPTY + "#" * (2**20 - len(EMPTY) + 1))
    Path("binary.yaml").write_bytes(b"\x03\0\0")
    Path("latin.yaml").write_bytes(b"schema: sac/v1\nname: \xff")
    assert error(source).startswith(text.replace(" / ", "\n    "))


def test_a_file_that_must_not_be_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "p.yaml").write_text(EMPTY)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # chmod does not stop root, who runs many a container
    assert error("p.yaml").startswith('policy: the file "p.yaml" cannot be read: Permission denied')


def test_values_that_another_yaml_reader_has_changed_are_errors() -> None:
    rules = [{"ops": "a", "do": True}, {"ops": "a", "do": object(), "layers": 68, "call": {"index": None}}]
    text = error({True: "rules", "name": 1.1, "rules": rules})
    for found in ("unknown key true", "name is 1.1", "[0].do is true", "[1].do is a value of", "layers is 68"):
        assert found in text


def test_mappings_that_would_take_all_memory_are_refused() -> None:
    endless: dict[str, object] = {}
    endless["sets"] = endless
    assert "sets.sets is a mapping" in error(endless)
    number = [{"ops": "a", "do": "save", "layers": {"first": 10**5000}}]
    assert "layers.first is a value of type int" in error({"rules": number})


# -- What a policy takes from its parents, and chains that cannot be followed


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(exist_ok=True, parents=True)
    Path(name).write_text(f"schema: sac/v1\n{text}\n")


def rules(source: object) -> list[tuple[str, str]]:
    """The rules of a policy: what each is called, and its first op."""
    return [(rule.id, rule.ops[0]) for rule in load_policy(source).rules]  # type: ignore[arg-type]


@pytest.fixture
def general(here: Path) -> None:
    """A shipped policy with a rule."""
    text = "schema: sac/v1\nrules: [{id: general, ops: matmul, do: alternate}]\n"
    (here.parent / "shipped" / "general.yaml").write_text(text)


def test_rules_of_the_child_come_before_those_of_its_parent(general: None) -> None:
    write("child.yaml", "extends: general\nrules: [{id: own, ops: attention, do: save}]")
    child = load_policy("child.yaml")
    assert [(rule.id, rule.origin) for rule in child.rules] == [("own", "child"), ("general", "general")]
    assert (child.extends, child.name) == (("general",), "child")


def test_a_rule_hides_its_parents_rule_of_the_same_id_unless_sac_made_up_the_id(general: None) -> None:
    write("child.yaml", "extends: general\nrules: [{id: other, ops: a, do: save}, {id: general, ops: b, do: save}]")
    assert rules("child.yaml") == [("other", "a"), ("general", "b")]
    write("parent.yaml", "name: same\nrules: [{ops: a, do: save}, {ops: b, do: save}]")
    write("child.yaml", "name: same\nextends: parent.yaml\nrules: [{ops: c, do: save}]")
    assert rules("child.yaml") == [("same.1", "c"), ("same.1.2", "a"), ("same.2", "b")]


def test_default_and_regions_come_from_the_first_that_sets_them(general: None) -> None:
    write("old.yaml", "default: save\nregions: {blocks: [a.*], layers: {first: 2}}\nrules: []")
    write("mid.yaml", "extends: old.yaml\nregions: {blocks: b.*}")
    write("new.yaml", "extends: mid.yaml")
    policy = load_policy("new.yaml")
    assert policy.default is Decision.SAVE
    assert policy.blocks == (PathPattern.parse("b.*"),)
    assert policy.layers == Layers("first", 2)
    places = [policy.where(key) for key in ("default", "regions.blocks", "regions.layers")]
    assert places == ["old.yaml:2:10", "mid.yaml:3:19", "old.yaml:3:34"]
    write("own.yaml", "extends: mid.yaml\ndefault: recompute\nregions: {layers: all}")
    own = load_policy("own.yaml")
    assert (own.default, own.layers) == (Decision.RECOMPUTE, Layers())


def test_sets_are_joined_and_models_are_not_inherited(general: None) -> None:
    write("parent.yaml", "models: [llama]\nsets: {attention: [a, b], mine: c}\nrules: []")
    write("child.yaml", "extends: parent.yaml\nsets: {attention: [d, b]}")
    child = load_policy("child.yaml")
    assert child.sets == {"attention": ("d", "b", "a"), "mine": ("c",)}
    assert child.models == ()
    assert [child.where(f"sets.{name}") for name in child.sets] == ["child.yaml:3:19", "parent.yaml:3:33"]


def test_parents_are_followed_in_order_and_a_shared_one_comes_last(general: None) -> None:
    write("base.yaml", "rules: [{id: base, ops: a, do: save}, {id: x, ops: b, do: save}]")
    write("left.yaml", "extends: base.yaml\nrules: [{id: left, ops: c, do: save}]")
    write("right.yaml", "extends: base.yaml\nrules: [{id: right, ops: d, do: save}, {id: x, ops: e, do: save}]")
    write("child.yaml", "extends: [left.yaml, right.yaml]")
    assert rules("child.yaml") == [("left", "c"), ("right", "d"), ("x", "e"), ("base", "a")]
    assert load_policy("child.yaml").extends == ("left", "right", "base")


def test_where_parents_are_looked_for(general: None) -> None:
    """Relative paths start at the file that names them; a mapping has none; a name is a shipped policy."""
    write("sub/deep/child.yaml", "extends: ../parent.yaml")
    write("sub/parent.yaml", "rules: [{id: here, ops: a, do: save}]")
    write("parent.yaml", "rules: [{id: top, ops: a, do: save}]")
    assert rules("sub/deep/child.yaml") == [("here", "a")]
    assert rules({"extends": ["parent.yaml", "general"]}) == [("top", "a"), ("general", "matmul")]
    write("general.yaml", "extends: General\nrules: [{id: own, ops: attention, do: save}]")
    assert rules("general.yaml") == [("own", "attention"), ("general", "matmul")]


def test_chains_that_do_not_end(general: None) -> None:
    write("start.yaml", "extends: a.yaml")
    write("a.yaml", "extends: b.yaml")
    write("b.yaml", "extends: [./a.yaml]")
    circle = "extends goes in a circle or through more than 16 files: back to"
    assert error("start.yaml") == f"b.yaml:2:11: {circle} a.yaml\n    fix: remove one of these `extends`"
    write("self.yaml", "extends: self.yaml")
    assert error("self.yaml").startswith("self.yaml:2:10: extends goes in a circle")
    for place in range(20):
        write(f"p{place}.yaml", f"extends: p{place + 1}.yaml")
    assert error("p0.yaml").startswith("p15.yaml:2:10: extends goes in a circle or through more than 16 files")


def test_problems_of_child_and_parents_come_together(general: None) -> None:
    write("parent.yaml", "rules: [{ops: a}]")
    write("broken.yaml", "rules: [")
    write("child.yaml", "extends: [parent.yaml, broken.yaml, genral, no.yaml]\nrules: 3")
    assert [line for line in error("child.yaml").splitlines() if not line.startswith("    ")] == [
        "parent.yaml:2:9: this rule says nothing to do",
        "broken.yaml:3:1: this is not YAML: while parsing a flow node: expected the node content, but found"
        " '<stream end>'",
        'child.yaml:2:37: no shipped policy is called "genral"',
        'child.yaml:2:45: the file "no.yaml" cannot be read: No such file or directory',
        'child.yaml:3:8: rules is "3"',
    ]
    assert error({"extends": ["general", "no/such.yaml"]}).startswith(
        'policy.extends[1]: the file "no/such.yaml" cannot be read'
    )
