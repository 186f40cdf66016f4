"""`--simplify`: fewer rules for at most a share of a step's predicted time, within the budget."""

from __future__ import annotations

import pytest

import sac
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.simplify import read_share, simplified
from sac.planner.step_time import plain_step_seconds
from sac.tools.cli import main
from tests.support.model_zoo import tiny
from tests.unit.planner.small_model import INPUTS, Model
from tests.unit.planner.truth import measured, put_on


@pytest.fixture(scope="module")
def planner() -> Planner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sac.planner.pareto.MOST_BEST", 12)
        return prepare(*tiny("llama"))


@pytest.mark.parametrize("budget", ["20%", "50%", "80%"])
def test_fewer_rules_within_the_time_and_the_budget(planner: Planner, budget: str) -> None:
    made = make_plan(planner, budget)
    step = plain_step_seconds(planner) + made.point.seconds
    counts = [len(made.policy.rules)]
    for share in (0.0, 0.05, 0.5):
        found = simplified(planner, made, share)
        counts.append(len(found.policy.rules))
        assert found.point.seconds <= made.point.seconds + share * step
        assert found.point.is_checked
        assert found.point.peak <= made.budget
        real = measured(*tiny("llama"), put_on(found.policy))
        assert real.peak + found.static == found.point.peak
        if found is not made:
            assert found.notes[-1].startswith(f"simplified: {counts[-1]} rule")
            assert f"instead of {counts[0]}, for " in found.notes[-1]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0]


def test_the_planner_learns_nothing_from_it(planner: Planner) -> None:
    made = make_plan(planner, "50%")
    before = [*planner.step.bases], dict(planner.step.held), planner.choices, {*planner.records}
    simplified(planner, made, 0.5)
    assert ([*planner.step.bases], dict(planner.step.held), planner.choices, {*planner.records}) == before


def test_a_plan_of_one_rule_stays_as_it_is() -> None:
    planner = prepare(Model(), INPUTS)
    made = make_plan(planner, "1GiB")
    assert simplified(planner, made, 0.5) is made


def test_in_python_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    plain, simple = (sac.plan(Model(), INPUTS, "50%", simplify=share) for share in (None, "50%"))
    assert len(simple.rules) <= len(plain.rules)
    words = ["plan", "--model", "tests.unit.planner.plan_models:stack", "--budget", "50%", "--json"]
    assert main([*words, "--simplify", "60%"]) == 0
    assert capsys.readouterr().out.count("simplified: ") in (0, 2)  # in the notes and in the policy's header
    assert main([*words, "--simplify", "1"]) == 1
    legal = '    legal: "0%" to "99%"\n'
    assert capsys.readouterr().err == f"simplify: '1' is not a share of the time of a step\n{legal}"


@pytest.mark.parametrize("value", ["1", "a%", "-1%", "100%", 0.01])
def test_what_is_no_share(value: object) -> None:
    with pytest.raises(sac.SacError, match="is not a share of the time of a step"):
        read_share(value)
