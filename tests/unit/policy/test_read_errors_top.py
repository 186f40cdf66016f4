"""Whole texts of the errors about the top of a policy file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.policy.whole_text import assert_whole_text

POLICY_KEYS = "schema, name, extends, models, sets, regions, plan, offload, default, rules"

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "an_unknown_key": (
        "schema: sac/v1\nrule: []\n",
        (
            'p.yaml:2:1: unknown key "rule" in a policy',
            "did you mean: rules",
            f"legal: {POLICY_KEYS}",
            'fix: write "rules"',
        ),
    ),
    "an_unknown_key_of_offload": (
        "schema: sac/v1\noffload: {inflight: 1MiB, ahead: soon}\nrules: []\n",
        (
            'p.yaml:2:11: unknown key "inflight" in offload',
            "did you mean: in_flight",
            "legal: inputs, min_bytes, in_flight, ahead",
            'fix: write "in_flight"',
            'p.yaml:2:34: offload.ahead is "soon": it is not a number with a unit',
            'legal: a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"',
        ),
    ),
    "an_unknown_schema": (
        "schema: sac/2\nrules: []\n",
        (
            'p.yaml:1:9: schema is "sac/2"',
            "did you mean: sac/v1",
            "legal: sac/v1",
            'fix: write "sac/v1"',
        ),
    ),
    "a_later_schema": (
        "schema: sac/v2\ndefault: offload-all\nrules: []\n",
        (
            "p.yaml:1:9: this policy needs schema sac/v2, and this version of sac knows sac/v1",
            "legal: sac/v1",
            "fix: install a version of sac that knows sac/v2",
        ),
    ),
    "keys_of_a_later_schema": (
        "tiers: {host: 4GiB}\nrules:\n  - {ops: a, do: offload, tier: host}\n  - {ops: 3, tier: x, after: 2}\n"
        "schema: SAC/v12\n",
        (
            "p.yaml:5:9: this policy needs schema sac/v12, and this version of sac knows sac/v1, which lacks the keys "
            '"tiers", "tier", "after"',
            "legal: sac/v1",
            'fix: install a version of sac that knows sac/v12, or do without these keys and write "schema: sac/v1"',
        ),
    ),
    "no_schema": (
        "rules: []\n",
        (
            "p.yaml:1:1: the policy does not name its schema",
            "legal: sac/v1",
            'fix: add "schema: sac/v1"',
        ),
    ),
    "neither_rules_nor_parents": (
        "schema: sac/v1\nname: x\n",
        (
            "p.yaml:1:1: the policy has neither rules nor extends",
            "legal: rules, extends, default",
            'fix: add rules; "rules: []" means the default for every op',
        ),
    ),
    "rules_left_empty": (
        "schema: sac/v1\nrules:\n",
        (
            "p.yaml:2:7: rules is empty",
            "legal: a list of rules",
            "fix: write [] for no rules",
        ),
    ),
    "rules_as_a_mapping": (
        "schema: sac/v1\nrules: {ops: a, do: save}\n",
        (
            "p.yaml:2:8: rules is a mapping",
            "legal: a list of rules",
            'fix: start each rule with "- "',
        ),
    ),
    "a_default_of_alternate": (
        "schema: sac/v1\ndefault: alternate\nrules: []\n",
        (
            'p.yaml:2:10: default is "alternate"',
            "legal: save, recompute, offload",
        ),
    ),
    "a_name_that_is_a_boolean": (
        "schema: sac/v1\nname: true\nrules: []\n",
        (
            "p.yaml:2:7: name is the boolean true",
            "legal: text",
            'fix: write "true"',
        ),
    ),
    "a_name_with_a_line_break": (
        'schema: sac/v1\nname: "a\\nb"\nrules: []\n',
        (
            "p.yaml:2:7: name has a line break, an outer space or a control character in it",
            "fix: remove what cannot be seen",
        ),
    ),
    "an_empty_set": (
        "schema: sac/v1\nsets: {attention: []}\nrules: []\n",
        (
            "p.yaml:2:19: sets.attention is an empty list",
            "legal: text, or a list of at least one",
            "fix: remove it, or name one",
        ),
    ),
    "a_set_called_like_an_op": (
        "schema: sac/v1\nsets: {aten.mm: a}\nrules: []\n",
        (
            'p.yaml:2:8: the name of a set is "aten.mm"',
            "legal: a word of letters, digits, _ and -",
        ),
    ),
    "sets_as_a_list": (
        "schema: sac/v1\nsets: [attention]\nrules: []\n",
        (
            "p.yaml:2:7: sets is a list",
            "legal: a mapping of names",
        ),
    ),
    "a_set_whose_name_is_a_number": (
        "schema: sac/v1\nsets: {1: a}\nrules: []\n",
        (
            "p.yaml:2:8: a key of sets is 1",
            "legal: text",
            "fix: quote it if text is meant",
        ),
    ),
    "regions_as_text": (
        "schema: sac/v1\nregions: model.layers.*\nrules: []\n",
        (
            'p.yaml:2:10: regions is "model.layers.*"',
            "legal: a mapping of blocks, layers",
            'fix: write it as "key: value" pairs',
        ),
    ),
    "models_of_a_mapping": (
        "schema: sac/v1\nmodels: {llama: x}\nrules: []\n",
        (
            "p.yaml:2:9: models is a mapping",
            "legal: text, or a list of at least one",
        ),
    ),
    "blocks_in_bare_braces": (
        "schema: sac/v1\nregions: {blocks: {a,b}}\nrules: []\n",
        (
            "p.yaml:2:19: regions.blocks is a mapping",
            "legal: a pattern, or a list of them",
            'fix: quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"',
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_about_top(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_text(*CASES[name], tmp_path, monkeypatch)
