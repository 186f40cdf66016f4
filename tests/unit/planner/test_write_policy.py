"""A plan as a file: it loads back to an equal policy, and each comment tells the truth about the rule below it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import sac
from sac.blocks.install import regions_of
from sac.planner.by_hand import ATTENTION_MATMULS, SELECTIVE
from sac.planner.choices import policy_for
from sac.planner.fakes import fake_build, fake_copy, fake_inputs, fake_mode
from sac.planner.plan_file import Plan, make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.rules import matches_entry
from sac.planner.write_policy import (
    baselines,
    by_hand,
    curve,
    forward_seconds,
    seconds_text,
    with_alternatives,
    write_policy,
)
from sac.policy.load import load_policy
from sac.policy.model import Policy, Rule
from sac.policy.read import bytes_text
from tests.support.model_zoo import tiny
from tests.unit.planner.plan_models import stack

SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in ("gpt2", "t5")]  # dropout, two stacks

MORE = ("gemma3", "phi3", "qwen3_moe", "mamba2")


@cache
def planner_of(family: str) -> Planner:
    return prepare(*tiny(family))


@pytest.fixture(params=["llama", *SLOW])
def planner(request: pytest.FixtureRequest, few_choices: None) -> Planner:
    return planner_of(request.param)


@pytest.fixture(scope="module")
def small() -> Planner:
    return prepare(*stack())


@pytest.fixture(scope="module")
def made(small: Planner) -> Plan:
    return make_plan(small, "50%", title="a stack")


def read(text: str, folder: Path) -> Policy:
    path = folder / "policy.yaml"
    path.write_text(text, encoding="utf-8")
    return load_policy(path)


@pytest.mark.parametrize("budget", ["0%", "40%", "100%"])
def test_a_plan_loads_back_to_an_equal_policy(planner: Planner, budget: str, tmp_path: Path) -> None:
    one = make_plan(planner, budget)
    assert read(write_policy(one), tmp_path) == one.policy


@given(name=st.text(max_size=60), value=st.text(max_size=300), choice=st.data())
@settings(max_examples=40, deadline=None, report_multiple_bugs=False)
def test_no_choice_and_no_header_breaks_the_file(
    name: str, value: str, choice: st.DataObject, small: Planner, made: Plan, tmp_path_factory: pytest.TempPathFactory
) -> None:
    picked = tuple(choice.draw(st.integers(0, len(small.choices[kind]) - 1)) for kind in small.groups)
    policy = policy_for(
        small.profiles, small.choices, small.groups, small.step.paths, picked, "planned", made_for="a test"
    )
    one = replace(made, policy=policy, point=small.point("plan", picked))
    assert read(write_policy(one, {name: value}), tmp_path_factory.mktemp("plan")) == policy


def test_the_whole_text_of_a_small_plan(made: Plan) -> None:
    text = write_policy(made, {"model": "a stack", "made by": "a test"})
    version, signature = torch.__version__, made.profiles[0].signature
    header, policy = text.split("schema: sac/v1\n")
    assert header.splitlines()[:7] == [
        f"# Planned by sac 0.1.0 with torch {version}.",
        "# model: a stack",
        "# made by: a test",
        "# device: cpu (a processor, rough figures)",
        "# engine: auto",
        f"# budget: {made.budget} bytes ({bytes_text(made.budget)})",
        f"# peak: {made.point.peak} bytes ({bytes_text(made.point.peak)}), checked by a step",
    ]
    assert f"made_for: 'a stack, cpu: peak {made.point.peak} bytes of {made.budget}'" in policy
    assert signature in policy
    share = made.point.seconds / forward_seconds(made)
    told = seconds_text(made.point.seconds)
    flops = made.point.flops / 1e9
    assert (
        f"# recomputed: {flops:.4g} GFLOP in {told} per step (predicted, {share:.1%} of the blocks' forward)" in header
    )


def test_the_comment_of_a_rule_tells_the_bytes_and_the_time_that_it_spares(small: Planner, made: Plan) -> None:
    lines = write_policy(made).splitlines()
    for rule in made.policy.rules:
        [place] = [number for number, line in enumerate(lines) if line.lstrip("- {").split(",")[0] == f"id: {rule.id}"]
        comment = lines[place - 1]
        if rule.matches_module:
            continue
        layer = min(rule.layers.select(3)) if rule.layers is not None else 0
        choice = small.choices[0][made.point.choice[layer]]
        saved = choice.keep.saved  # type: ignore[union-attr]
        assert f"# {bytes_text(held(small, rule))} per layer; without it " in comment
        assert choice.seconds <= small.choices[0][0].seconds
        assert saved


def held(small: Planner, rule: Rule) -> int:
    """The bytes of what a rule saves in a block, by shape: no two rules of these models share a storage."""
    profile = small.profiles[0]
    found = [entry for entry in profile.entries if entry.savable and matches_entry(rule, entry)]
    return sum(profile.bytes[value] for entry in found for value in entry.makes)


def test_layers_that_save_nothing_are_in_the_header_though_they_have_no_rule(small: Planner, made: Plan) -> None:
    full = small.everywhere(lambda kind: 0)
    one = replace(made, policy=Policy("planned", plan=made.policy.plan), point=small.point("plan", full))
    again = seconds_text(small.choices[0][0].seconds)
    assert f"# layers, layers 0-2: saves nothing; {again} run again per layer\n" in write_policy(one)
    assert yaml.safe_load(write_policy(one))["rules"] == []


def test_notes_are_in_the_header(made: Plan) -> None:
    assert "# note: one\n#   two\n" not in write_policy(replace(made, notes=("one\ntwo",)))
    assert "# note: one two\n" in write_policy(replace(made, notes=("one\ntwo",)))


def test_gradients_under_the_file_are_those_without(made: Plan, tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(write_policy(made))
    gradients = []
    for value in ("none", {"mode": "selective", "policy": path}):
        torch.manual_seed(0)
        model, inputs = stack()
        sac.apply(model, value)(*inputs).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))  # type: ignore[arg-type]


# What is written with a plan


def test_predicted_points_are_what_a_step_shows(planner: Planner) -> None:
    one = make_plan(planner, "50%")
    for point in (*baselines(planner)[:3], *curve(planner, one)):
        assert planner.step.peak_of(planner.run(point.choice)) == pytest.approx(point.peak, rel=0.02)


def test_no_baseline_is_faster_than_the_plan_for_its_peak(planner: Planner) -> None:
    for point in baselines(planner):
        assert make_plan(planner, max(point.peak, planner.least().peak)).point.seconds <= point.seconds * (1 + 1e-9)


@pytest.mark.usefixtures("few_choices")
@pytest.mark.parametrize("family", ["bert", "vit", *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_no_shipped_policy_is_faster_than_the_plan_for_its_peak(family: str) -> None:
    one = planner_of(family)
    point = by_hand(one, SELECTIVE)
    assert point.is_checked
    budget = max(point.peak, one.least().peak)
    assert make_plan(one, budget).point.seconds <= point.seconds * (1 + 1e-9)


def test_selective_holds_what_the_regions_themselves_keep() -> None:
    """Its decisions are those of the regions; phi3 chooses by layer, and its layers are of one group."""
    one = prepare(*tiny("phi3"))
    assert len(one.profiles) == 1
    point = by_hand(one, SELECTIVE)
    assert len({*point.choice}) == 2
    found = kept_of("phi3", "selective") - kept_of("phi3", "full")
    assert point.kept - one.point("full", one.every_nth(1)).kept == found


def kept_of(family: str, value: str) -> int:
    model, inputs = tiny(family)
    sac.apply(model, value)
    model(**inputs)
    return sum(one.region.stats.saved_bytes for one in regions_of(model))


def test_baselines_save_what_their_names_say(small: Planner) -> None:
    by_label = {point.label: point for point in baselines(small)}
    assert list(by_label) == [
        "none", "full", "every 2nd layer full", "selective", "attention + every 2nd matmul", ATTENTION_MATMULS
    ]  # fmt: skip
    assert by_label["none"].flops == by_label[ATTENTION_MATMULS].flops == 0
    full = by_label["full"].flops
    assert by_label["every 2nd layer full"].flops == full * 2 // 3  # of three layers the first and the last
    assert full == 3 * 2 * (4 * 64) * 16 * 64  # replay spares the second product: nothing needs it again


def test_the_curve_falls(small: Planner, made: Plan) -> None:
    points = with_alternatives(small, made).curve
    assert [point.label for point in points][:2] == ["0% of the range", "14% of the range"]
    seconds = [point.seconds for point in points]
    assert seconds == sorted(seconds, reverse=True)
    assert points[-1].seconds == 0.0


def test_the_curve_begins_with_the_least_peak_that_is_known_of(small: Planner, made: Plan) -> None:
    first = curve(small, replace(made, least=made.least - 1))[0]
    assert (first.label, first.choice) == ("0% of the range", small.least().choice)
    alike = curve(small, made, same_layers=True)
    assert all(len({*point.choice}) == 1 for point in alike)
    assert alike[0].peak >= made.least


# Models that are built without data


class Tied(nn.Module):
    """Two modules with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("count", torch.zeros(2, dtype=torch.long))


def test_a_model_built_without_data_has_its_dtype_and_shares_what_it_shared() -> None:
    built = fake_build(fake_mode())(Tied, torch.bfloat16)
    copied = fake_copy(built, fake_mode())
    for model in (built, copied):
        assert model.first.weight is model.second.weight
        dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        assert dtypes.pop("count") is torch.long
        assert set(dtypes.values()) == {torch.bfloat16}
        assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert copied.first.weight is not built.first.weight
    assert copied.first.weight.fake_mode is built.first.weight.fake_mode  # it cannot be copied


def test_a_plan_without_data_is_that_with_data() -> None:
    model, inputs = stack()
    found = []
    for one in (model, fake_build(mode := fake_mode())(lambda: stack()[0], torch.float32)):
        found.append(make_plan(prepare(one, inputs if one is model else fake_inputs(inputs, mode)), "50%"))
    assert found[0].policy == found[1].policy
    assert found[0].point == found[1].point
