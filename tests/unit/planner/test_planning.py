"""sac.plan from end to end: what it leaves alone, what its policies do, and what an optimizer adds."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import ours_on
from sac.engine.op_trace import OpTraceRecorder
from sac.errors import RegionError
from sac.planner.budget import optimizer_bytes
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.policy.model import Policy
from tests.support.model_zoo import tiny
from tests.unit.planner.small_model import INPUTS, Block, Model, stops
from tests.unit.planner.truth import MODELS, measured, model_named, put_on


def state_of(model: nn.Module) -> list[Any]:
    """All of a model that a plan might change."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [(id(one), one._version, one.requires_grad, id(one.grad)) for one in tensors],
        [(id(module), module.training, module.__class__, sorted(module.__dict__)) for module in model.modules()],
        [[*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks] for module in model.modules()],
        [id(module.__dict__.get("forward")) for module in model.modules()],
        getattr(getattr(model, "config", None), "use_cache", None),
        torch.get_rng_state().tolist(),
    ]


def trained(model: nn.Module, inputs: Any) -> nn.Module:
    """The model with gradients of a step before."""
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    (output if isinstance(output, Tensor) else output.loss).backward()
    return model


@pytest.mark.parametrize("config", [{}, {"real": True}, {"optimizer": "adam", "engine": "rerun"}, {"device": "h100"}])
def test_the_model_is_left_as_it_was(config: dict[str, Any]) -> None:
    model = Model()
    model.blocks[1].register_forward_hook(lambda *_: None)
    if "device" not in config:  # planned in a fork of this process, in which a backward cannot follow one here
        trained(model, INPUTS)
    before, values = state_of(model), copy.deepcopy(model.state_dict())
    policy = sac.plan(model, INPUTS, "50%", **config)
    assert isinstance(policy, Policy)
    assert state_of(model) == before
    assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), values.values(), strict=True))
    assert all(ours_on(module) is None for module in model.modules())


@pytest.mark.gpu
@pytest.mark.parametrize("real", [False, True])
def test_the_random_state_of_a_gpu_is_left_as_it_was(real: bool) -> None:
    model, inputs = Model().cuda(), (INPUTS[0].cuda(),)
    before = torch.cuda.get_rng_state()
    sac.plan(model, inputs, "50%", real=real)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.usefixtures("few_choices", "few_steps")
def test_a_hugging_face_model_keeps_its_cache() -> None:
    model, inputs = tiny("gpt2", dropout=0.1)
    assert model.config.use_cache
    trained(model, inputs)
    before = state_of(model)
    sac.plan(model, inputs, "50%")
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("model", "budget", "options"),
    [
        (Model(), 1000, {}),
        (Model(), "50%", {"loss_fn": lambda loss: None}),
        (Model(Block(stops), Block(stops)), "50%", {}),
        (Model(), "50%", {"optimizer": "none such"}),
        (Model(), "50%", {"engine": "none such"}),
    ],
    ids=["budget", "loss", "data", "optimizer", "engine"],
)
def test_the_model_is_left_as_it_was_after_an_error(model: Model, budget: Any, options: dict[str, Any]) -> None:
    before = state_of(model)
    with pytest.raises(sac.SacError):
        sac.plan(model, INPUTS, budget, **options)
    assert state_of(model) == before


def gradients(model: nn.Module, inputs: Any, config: Any) -> list[Tensor]:
    model = copy.deepcopy(model)
    if config is not None:
        sac.apply(model, config)
    found = []
    for step in range(2):
        torch.manual_seed(step)
        trained(model, inputs)
        found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return found


def assert_same_gradients(model: nn.Module, inputs: Any, policy: Policy) -> None:
    expected = gradients(model, inputs, None)
    for engine in ("replay", "rerun"):
        found = gradients(model, inputs, put_on(policy, engine))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@cache
def planner_of(name: str) -> Planner:
    return prepare(*model_named(name))


@pytest.mark.parametrize("budget", ["0%", "60%", "100%"])
def test_a_planned_policy_changes_no_gradient(budget: str) -> None:
    model = Model()
    assert_same_gradients(model, INPUTS, sac.plan(model, INPUTS, budget))


@pytest.mark.slow
@pytest.mark.usefixtures("few_choices", "few_steps")
@pytest.mark.parametrize("budget", ["0%", "50%", "100%"])
@pytest.mark.parametrize("name", MODELS)
def test_planned_policies_of_known_models_change_no_gradient(name: str, budget: str) -> None:
    model, inputs = model_named(name)
    assert_same_gradients(model, inputs, make_plan(planner_of(name), budget).policy)


class Twice(Model):
    """Each block is called twice in a step, and is one region with one choice."""

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(block(x))
        return self.returns(x)


@pytest.mark.parametrize("model", [Twice(), Model(*[Block()] * 3)], ids=["twice", "shared"])
def test_blocks_that_are_called_several_times(model: nn.Module) -> None:
    planner, seen = prepare(model, INPUTS), set()
    for share in ("0%", "30%", "50%", "90%", "100%"):
        made = make_plan(planner, share)
        real = measured(model, INPUTS, put_on(made.policy))
        assert real.peak + made.static == made.point.peak <= made.budget
        seen.add(made.point.peak)
    assert len(seen) >= 3


@pytest.mark.usefixtures("few_choices")
def test_layers_that_share_keys_and_values() -> None:
    """What one layer holds depends on others there: the least peak is the least of all steps that were run."""
    model, inputs = tiny("gemma4")
    planner, peaks = prepare(model, inputs), []
    for share in ("0%", "20%", "50%", "100%"):
        made = make_plan(planner, share)
        real = measured(model, inputs, put_on(made.policy))
        assert real.peak + made.static == made.point.peak <= made.budget
        peaks.append(made.point.peak)
    assert peaks[0] == min(planner.step.peak_of(record) for record in planner.records.values())
    assert peaks == sorted(peaks)


def test_bytes_of_a_real_step_are_within_every_budget_down_to_the_least() -> None:
    model, seen = Model(*(Block() for _ in range(4))), []
    planner = prepare(model, INPUTS)
    ends = make_plan(planner, "0%")
    for budget in range(ends.least, ends.most + 1, max(1, (ends.most - ends.least) // 12)):
        made = make_plan(planner, budget)
        assert made.budget == budget
        real = measured(model, INPUTS, put_on(made.policy))
        assert real.peak + made.static == made.point.peak <= budget
        seen.append(made.point.seconds)
    assert seen == sorted(seen, reverse=True)  # more memory is never slower
    assert seen[0] > 0


def test_a_budget_above_everything_needs_no_checkpointing() -> None:
    planner = prepare(Model(), INPUTS)
    made = make_plan(planner, "1GiB")
    assert made.notes == ("no checkpointing is needed",)
    assert [(rule.module.text if rule.module else None, rule.ops) for rule in made.policy.rules] == [("", ())]
    assert made.point.seconds == 0


def test_a_loss_function_and_other_inputs() -> None:
    model = Model(returns=lambda x: {"hidden": x})
    policy = sac.plan(model, {"x": INPUTS[0]}, "50%", loss_fn=lambda output: output["hidden"].sum())
    assert policy == sac.plan(Model(returns=lambda x: x.sum()), INPUTS, "50%")


def test_inputs_in_another_mapping_than_a_dict() -> None:
    """As Hugging Face's processors give them."""
    model = Model()
    assert sac.plan(model, UserDict(x=INPUTS[0]), "50%") == sac.plan(model, {"x": INPUTS[0]}, "50%")


def test_real_tensors_where_the_model_looks_at_its_data() -> None:
    model = Model(Block(stops), Block(stops))
    policy = sac.plan(model, INPUTS, "50%", real=True)
    assert_same_gradients(model, INPUTS, policy)


def test_other_ops_than_those_planned_for_are_refused() -> None:
    policy = sac.plan(Model(), INPUTS, "50%")
    other = sac.apply(Model(*(Block(torch.sigmoid) for _ in range(3))), policy)
    with pytest.raises(RegionError, match=r"blocks\.0 runs \d+ ops that differ from those that the plan was made for"):
        other(*INPUTS)


def test_regions_list_no_ops_in_the_steps_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = prepare(Model(), INPUTS)  # lists what `selective` saves
    counted = Mock(side_effect=OpTraceRecorder)
    monkeypatch.setattr("sac.engine.region.OpTraceRecorder", counted)
    before = len(planner.records)
    made = make_plan(planner, "50%")
    assert len(planner.records) > before
    assert not counted.called
    sac.apply(Model(), made.policy)(*INPUTS)
    assert counted.called


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "Adam, amsgrad": lambda of: torch.optim.Adam(of, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda of: torch.optim.AdamW(of, fused=True),
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda of: torch.optim.RMSprop(of, centered=True),
}


def real_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's tensors but for counters."""
    states = (state for of in optimizer.state.values() for state in of.values())
    return sum(one.numel() * one.element_size() for one in states if isinstance(one, Tensor) and one.dim())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bytes_of_an_optimizer_are_those_of_its_state_after_a_step(name: str) -> None:
    model = Model()
    model.blocks[0].bfloat16()
    model.blocks[1].requires_grad_(False)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = OPTIMIZERS[name](parameters)
    said = optimizer_bytes(optimizer, model.parameters())
    assert not optimizer.state or name == "Adagrad"  # which makes its state at once
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert said == real_state_bytes(optimizer)


@pytest.mark.parametrize(
    ("word", "like"), [("sgd", "SGD"), ("momentum", "momentum"), ("Adam", "Adam"), ("adamw", "AdamW")]
)
def test_an_optimizer_by_name_is_the_one_of_torch(word: str, like: str) -> None:
    parameters = [*Model().parameters()]
    assert optimizer_bytes(word, parameters) == optimizer_bytes(OPTIMIZERS[like](parameters), parameters)
    assert optimizer_bytes(None, parameters) == 0


def test_of_groups_that_differ_the_one_that_holds_most_counts() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second], "momentum": 0.9}], lr=0.1)
    assert optimizer_bytes(optimizer, [first, second]) == (3 + 5) * 4


def test_state_of_the_optimizer_is_part_of_the_budget() -> None:
    model = Model()
    size = sum(parameter.numel() for parameter in model.parameters()) * 4
    plain, with_adam = (make_plan(prepare(model, INPUTS, optimizer=one), "0%") for one in (None, "adam"))
    assert with_adam.least - plain.least == with_adam.most - plain.most == with_adam.extra == 2 * size


def test_what_a_namespace_returns_as_loss_is_found() -> None:
    model = Model(returns=lambda x: SimpleNamespace(loss=x.sum()))
    assert sac.plan(model, INPUTS, "50%")
