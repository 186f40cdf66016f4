"""Whole texts of the errors about `plan`, and about the `blocks` of a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from sac.errors import PolicyError
from sac.policy.load import load_policy
from sac.policy.model import Layers, PlannedRegion, PlanSection, SourceLocation
from sac.policy.patterns import PathPattern
from tests.unit.policy.whole_text import assert_whole_text

SIGNATURE = "12b2768c90e38f41"
LEGAL = "legal: sixteen digits out of 0-9 and a-f"
COPY = "fix: copy it from what `sac plan` wrote, with quotes around it"


def p(entry: str) -> str:
    """The text of a policy whose plan has one entry."""
    return f"schema: sac/v1\nrules: []\nplan:\n  made_for: x\n  regions:\n    - {{{entry}}}\n"


CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "a_plan_that_is_text": (
        "schema: sac/v1\nrules: []\nplan: llama\n",
        (
            'p.yaml:3:7: plan is "llama"',
            "legal: a mapping of made_for, regions",
            'fix: write it as "key: value" pairs',
        ),
    ),
    "an_empty_plan": (
        "schema: sac/v1\nrules: []\nplan: {}\n",
        (
            "p.yaml:3:7: plan has no made_for",
            "legal: a mapping of made_for, regions",
            "fix: add made_for, or write the plan again with `sac plan`",
            "p.yaml:3:7: plan has no regions",
            "legal: a mapping of made_for, regions",
            "fix: add regions, or write the plan again with `sac plan`",
        ),
    ),
    "a_misspelled_key": (
        "schema: sac/v1\nrules: []\nplan: {made_for: x, region: []}\n",
        (
            'p.yaml:3:21: unknown key "region" in plan',
            "did you mean: regions",
            "legal: made_for, regions",
            'fix: write "regions"',
        ),
    ),
    "made_for_a_list": (
        "schema: sac/v1\nrules: []\nplan: {made_for: [x], regions: []}\n",
        (
            "p.yaml:3:18: plan.made_for is a list",
            "legal: text",
        ),
    ),
    "regions_as_a_mapping": (
        "schema: sac/v1\nrules: []\nplan: {made_for: x, regions: {blocks: a}}\n",
        (
            "p.yaml:3:30: plan.regions is a mapping",
            "legal: a list of regions",
            'fix: start each entry with "- "',
        ),
    ),
    "regions_left_empty": (
        "schema: sac/v1\nrules: []\nplan: {made_for: x, regions: }\n",
        (
            "p.yaml:3:29: plan.regions is empty",
            "legal: a list of regions",
            "fix: write [] for none",
        ),
    ),
    "an_entry_that_is_text": (
        "schema: sac/v1\nrules: []\nplan: {made_for: x, regions: [a.*]}\n",
        (
            'p.yaml:3:31: an entry of plan.regions is "a.*"',
            "legal: a mapping of blocks, layers, signature",
            'fix: write it as "key: value" pairs',
        ),
    ),
    "an_entry_without_blocks_and_signature": (
        p("layers: all"),
        (
            "p.yaml:6:7: an entry of plan.regions has no blocks",
            "legal: a mapping of blocks, layers, signature",
            "fix: add blocks, or write the plan again with `sac plan`",
            "p.yaml:6:7: an entry of plan.regions has no signature",
            "legal: a mapping of blocks, layers, signature",
            "fix: add signature, or write the plan again with `sac plan`",
        ),
    ),
    "a_short_signature": (
        p("blocks: a, signature: 12b2"),
        ('p.yaml:6:30: signature is "12b2"', LEGAL, COPY),
    ),
    "a_signature_in_capitals": (
        p(f"blocks: a, signature: {SIGNATURE.upper()}"),
        (f'p.yaml:6:30: signature is "{SIGNATURE.upper()}"', LEGAL, COPY),
    ),
    "a_signature_that_is_a_list": (
        p(f"blocks: a, signature: [{SIGNATURE}]"),
        ("p.yaml:6:30: signature is a list", LEGAL, COPY),
    ),
    "a_pattern_with_a_slash_and_layers_between_colons": (
        p(f"blocks: a/b, layers: [0:3], signature: {SIGNATURE}"),
        (
            'p.yaml:6:16: blocks is "a/b": module paths are written with dots, not with "/"',
            'legal: a dotted module path, such as "self_attn.{q,k}_proj" or "mlp.**"',
            'p.yaml:6:30: an entry of layers is "0:3"',
            'legal: a layer such as 12, or a range such as "0-7" (both ends are meant)',
            'fix: ranges are written as "0-3"',
        ),
    ),
    "a_rule_whose_blocks_are_a_mapping": (
        "schema: sac/v1\nrules:\n  - {ops: a, blocks: {a,b}, do: save}\n",
        (
            "p.yaml:3:22: blocks is a mapping",
            "legal: a pattern, or a list of them",
            'fix: quote it: unquoted braces are a mapping; patterns are written as in "{q_proj,k_proj}"',
        ),
    ),
    "a_rule_with_an_empty_list_of_blocks": (
        "schema: sac/v1\nrules:\n  - {ops: a, blocks: [], do: save}\n",
        (
            "p.yaml:3:22: blocks is an empty list",
            "legal: text, or a list of at least one",
            "fix: remove it, or name one",
        ),
    ),
    "a_rule_with_blocks_and_nothing_else": (
        "schema: sac/v1\nrules:\n  - {blocks: a, do: save}\n",
        (
            "p.yaml:3:5: this rule has neither ops nor module",
            "legal: one of ops, function and unit, or module, or both",
            'fix: add ops, such as "ops: matmul"; "*" means every op that can be saved',
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_whole_text_about_plans(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_whole_text(*CASES[name], tmp_path, monkeypatch)


def test_a_plan_comes_as_values_with_the_marks_of_its_entries(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(p(f'blocks: ["a.*", b], layers: {{first: 2}}, signature: {SIGNATURE}'))
    plan = load_policy(path).plan
    blocks = (PathPattern.parse("a.*"), PathPattern.parse("b"))
    assert plan == PlanSection("x", (PlannedRegion(blocks, Layers(first=2), SIGNATURE),))
    assert plan is not None
    assert plan.regions[0].location == SourceLocation(str(path), 6, 7)


@pytest.mark.parametrize("signature", ["1234567890123456", "0000000000000000", "0123456701234567", "123456789012e456"])
def test_a_signature_that_looks_like_a_number_is_read_digit_by_digit(signature: str, tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(p(f"blocks: a, signature: {signature}"))
    plan = load_policy(path).plan
    assert plan is not None
    assert plan.regions[0].signature == signature


def test_a_signature_that_another_reader_took_for_a_number_is_told() -> None:
    """YAML 1.1 reads sixteen digits from 0 to 7 with a zero in front as a number of base 8."""
    region = {"blocks": "a", "signature": int("0123456701234567", 8)}
    with pytest.raises(PolicyError) as caught:
        load_policy({"rules": [], "plan": {"made_for": "x", "regions": [region]}})
    assert str(caught.value) == (
        f"policy.plan.regions[0].signature: signature is {region['signature']}\n    {LEGAL}\n    {COPY}"
    )


def test_the_first_entry_that_holds_a_region_speaks_of_it() -> None:
    entries = [
        {"blocks": "a.*", "layers": {"last": 1}, "signature": "0" * 16},
        {"blocks": ["a.*", "b.*"], "signature": "1" * 16},
        {"blocks": "**", "layers": ["7"], "signature": "2" * 16},
    ]
    plan = load_policy({"rules": [], "plan": {"made_for": "x", "regions": entries}}).plan
    assert plan is not None
    places = {("a.2", 2, 3): 0, ("a.1", 1, 3): 1, ("b.2", 2, 3): 1, ("c.7", 7, 8): 2, ("c.6", 6, 8): None}
    found = {place: plan.region_at(*place) for place in places}
    assert found == {place: plan.regions[one] if one is not None else None for place, one in places.items()}


def test_a_plan_is_not_inherited(tmp_path: Path) -> None:
    (tmp_path / "parent.yaml").write_text(p(f"blocks: a, signature: {SIGNATURE}"))
    (tmp_path / "child.yaml").write_text("schema: sac/v1\nextends: parent.yaml\n")
    child = load_policy(tmp_path / "child.yaml")
    assert child.plan is None
    assert "plan" not in child.key_locations
