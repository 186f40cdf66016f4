"""The rules of a plan: they decide op by op as the choices do, and are few."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random

import pytest

import sac
from sac.blocks.install import regions_of
from sac.planner.choices import policy_for, policy_to_try
from sac.planner.pareto import SaveOption
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.profile import Entry, RegionProfile
from sac.planner.rules import PlannedLayer, matches_entry, rules_of
from sac.policy.model import Policy, Rule, limits_of
from tests.support.model_zoo import tiny
from tests.unit.planner.plan_models import stack


@cache
def planner_of(family: str) -> Planner:
    return prepare(*(stack(layers=6) if family == "stack" else tiny(family)))


def policies(planner: Planner, choice: Sequence[int]) -> tuple[Policy, Policy]:
    known = planner.profiles, planner.choices, planner.groups, planner.step.paths, choice
    return policy_for(*known, "planned", made_for="a test"), policy_to_try(*known)


def decided(policy: Policy, planner: Planner) -> list[frozenset[int] | None]:
    """What a policy saves in the region at each position; None: it runs without checkpointing."""
    found: list[frozenset[int] | None] = []
    for path, group in zip(planner.step.paths, planner.groups, strict=True):
        profile = planner.profiles[group]
        layer = profile.layers[profile.paths.index(path)]
        rules = [rule for rule in policy.rules if rule.matches_region(path, layer, profile.stack_size)]
        if any(rule.matches_module for rule in rules):
            found.append(None)
            continue
        saved = (entry for entry in profile.candidates if any(matches_entry(rule, entry) for rule in rules))
        found.append(frozenset(entry.number for entry in saved))
    return found


@pytest.mark.usefixtures("few_choices", "few_steps")
@pytest.mark.parametrize("family", ["stack", "llama", "gemma3", pytest.param("t5", marks=pytest.mark.slow)])
def test_rules_decide_op_by_op_as_the_choices(family: str) -> None:
    planner, random = planner_of(family), Random(family)
    for round_ in range(12):
        few = [random.sample(range(len(one)), min(len(one), 1 + round_ % 3)) for one in planner.choices]
        choice = tuple(random.choice(few[group]) for group in planner.groups)
        wanted = [planner.choices[group][one].keep for group, one in zip(planner.groups, choice, strict=True)]
        for policy in policies(planner, choice):
            assert decided(policy, planner) == [None if keep is None else keep.saved for keep in wanted]


@pytest.mark.usefixtures("few_choices", "few_steps")
def test_a_run_takes_these_decisions() -> None:
    planner = planner_of("llama")
    made = make_plan(planner, "40%")
    model, inputs = tiny("llama")
    sac.apply(model, {"mode": "selective", "policy": made.policy, "engine": "replay"})
    model(**inputs).loss.backward()
    saved = {
        installed.region.path: {(row.module, row.op, row.call) for row in installed.region.group.op_trace if row.rule}
        for installed in regions_of(model)
    }
    for path, group, one in zip(planner.step.paths, planner.groups, made.point.choice, strict=True):
        keep, entries = planner.choices[group][one].keep, planner.profiles[group].entries
        if keep is not None:
            expected = {(e.module, e.op, e.call) for e in entries if e.number in keep.saved}
            assert {
                key for key in saved[path] if key in {(e.module, e.op, e.call) for e in entries if e.savable}
            } >= expected


# Few rules


def layer(number: int, saved: Sequence[tuple[str, str]] | None, ops: Sequence[tuple[str, str]]) -> PlannedLayer:
    """A layer that runs ``ops`` (op, module) and saves some of them; None: it is not checkpointed."""
    entries = tuple(
        Entry(n, module, op, [*ops[:n]].count((op, module)), (n,), (n + 1,), savable=True)
        for n, (op, module) in enumerate(ops)
    )
    profile = RegionProfile("", (f"layers.{number}",), (number,), entries, (), (), ())
    chosen = None if saved is None else frozenset(e.number for e in entries if (e.op, e.module) in saved)
    return PlannedLayer(number, profile, None if chosen is None else SaveOption(chosen, 0, 0.0))


MM, BMM, ADD, MUL = "aten.mm.default", "aten.bmm.default", "aten.add.Tensor", "aten.mul.Tensor"
OPS = [(MM, "attn.q"), (MM, "attn.k"), (BMM, "attn"), (ADD, "attn"), (MUL, "mlp"), (MM, "mlp.up"), (ADD, "")]


def told(rules: Sequence[Rule]) -> list[str]:
    return [f"{rule.id}: {'; '.join([', '.join(rule.ops), *limits_of(rule)])}" for rule in rules]


def rules(*saved: Sequence[tuple[str, str]] | None, size: int = 0) -> list[str]:
    layers = [layer(number, one, OPS) for number, one in enumerate(saved)]
    return told(rules_of(layers, size or len(layers), (), ""))


def test_a_save_set_is_named_where_it_is_the_same_choice() -> None:
    products = [site for site in OPS if site[0] in (MM, BMM)]
    assert rules(products, products) == ["matmul: matmul"]
    assert rules([site for site in OPS if site[0] == MM]) == ["mm: aten.mm"]


def test_modules_are_named_where_the_op_is_recomputed_in_others() -> None:
    assert rules([(MM, "attn.q"), (MM, "attn.k")]) == ["matmul: matmul; module attn.{q,k}"]
    assert rules([(ADD, "attn"), (MUL, "mlp")]) == ["add: aten.add; module attn", "mul: aten.mul"]
    assert rules([(ADD, "attn"), (BMM, "attn")]) == ["bmm: aten.bmm, aten.add; module attn"]


def test_one_rule_for_what_several_choices_save() -> None:
    less, more = [(MM, "attn.q")], [(MM, "attn.q"), (MUL, "mlp")]
    assert rules(less, less, more, more) == ["matmul: matmul; module attn.q", "mul: aten.mul; layers 2-3"]


def test_layers_without_checkpointing_match_whatever_is_shortest() -> None:
    saved = [(MUL, "mlp")]
    assert rules(saved, saved, None) == ["none: ; module (the block); layers 2", "mul: aten.mul"]
    assert rules(saved, None, saved, [], saved) == [
        "none: ; module (the block); layers 1",
        "mul: aten.mul; layers 0-2, 4",
    ]


def test_layers_that_are_not_planned_are_not_matched() -> None:
    assert rules([(MUL, "mlp")], [(MUL, "mlp")], size=3) == ["mul: aten.mul; layers 0-1"]


def test_calls_are_numbered_where_only_some_are_saved() -> None:
    ops = [(MUL, "mlp"), (MUL, "mlp"), (MUL, "attn"), (MUL, "attn"), (ADD, "mlp")]
    one = layer(0, [], ops)
    some = PlannedLayer(0, one.profile, SaveOption(frozenset({1, 3}), 0, 0.0))
    assert told(rules_of([some], 1, (), "")) == ["mul: aten.mul; module {mlp,attn}; call 1"]
