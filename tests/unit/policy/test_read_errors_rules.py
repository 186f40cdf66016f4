"""Whole texts of the errors about a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.policy.whole_text import assert_whole_text

RULE_KEYS = "id, ops, function, unit, blocks, module, layers, call, shape, dtype, min_bytes, optional, do"


TURNS = "[save, recompute], [recompute, save], [offload, recompute], [recompute, offload]"


def r(rule: str) -> str:
    """The text of a policy with one rule."""
    return f"schema: sac/v1\nrules:\n  - {{{rule}}}\n"


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a_misspelled_decision": (
        r("ops: a, do: svae"),
        (
            'p.yaml:3:18: do is "svae"',
            "did you mean: save",
            "legal: save, recompute, offload, alternate",
            'fix: write "save"',
        ),
    ),
    "a_decision_that_yaml_1_1_reads_as_a_boolean": (
        r("ops: a, do: on"),
        (
            'p.yaml:3:18: do is "on"',
            "legal: save, recompute, offload, alternate",
        ),
    ),
    "a_decision_that_is_a_boolean": (
        r("ops: a, do: true"),
        (
            "p.yaml:3:18: do is true",
            "legal: save, recompute, offload, alternate",
        ),
    ),
    "a_decision_that_is_a_list": (
        r("ops: a, do: [save]"),
        (
            "p.yaml:3:18: do is a list",
            "legal: save, recompute, offload, alternate",
        ),
    ),
    "turns_of_save_and_offload": (
        r("ops: a, do: {alternate: [save, offload]}"),
        (
            "p.yaml:3:30: do.alternate is [save, offload]",
            f"legal: {TURNS}",
            "fix: write two rules, the first with `call: {every: 2}`",
        ),
    ),
    "a_misspelled_turn": (
        r("ops: a, do: {alternate: [ofload, recompute]}"),
        (
            "p.yaml:3:30: do.alternate is [ofload, recompute]",
            "did you mean: offload",
            f"legal: {TURNS}",
        ),
    ),
    "turns_without_a_list": (
        r("ops: a, do: {alternate: offload}"),
        (
            'p.yaml:3:30: do.alternate is "offload"',
            f"legal: {TURNS}",
        ),
    ),
    "misspelled_turns": (
        r("ops: a, do: {alternat: [offload, recompute]}"),
        (
            'p.yaml:3:19: unknown key "alternat" in do',
            "did you mean: alternate",
            "legal: alternate",
            'fix: write "alternate"',
        ),
    ),
    "no_decision": (
        r("ops: a"),
        (
            "p.yaml:3:5: this rule says nothing to do",
            "legal: save, recompute, offload, alternate",
            'fix: add "do: save"',
        ),
    ),
    "a_misspelled_key": (
        r("opps: a, do: save"),
        (
            'p.yaml:3:6: unknown key "opps" in a rule',
            "did you mean: ops",
            f"legal: {RULE_KEYS}",
            'fix: write "ops"',
        ),
    ),
    "a_rule_with_neither_ops_nor_module": (
        r("do: save, layers: all"),
        (
            "p.yaml:3:5: this rule has neither ops nor module",
            "legal: one of ops, function and unit, or module, or both",
            'fix: add ops, such as "ops: matmul"; "*" means every op that can be saved',
        ),
    ),
    "a_rule_that_is_text": (
        "schema: sac/v1\nrules: [save]\n",
        (
            'p.yaml:2:9: a rule is "save"',
            f"legal: a mapping of {RULE_KEYS}",
            'fix: write it as "key: value" pairs',
        ),
    ),
    "a_rule_that_is_a_list": (
        "schema: sac/v1\nrules: [[save]]\n",
        (
            "p.yaml:2:9: a rule is a list",
            f"legal: a mapping of {RULE_KEYS}",
            'fix: write it as "key: value" pairs',
        ),
    ),
    "empty_ops": (
        r("ops: [], do: save"),
        (
            "p.yaml:3:11: ops is an empty list",
            "legal: text, or a list of at least one",
            "fix: remove it, or name one",
        ),
    ),
    "ops_left_empty": (
        r("ops: , do: save"),
        (
            "p.yaml:3:10: ops is empty",
            "legal: text",
        ),
    ),
    "ops_with_commas": (
        r('ops: "aten.mm, aten.bmm", do: save'),
        (
            'p.yaml:3:11: ops has the name "aten.mm, aten.bmm" with a space or comma in it',
            "fix: write several names as a list: [first, second]",
        ),
    ),
    "a_measure_on_a_whole_module_rule": (
        r("module: mlp, min_bytes: 1KiB, do: save"),
        (
            "p.yaml:3:30: min_bytes applies to the output of an op, but this rule has no ops",
            'fix: remove min_bytes, or add ops, such as "ops: matmul"',
        ),
    ),
    "a_double_id": (
        "schema: sac/v1\nrules:\n  - {id: a, ops: a, do: save}\n  - {id: a, ops: b, do: save}\n",
        (
            'p.yaml:4:10: the id "a" is given twice; the first is at p.yaml:3:10',
            "fix: give each rule its own id",
        ),
    ),
    "a_double_key": (
        "schema: sac/v1\nrules:\n  - {ops: a, do: save, ops: b}\n",
        (
            'p.yaml:3:24: the key "ops" is given twice; the first is at p.yaml:3:6',
            "fix: keep one of them",
        ),
    ),
    "a_double_key_at_the_top": (
        "schema: sac/v1\nrules: []\nschema: sac/v1\n",
        (
            'p.yaml:3:1: the key "schema" is given twice; the first is at p.yaml:1:1',
            "fix: keep one of them",
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_about_rules(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_text(*CASES[name], tmp_path, monkeypatch)
