"""One case per form of error of a policy file: its place and what was found. Fixes and near words have tests below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.model import Policy

FILES = [
    ("a: &a {do: save}\nschema: sac/v1\nrules: [{<<: *a, ops: a}]\n", ':3:10: merge keys ("<<") are not supported'),
    ("? [schema]\n: sac/v1\nschema: sac/v1\nrules: []\n", ":1:3: a list or mapping is used as a key"),
    ("schema: sac/v1\n1: a\nrules: []\n", ":2:1: a key of a policy is 1"),
    ("llama\n", ':1:1: a policy is "llama"'),
    ("", ": the file is empty"),
    ("schema: sac/v1\nrules: []\n---\nschema: sac/v1\n", ":3:1: this is not YAML: expected a single document"),
    ("schema: !!python/object/apply:os.system [ls]\n", ":1:9: the tag !!python/object/apply:os.system is not allowed"),
    ("schema: sac/v1\nrules: [{module: *_proj, do: save}]\n", ":2:18: this is not YAML: found undefined alias '_proj'"),
    ("schema: sac/v1\nrules:\n  - shape:\n    - >=4096\n", ":4:8: this is not YAML: while scanning a block scalar"),
    ("schema: sac/v1\nrules:\n\t- ops: a\n", ":3:1: this is not YAML: while scanning for the next token: found c"),
    ("schema: 'sac/v1\n", ":2:1: this is not YAML: while scanning a quoted scalar: found unex"),
    ("schema: sac/v1\nname: \x07\n", ":2:7: the character 0x0007 is not allowed in YAML"),
    ('schema: sac/v1\nname: "\\Uffffffff"\n', ": this is not YAML: an escape in quoted text does not encode a"),
    ("schema: &a [*a]\n", ":1:9: this nests more than 20 deep"),
    ("schema: sac/v1\nrule: []\n", ':2:1: unknown key "rule" in a policy'),
    ("schema: sac/2\nrules: []\n", ':1:9: schema is "sac/2"'),
    ("rules: []\n", ":1:1: the policy does not name its schema"),
    ("schema: sac/v1\nrules: {ops: a, do: save}\n", ":2:8: rules is a mapping"),
    ("schema: sac/v1\ndefault: alternate\nrules: []\n", ':2:10: default is "alternate"'),
    ("schema: sac/v1\nname: true\nrules: []\n", ":2:7: name is true"),
    ('schema: sac/v1\nname: "a\\nb"\nrules: []\n', ":2:7: name has a line break, an outer space or a control char"),
    ("schema: sac/v1\nsets: {attention: []}\nrules: []\n", ":2:19: sets.attention is an empty list"),
    ("schema: sac/v1\nsets: {aten.mm: a}\nrules: []\n", ':2:8: the name of a set is "aten.mm"'),
    ("schema: sac/v1\nrules: [save]\n", ':2:9: a rule is "save"'),
    (
        "schema: sac/v1\nrules: [{id: a, ops: a, do: save}, {id: a, ops: b, do: save}]\n",
        ':2:41: the id "a" is given tw',
    ),
]
RULES = [
    ("ops: a, do: true", "do is true"),
    ("ops: a, do: {alternate: [save, offload]}", "do is a mapping"),
    ("ops: a", "this rule says nothing to do"),
    ("opps: a, do: save", 'unknown key "opps" in a rule'),
    ("do: save, layers: all", "this rule has neither ops nor module"),
    ("ops: a, function: F, do: save", "this rule has both ops and function"),
    ("ops: , do: save", "ops is empty"),
    ('ops: "aten.mm, aten.bmm", do: save', 'ops is "aten.mm, aten.bmm"'),
    ("ops: a, module: a/b, do: save", 'module is "a/b": module paths are written with dots, not wit'),
    ('ops: a, module: [a, "b.{c"], do: save', 'module is "b.{c": a "{" has no "}" after it'),
    ("ops: a, layers: 1:8, do: save", 'layers is "1:8"'),
    ("ops: a, layers: [], do: save", "layers is an empty list"),
    ("ops: a, layers: [1:8], do: save", 'an entry of layers is "1:8"'),
    ("ops: a, layers: {first: 0}, do: save", "layers.first is 0"),
    ("ops: a, layers: {first: 1, last: 1}, do: save", "layers has first and last"),
    ("ops: a, layers: {offset: 1}, do: save", "layers has offset"),
    ("ops: a, layers: {frist: 1}, do: save", 'unknown key "frist" in layers'),
    ("ops: a, call: 0, do: save", "call is 0"),
    ("ops: a, call: {index: 0, every: 2}, do: save", "call has index and every"),
    ("ops: a, call: {index: [0, -1]}, do: save", "call.index is -1"),
    ("ops: a, shape: 128, do: save", "shape is 128"),
    ("ops: a, shape: [_, ...], do: save", 'an entry of shape is "..."'),
    ('ops: a, shape: ["*", 1.5], do: save', "an entry of shape is 1.5"),
    ("ops: a, dtype: bfloat61, do: save", 'dtype is "bfloat61"'),
    ("ops: a, optional: yes, do: save", 'optional is "yes"'),
]


def message(text: str) -> str:
    """Return the text of the error of a policy file."""
    Path("p.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(PolicyError) as caught:
        load_policy("p.yaml")
    return str(caught.value)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("text", "found"), FILES)
def test_an_error_in_a_file_has_its_place(text: str, found: str) -> None:
    assert f"p.yaml{found}" in message(text)


@pytest.mark.parametrize(("rule", "found"), RULES)
def test_an_error_in_a_rule_is_on_its_line(rule: str, found: str) -> None:
    assert re.search(rf"p\.yaml:3:\d+: {re.escape(found)}", message(f"schema: sac/v1\nrules:\n  - {{{rule}}}\n"))


def test_all_errors_come_at_once_with_legal_values_near_words_and_fixes() -> None:
    rules = '  - {ops: a, do: sav}\n  - {ops: a, layers: "1:8", do: save}\n'
    told = message(f"schema: sac/v1\ndefualt: save\nrules:\n{rules}")
    assert [line for line in told.splitlines() if "legal: all" not in line] == [
        'p.yaml:2:1: unknown key "defualt" in a policy',
        "    did you mean: default",
        "    legal: schema, name, extends, models, sets, regions, default, rules",
        '    fix: write "default"',
        'p.yaml:4:18: do is "sav"',
        "    did you mean: save",
        "    legal: save, recompute, offload, alternate",
        '    fix: write "save"',
        'p.yaml:5:22: layers is "1:8"',
        '    fix: ranges are written as "1-8", in a list: ["1-8"]',
    ]


BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[" * 5000, "nests more than 20 deep|not YAML"),
        ("schema: " + "{a: " * 30 + "}" * 30 + "\n", "nests more than 20 deep"),
        (BOMB, "holds more than 10000 values"),
        ("".join(f"x{n}: 1\n" for n in range(6000)), "holds more than 10000 values"),
    ],
    ids=["deep list", "deep mapping", "aliases of aliases", "long"],
)
def test_files_that_would_take_all_memory_are_refused(text: str, found: str) -> None:
    assert re.search(found, message(text))


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("plan: {made_for: x}\nrules: []", "what a plan was made for is in its comments"),
        ("offload: {inputs: true}\nrules: []", "`store: host` in the config value"),
        ("rules: [{ops: matmul, min_bytes: 1KiB, do: save}]", "choose by `shape`"),
        ("rules: [{ops: matmul, save: true}]", 'write "do: save"'),
    ],
)
def test_a_key_of_an_earlier_version_or_of_another_form(written: str, fix: str) -> None:
    assert fix in message(f"schema: sac/v1\n{written}\n")


# -- Two rules of which one can never fire, and pairs that look like it but can


def load(*rules: str) -> Policy:
    """Load a file with these rules; what each does matters to none of the tests."""
    lines = "".join(f"  - {{{rule}, do: save}}\n" for rule in rules)
    Path("p.yaml").write_text(f"schema: sac/v1\nrules:\n{lines}")
    return load_policy("p.yaml")


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
