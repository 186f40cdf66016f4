"""One case per form of error of a policy file: its place and what was found. Fixes and near words have tests below."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy

FILES = [
    ("a: &a {do: save}\nschema: sac/v1\nrules: [{<<: *a, ops: a}]\n", ':3:10: unknown key "<<" in rules[0]'),
    ("? [schema]\n: sac/v1\nschema: sac/v1\nrules: []\n", ":1:3: unknown key a list"),
    ("schema: sac/v1\n1: a\nrules: []\n", ':2:1: unknown key "1"'),
    ("llama\n", ':1:1: this is "llama"'),
    ("", ": this is empty"),
    ("schema: sac/v1\nrules: []\n---\nschema: sac/v1\n", ":3:1: this is not YAML: expected a single document"),
    ("schema: !include x\n", ":1:9: schema is a value with the tag !include"),
    ("schema: sac/v1\nrules: [{module: *_proj, do: save}]\n", ":2:18: this is not YAML: found undefined alias '_proj'"),
    ("schema: sac/v1\nrules:\n  - shape:\n    - >=4096\n", ":4:8: this is not YAML: while scanning a block scalar"),
    ("schema: sac/v1\nrules:\n\t- ops: a\n", ":3:1: this is not YAML: while scanning for the next token: found c"),
    ("schema: 'sac/v1\n", ":2:1: this is not YAML: while scanning a quoted scalar: found unex"),
    ("schema: sac/v1\nname: \x07\n", ":2:1: this is not YAML: special characters are not allowed"),
    ('schema: sac/v1\nname: "\\Uffffffff"\n', ":1:1: this is not YAML: Python int too large"),
    ("schema: &a [*a]\n", ":1:9: schema is a list"),
    ("schema: sac/v1\nrule: []\n", ':2:1: unknown key "rule"'),
    ("schema: sac/2\nrules: []\n", ':1:9: schema is "sac/2"'),
    ("rules: []\n", ":1:1: the policy does not name its schema"),
    ("schema: sac/v1\nrules: {ops: a, do: save}\n", ":2:8: rules is a mapping"),
    ("schema: sac/v1\ndefault: alternate\nrules: []\n", ':2:10: default is "alternate"'),
    (
        "schema: sac/v1\nrules: []\nname: x\nrules: []\n",
        ':4:1: the key "rules" is given twice; its first value is at p.yaml:2:8',
    ),
    ('schema: sac/v1\nname: "a\\nb"\nrules: []\n', ':2:7: name is "a'),
    ("schema: sac/v1\nsets: {attention: []}\nrules: []\n", ":2:19: sets.attention is a list"),
    ("schema: sac/v1\nsets: {aten.mm: a}\nrules: []\n", ':2:8: unknown key "aten.mm" in sets'),
    ("schema: sac/v1\nrules: [save]\n", ':2:9: rules[0] is "save"'),
    (
        "schema: sac/v1\nrules: [{id: a, ops: a, do: save}, {id: a, ops: b, do: save}]\n",
        ':2:41: the id "a" is given tw',
    ),
]
RULES = [
    ("ops: a, do: true", 'do is "true"'),
    ("ops: a, do: {alternate: [save, offload]}", "do is a mapping"),
    ("ops: a", "this rule says nothing to do"),
    ("module: a, do: alternate", "alternate counts calls of ops, but this rule has no ops"),
    ("opps: a, do: save", 'unknown key "opps" in '),
    ("do: save, layers: all", "this rule has neither ops nor module"),
    ("ops: a, function: F, do: save", "this rule has ops and function"),
    ("ops: , do: save", "ops is empty"),
    ('ops: "aten.mm, aten.bmm", do: save', 'ops is "aten.mm, aten.bmm"'),
    ("ops: a, module: a/b, do: save", 'module is "a/b": "/" has no meaning here'),
    ('ops: a, module: [a, "b.{c"], do: save', 'module[1] is "b.{c": a "{" has no "}" after it'),
    ("ops: a, layers: 1:8, do: save", 'layers is "1:8"'),
    ("ops: a, layers: [], do: save", "layers is a list"),
    ("ops: a, layers: [1:8], do: save", 'layers[0] is "1:8"'),
    ("ops: a, layers: {first: 0}, do: save", 'layers.first is "0"'),
    ("ops: a, layers: {first: 1, last: 1}, do: save", "layers has first and last"),
    ("ops: a, layers: {offset: 1}, do: save", "layers has offset"),
    ("ops: a, layers: {frist: 1}, do: save", 'unknown key "frist" in rules[0].layers'),
    ("ops: a, call: 0, do: save", 'call is "0"'),
    ("ops: a, call: {index: 0, every: 2}, do: save", "call has index and every"),
    ("ops: a, call: {index: [0, -1]}, do: save", 'call.index[1] is "-1"'),
    ("ops: a, shape: 128, do: save", 'shape is "128"'),
    ("ops: a, shape: [_, ...], do: save", 'shape has a "..." that is not the first'),
    ('ops: a, shape: ["*", 1.5], do: save', 'shape[1] is "1.5"'),
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
    assert re.search(
        rf"p\.yaml:3:\d+: (rules\[0\]\.)?{re.escape(found)}", message(f"schema: sac/v1\nrules:\n  - {{{rule}}}\n")
    )


def test_all_errors_come_at_once_with_legal_values_near_words_and_fixes() -> None:
    rules = '  - {ops: a, do: sav}\n  - {ops: a, layers: "1:8", do: save}\n'
    told = message(f"schema: sac/v1\ndefualt: save\nrules:\n{rules}")
    assert [line for line in told.splitlines() if "legal: all" not in line] == [
        'p.yaml:2:1: unknown key "defualt"',
        "    did you mean: default",
        "    legal: schema, name, extends, models, sets, regions, default, rules",
        '    fix: write "default"',
        'p.yaml:4:18: rules[0].do is "sav"',
        "    did you mean: save",
        "    legal: save, recompute, offload, alternate",
        '    fix: write "save"',
        'p.yaml:5:22: rules[1].layers is "1:8"',
    ]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ops: matmul", "ops: matmul, module: mlp"),
        ("ops: [matmul, attention]", "ops: attention"),
        ('ops: "*"', "ops: [attention, aten.mm]"),
        ("ops: a, layers: all", "ops: a, layers: {first: 2}"),
        ("ops: a, call: {index: 0}", "ops: a, call: {index: 0}, module: x"),
        ("module: mlp", "module: mlp"),
    ],
)
def test_a_rule_that_can_never_fire(first: str, second: str) -> None:
    text = message(f"schema: sac/v1\nrules:\n  - {{{first}, do: save}}\n  - {{{second}, do: save}}\n")
    assert text.startswith(
        "p.yaml:4:5: this rule can never fire: the rule at p.yaml:3:5 matches all it matches\n    fix:"
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("ops: attention", "ops: [attention, matmul]"),
        ("ops: a, module: mlp", "ops: a"),
        ("ops: a, layers: {first: 2}", "ops: a, layers: {last: 2}"),
        ("module: mlp", "ops: a, module: mlp"),
        ('ops: "*", module: mlp', "module: mlp"),
    ],
)
def test_rules_that_can_both_fire(first: str, second: str) -> None:
    Path("p.yaml").write_text(f"schema: sac/v1\nrules: [{{{first}, do: save}}, {{{second}, do: save}}]\n")
    assert len(load_policy("p.yaml").rules) == 2


@pytest.mark.parametrize(
    ("written", "fix"),
    [
        ("rules: [{ops: matmul, save: true}]", 'write "do: save"'),
        ("rules: []\nregions: {layers: {uniform: 2}}", "with `mode: full`"),
    ],
)
def test_a_key_of_another_place(written: str, fix: str) -> None:
    assert fix in message(f"schema: sac/v1\n{written}\n")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[" * 5000, "this is not YAML"),
        ("schema: " + "{a: " * 30 + "}" * 30 + "\n", "schema is a mapping"),
        ("a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)), '"a8"'),
        ("rules: [{ops: a, do: save, module: '" + "{a,b}" * 20 + "'}]\n", "more than 10,000 patterns"),
        ("rules: [{ops: a, do: save, module: '" + "*a" * 20 + "'}]\n", 'more than 12 "\\*"'),
    ],
    ids=["deep list", "deep mapping", "aliases of aliases", "braces", "stars"],
)
def test_a_file_that_would_take_all_memory_or_time_is_refused(text: str, found: str) -> None:
    assert re.search(found, message(text))
