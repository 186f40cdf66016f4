"""What the planner says of a step's memory is what the allocator sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sac.planner.choices import policy_for
from sac.planner.plan_file import make_plan
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from tests.unit.planner.small_model import DIM, INPUTS, Block, Model
from tests.unit.planner.truth import (
    CONFIGS,
    EVERYTHING,
    MODELS,
    Bytes,
    measured,
    model_named,
    predicted,
    put_on,
    saving,
)

QUICK = ("none", "selective")


def assert_true(model: nn.Module, inputs: Any, config: Any, **more: Any) -> None:
    assert predicted(model, inputs, config, **more) == measured(model, inputs, config, more.get("loss_fn"))


def assert_bound(model: nn.Module, inputs: Any, config: Any) -> None:
    """The planner runs the first calls of regions, which hold other values than later ones: the peak is a bound."""
    assert predicted(model, inputs, config).peak >= measured(model, inputs, config).peak


@cache
def planner_of(name: str, layers: int = 2) -> Planner:
    return prepare(*model_named(name, layers))


def checked(planner: Planner, choice: tuple[int, ...]) -> Bytes:
    record = planner.run(choice)
    return Bytes(record.kept - record.static, record.peak - record.static)


@pytest.mark.parametrize("policy", QUICK)
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_step_are_the_allocators(name: str, policy: str) -> None:
    assert_true(*model_named(name), CONFIGS[policy])


@pytest.mark.slow
@pytest.mark.parametrize("policy", CONFIGS)
@pytest.mark.parametrize("name", ["Qwen3-MoE", "T5", "Gemma3n"])
def test_bytes_of_a_step_are_the_allocators_under_every_policy(name: str, policy: str) -> None:
    (assert_bound if policy == EVERYTHING else assert_true)(*model_named(name, 3), CONFIGS[policy])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_bytes_of_a_step_are_the_allocators_under_each_engine(name: str) -> None:
    policies = ["general", saving("matmul")]
    if [*MODELS].index(name) % 2:
        policies.reverse()
    for policy, engine in zip(policies, ("rerun", "replay"), strict=True):
        assert_true(*model_named(name), put_on(policy, engine))


def test_the_first_call_of_a_region_that_saves_everything_takes_more_than_the_later_ones() -> None:
    model, inputs = model_named("Llama")
    assert_bound(model, inputs, CONFIGS[EVERYTHING])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model, inputs = model_named("GPT-2, dropout")
    assert_true(model.to(dtype), inputs, CONFIGS["selective"])


class UnderAutocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(**given)


def test_autocast() -> None:
    model, inputs = model_named("Llama")
    assert_true(UnderAutocast(model), inputs, CONFIGS["general"])


def test_a_loss_function_and_a_padding_mask() -> None:
    model, inputs = model_named("BERT")
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 8:] = 0
    inputs = {"input_ids": inputs["input_ids"], "attention_mask": mask}

    def loss_fn(output: Any) -> Tensor:
        return output.logits.float().logsumexp(-1).mean()

    assert_true(model, inputs, CONFIGS["general"], loss_fn=loss_fn)


class Counting(Block):
    """A block that writes to two buffers: a counter, and the average of what its first product gives."""

    def __init__(self) -> None:
        super().__init__(self.averaged)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4 * DIM))

    def averaged(self, x: Tensor) -> Tensor:
        self.count += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.average


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_copies_of_buffers_that_blocks_write_to_count(policy: str) -> None:
    assert_true(Model(*(Counting() for _ in range(3))), INPUTS, CONFIGS[policy])


def test_a_plan_has_room_for_copies_of_buffers() -> None:
    model = Model(*(Counting() for _ in range(3)))
    for budget in ("0%", "40%", "80%"):
        made = make_plan(prepare(model, INPUTS), budget)
        assert measured(model, INPUTS, put_on(made.policy)).peak + made.static <= made.point.peak <= made.budget


class Clamping(Block):
    """A block that writes to its parameters in forward, as those of Gemma3n do."""

    def __init__(self, through: str) -> None:
        super().__init__()
        self.through = through

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data.clamp_(-0.2, 0.2)
        if self.through == "data twice":
            x = super().forward(x)
            self.up.weight.data.mul_(0.99)
        elif self.through == "no_grad":
            with torch.no_grad():
                self.down.bias.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("policy", ["full", "general", "all matmuls"])
@pytest.mark.parametrize("through", ["data", "data twice", "no_grad"])
def test_copies_of_parameters_that_blocks_write_to_count(through: str, policy: str) -> None:
    assert_true(Model(*(Clamping(through) for _ in range(3))), INPUTS, CONFIGS[policy])


class Scaled(Block):
    """A block that reads small buffers, which replay holds in copies: others may write to them meanwhile."""

    def __init__(self) -> None:
        super().__init__(self.scaled)  # a method: a copy of the block has its own
        self.register_buffer("scale", torch.tensor(3.0))
        self.register_buffer("small", torch.ones(5), persistent=False)

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale * self.small.mean()


class Normed(Block):
    def __init__(self) -> None:
        super().__init__(self.normed)
        self.norm_up = nn.BatchNorm1d(4 * DIM)

    def normed(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm_up(x))


class Placed(Block):
    """A block that puts a tensor into the storage of another one, which is not replayed."""

    def __init__(self) -> None:
        super().__init__(self.placed)

    def placed(self, x: Tensor) -> Tensor:
        y = x * 2
        part = y.new_empty(0).set_(y.detach().untyped_storage(), 3, (7,), (2,))
        return y.relu() + part.sum()


@pytest.mark.parametrize("policy", ["none", "general", "all matmuls"])
@pytest.mark.parametrize("block", [Scaled, Normed, Placed])
def test_what_a_run_copies_and_frees_a_step_without_data_does_too(block: type[Block], policy: str) -> None:
    model = Model(*(block() for _ in range(3)))
    (assert_bound if block is Placed else assert_true)(model, INPUTS, CONFIGS[policy])


def parts_of_results(x: Tensor) -> tuple[Tensor, ...]:
    return x.sigmoid()[:, : 2 * DIM], x.tanh()[:, DIM : 3 * DIM].t().clone().t()


def parts_of_arguments(x: Tensor) -> tuple[Tensor, ...]:
    return x[:, : 2 * DIM], x[:, 2 * DIM :].sigmoid()


def written_arguments(x: Tensor) -> tuple[Tensor, ...]:
    x.data.mul_(0.99)
    return x.sigmoid()[:, : 2 * DIM], x.view(32, -1)[:, 2 * DIM :]


class Returning(nn.Module):
    def __init__(self, of: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.of(x)


class Divided(Block):
    def __init__(self, of: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__(self.divided)
        self.part = Returning(of)

    def divided(self, x: Tensor) -> Tensor:
        first, second = self.part(x * 2)
        return torch.cat([first * first, second * first], 1)


@pytest.mark.parametrize("engine", ["replay", "rerun"])
@pytest.mark.parametrize("of", [parts_of_results, parts_of_arguments, written_arguments])
def test_parts_that_a_saved_module_returns_are_kept_without_the_rest(
    of: Callable[[Tensor], tuple[Tensor, ...]], engine: str
) -> None:
    policy = {"schema": "sac/v1", "name": "whole", "rules": [{"id": "part", "module": "part", "do": "save"}]}
    assert_true(Model(*(Divided(of) for _ in range(3))), INPUTS, put_on(policy, engine))


@pytest.mark.parametrize("part", [slice(1, 5), slice(1, None, 3)], ids=str)
@pytest.mark.parametrize("dim", [0, 1])
def test_small_parts_of_results_take_new_memory_when_backward_reads_them(part: slice, dim: int) -> None:
    """Their elements are kept, without the gaps between them, and laid out in backward as they were."""

    def between(hidden: Tensor) -> Tensor:
        return hidden + hidden.narrow(dim, 0, 9)[(slice(None),) * dim + (part,)].square().sum()

    class Reading(Block):
        def forward(self, x: Tensor) -> Tensor:
            return between(self.up(x)).sum(1, keepdim=True) + x

    assert_true(Model(*(Reading() for _ in range(3))), INPUTS, put_on(saving("matmul")))


def test_a_frozen_first_layer_and_a_frozen_embedding() -> None:
    model, inputs = model_named("Llama", 3)
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    assert_true(model, inputs, CONFIGS["general"])


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", ["Llama", "BERT", pytest.param("T5", marks=pytest.mark.slow)])
def test_random_choices_of_layers_take_what_their_step_took(name: str) -> None:
    """Layers without checkpointing among the others: each keeps its number, also where other stacks have none left."""
    planner, random = planner_of(name), Random(1)
    model, inputs = model_named(name)
    counts = [len(planner.choices[kind]) for kind in planner.groups]
    for number in range(4):
        choice = tuple(
            count - 1 if random.random() < 0.5 else random.randrange(count) if number else 0 for count in counts
        )
        policy = policy_of(planner, choice)
        assert checked(planner, choice) == measured(model, inputs, put_on(policy))


def policy_of(planner: Planner, choice: tuple[int, ...]) -> Any:
    return policy_for(planner.profiles, planner.choices, planner.groups, planner.step.paths, choice, "tried")


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("name", ["Llama", *(pytest.param(one, marks=pytest.mark.slow) for one in [*MODELS][1:])])
def test_a_planned_policy_takes_what_was_planned_and_no_more_than_the_budget(name: str) -> None:
    planner = planner_of(name)
    model, inputs = model_named(name)
    for budget in ("0%", "25%", "50%", "75%", "100%") if name == "Llama" else ("0%", "60%"):
        made = make_plan(planner, budget)
        seen = measured(model, inputs, put_on(made.policy))
        assert seen == checked(planner, made.point.choice)
        assert made.point.peak == seen.peak + made.static
        assert made.least <= made.point.peak <= made.budget <= made.most


@pytest.mark.slow
@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize(("name", "engine"), [("Llama", "replay"), ("GPT-2, dropout", "rerun"), ("ViT", "replay")])
def test_a_plan_for_one_engine(name: str, engine: str) -> None:
    model, inputs = model_named(name, 3)
    planner = prepare(model, inputs, engine=engine)
    for budget in ("0%", "50%"):
        made = make_plan(planner, budget)
        assert measured(model, inputs, put_on(made.policy, engine)) == checked(planner, made.point.choice)


@pytest.mark.slow
@pytest.mark.usefixtures("few_choices")
@pytest.mark.parametrize("name", MODELS)
def test_composed_peaks_are_near_the_checked_ones(name: str) -> None:
    """The search goes by them; what it finds is run, so being off by a little costs time and breaks nothing."""
    planner, random = prepare(*model_named(name)), Random(2)
    for _ in range(4):
        choice = tuple(random.randrange(len(planner.choices[kind])) for kind in planner.groups)
        composed = planner.point("composed", choice).peak
        planner.run(choice)
        assert planner.point("checked", choice).peak == pytest.approx(composed, rel=0.05)
