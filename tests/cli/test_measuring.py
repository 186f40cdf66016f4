"""`sac.trace`, `sac.compare` and what policies, plans and reports show: in Python as on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import ConfigError, ModelError
from sac.policy.model import Policy
from sac.tools.measuring import check_value
from tests.support.blocks import llama_stack, policy, save, selective, tokens
from tests.support.training import built

VALUE = selective(policy(save("matmul")))
MODES = {"full": "full", "products": VALUE}


def loss_fn(output: Any) -> Tensor:
    return output.float().square().mean()


def as_before(model: nn.Module, run: Any) -> Any:
    """Run, and check that neither the model nor the random state has changed."""
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    found = run()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    assert sac.report(model).mode == "none"
    return found


def test_a_trace_has_the_decisions_of_a_training() -> None:
    model = built(llama_stack)
    inputs = tokens()
    found = as_before(model, lambda: sac.trace(model, inputs, VALUE, loss_fn=loss_fn))
    assert found.regions().keys() == {"blocks.0-1 (x2)"}
    products = [row for row in found.rows if row.op == "aten.mm.default"]
    assert {(row.decision, row.rule, row.call) for row in products} == {("save", "rule-0", 0)}
    assert repr(found).startswith("<Trace of ")
    text = str(found)
    assert "\n  save: 7 calls, " in text
    assert found.to_dict()["rows"][0]["region"] == "blocks.0-1 (x2)"


def test_a_comparison_has_a_row_per_mode_and_equal_gradients() -> None:
    model = built(llama_stack)
    inputs = tokens()
    found = as_before(model, lambda: sac.compare(model, inputs, MODES, steps=2, loss_fn=loss_fn))
    assert [row.mode for row in found.rows] == ["none", "full", "products"]
    assert {row.max_gradient_difference for row in found.rows} == {0.0}
    assert repr(found).startswith("<Comparison of ")
    assert found.table().text() in str(found)


def test_one_word_is_one_mode_and_values_with_one_label_have_a_row_each() -> None:
    assert [row.mode for row in sac.compare(built(llama_stack), tokens(), "full", steps=2).rows] == ["none", "full"]
    plans = [replace(sac.load_policy("general"), name="planned"), Policy("planned")]
    found = sac.compare(built(llama_stack), tokens(), plans, steps=2)
    assert [row.mode for row in found.rows] == ["none", "planned", "planned (2)"]
    assert len({row.kept_bytes for row in found.rows}) == 3


def test_a_mode_that_does_not_exist_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r'^modes: "selectiv" is not known\n    did you mean: selective'):
        sac.compare(built(llama_stack), tokens(), ["full", "selectiv"])


@pytest.mark.parametrize("run", [sac.trace, sac.compare])
def test_what_cannot_be_measured_is_refused(run: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^inputs: a Tensor is not what a model is called with\n.*\n    fix: write \(x,"
    ):
        run(built(llama_stack), torch.ones(2))
    with pytest.raises(ModelError, match=r"sac is on this module already: .*\n    fix: call sac\.remove"):
        run(sac.apply(built(llama_stack), "full"), tokens())
    with pytest.raises(ModelError, match="its parameters are on meta\n    legal: one device that holds data"):
        run(built(llama_stack).to("meta"), tokens())


def test_a_policy_is_printed_as_yaml() -> None:
    policy = sac.load_policy("general")
    assert repr(policy) == "<Policy general: 13 rules, everything else: recompute; print() shows all>"
    assert str(policy) == policy.to_yaml()


def test_a_report_shows_and_counts() -> None:
    model = sac.apply(built(llama_stack), VALUE)
    loss_fn(model(*tokens())).backward()
    report = sac.report(model)
    assert repr(report).startswith("<Report: selective, 2 regions, ")
    scalars = report.scalars()
    assert scalars["sac/kept_bytes"] == report.kept_bytes
    assert scalars["sac/saved_bytes/rule-0"] + scalars["sac/input_bytes"] == report.kept_bytes


def test_names_are_found_when_they_are_used() -> None:
    assert set(sac.__all__) <= {*dir(sac)}
    assert sac.full.FullConfig is not None
    with pytest.raises(AttributeError, match="module 'sac' has no attribute 'aply'"):
        sac.aply  # noqa: B018


def test_a_place_in_a_file_stays_as_it_is(tmp_path: Path) -> None:
    """Also if the name of the config key is in the path of the file."""
    file = tmp_path / "activation_checkpointing" / "p.yaml"
    file.parent.mkdir()
    file.write_text("schema: sac/v1\nrules: 3\n")
    with pytest.raises(ConfigError) as raised:
        check_value(str(file), "--modes")
    assert str(file) in str(raised.value)
