"""Whole texts of the errors about a file as YAML."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.policy.whole_text import assert_whole_text

POLICY_KEYS = "schema, name, extends, models, sets, regions, plan, offload, default, rules"

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a_merge_key": (
        "a: &a {do: save}\nschema: sac/v1\nrules: [{<<: *a, ops: a}]\n",
        (
            'p.yaml:1:1: unknown key "a" in a policy',
            f"legal: {POLICY_KEYS}",
            "fix: remove it",
            'p.yaml:3:10: merge keys ("<<") are not supported',
            "fix: write the keys out, or put the shared rules into a policy of their own and use `extends`",
        ),
    ),
    "a_list_as_a_key": (
        "? [schema]\n: sac/v1\nschema: sac/v1\nrules: []\n",
        (
            "p.yaml:1:3: a list or mapping is used as a key",
            "fix: quote it if text is meant",
        ),
    ),
    "a_number_as_a_key": (
        "schema: sac/v1\n1: a\nrules: []\n",
        (
            "p.yaml:2:1: a key of a policy is 1",
            "legal: text",
            "fix: quote it if text is meant",
        ),
    ),
    "a_key_that_cannot_be_printed": (
        'schema: sac/v1\n"\\ud800": a\nrules: []\n',
        (
            'p.yaml:2:1: a key of a policy is "\\ud800"',
            "legal: text",
            "fix: quote it if text is meant",
        ),
    ),
    "a_top_level_list": (
        "- schema: sac/v1\n",
        (
            "p.yaml:1:1: the policy is a list",
            f"legal: a mapping of {POLICY_KEYS}",
            'fix: start with "schema: sac/v1"',
        ),
    ),
    "a_top_level_text": (
        "llama\n",
        (
            'p.yaml:1:1: the policy is "llama"',
            f"legal: a mapping of {POLICY_KEYS}",
            'fix: start with "schema: sac/v1"',
        ),
    ),
    "an_empty_text": (
        "",
        (
            "p.yaml: the file is empty",
            'fix: start with "schema: sac/v1" and "rules:"',
        ),
    ),
    "only_comments": (
        "# nothing\n---\n",
        (
            "p.yaml: the file is empty",
            'fix: start with "schema: sac/v1" and "rules:"',
        ),
    ),
    "two_documents": (
        "schema: sac/v1\nrules: []\n---\nschema: sac/v1\n",
        (
            "p.yaml:3:1: a second document starts here",
            "fix: one policy per file",
        ),
    ),
    "a_python_tag": (
        "schema: !!python/object/apply:os.system [ls]\n",
        (
            "p.yaml:1:9: the tag !!python/object/apply:os.system is not allowed",
            "fix: remove it; a policy is plain words, numbers, lists and mappings",
        ),
    ),
    "a_plain_tag": (
        "schema: !!str sac/v1\n",
        (
            "p.yaml:1:9: the tag !!str is not allowed",
            "fix: remove it; a policy is plain words, numbers, lists and mappings",
        ),
    ),
    "an_unquoted_pattern": (
        "schema: sac/v1\nrules: [{ops: a, module: *_proj, do: save}]\n",
        (
            "p.yaml:2:26: *_proj refers to no anchor",
            'fix: an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"',
        ),
    ),
    "an_unquoted_star": (
        "schema: sac/v1\nrules: [{ops: *, do: save}]\n",
        (
            "p.yaml:2:16: this is not YAML: while scanning an alias: "
            "expected alphabetic or numeric character, but found ','",
            'fix: an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"',
        ),
    ),
    "an_unquoted_comparison": (
        "schema: sac/v1\nrules:\n  - ops: a\n    shape:\n    - >=4096\n",
        (
            "p.yaml:5:8: this is not YAML: while scanning a block scalar: "
            "expected chomping or indentation indicators, but found '='",
            'fix: quote text that starts with a sign, as in ">=4096"',
        ),
    ),
    "a_tab": (
        "schema: sac/v1\nrules:\n\t- ops: a\n",
        (
            "p.yaml:3:1: this is not YAML: while scanning for the next token: "
            "found character '\\t' that cannot start any token",
            "fix: indent with spaces, not with tabs",
        ),
    ),
    "an_open_quote": (
        "schema: 'sac/v1\n",
        (
            "p.yaml:2:1: this is not YAML: while scanning a quoted scalar: found unexpected end of stream",
            "fix: close the quote",
        ),
    ),
    "an_open_bracket": (
        "schema: sac/v1\nrules: [\n",
        (
            "p.yaml:3:1: this is not YAML: while parsing a flow node: "
            "expected the node content, but found '<stream end>'",
            "fix: check the indentation, the brackets, and that text with a sign in it is quoted",
        ),
    ),
    "two_colons": (
        "schema: sac/v1\nname: a: b\n",
        (
            "p.yaml:2:8: this is not YAML: mapping values are not allowed here",
            "fix: check the indentation, the brackets, and that text with a sign in it is quoted",
        ),
    ),
    "a_control_character": (
        "schema: sac/v1\nname: \x07\n",
        (
            "p.yaml:2:7: the character 0x0007 is not allowed in YAML",
            "fix: remove it",
        ),
    ),
    "an_impossible_escape": (
        'schema: sac/v1\nname: "\\Uffffffff"\n',
        (
            "p.yaml:2:10: this is not YAML: an escape in quoted text does not encode a character",
            "fix: look for a wrong \\",
        ),
    ),
    "an_alias_inside_of_itself": (
        "schema: &a [*a]\n",
        (
            "p.yaml:1:13: *a is inside of what it refers to",
            "fix: write it out",
        ),
    ),
    "deep_nesting": (
        "rules: " + "[" * 100_000,
        (
            "p.yaml:1:27: this nests more than 20 deep",
            "fix: a policy needs 5 levels",
        ),
    ),
    "deep_mappings": (
        "{a: " * 100_000,
        (
            "p.yaml:1:81: this nests more than 20 deep",
            "fix: a policy needs 5 levels",
        ),
    ),
    "an_alias_bomb": (
        "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{n}: &{n} [{','.join(['*' + p] * 10)}]\n" for p, n in zip("abcdefgh", "bcdefghi", strict=True)),
        (
            "p.yaml:4:29: up to here the file holds more than 10000 values, with every alias written out",
            "fix: use fewer aliases, or split the policy with `extends`",
        ),
    ),
    "too_many_values": (
        "x: 1\n" * 6000,
        (
            "p.yaml:5000:4: up to here the file holds more than 10000 values, with every alias written out",
            "fix: use fewer aliases, or split the policy with `extends`",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_about_yaml(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_text(*CASES[name], tmp_path, monkeypatch)
