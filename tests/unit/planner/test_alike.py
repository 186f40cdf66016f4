"""A step that leaves out layers that others stand for has the record of the whole step, to the byte."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sac.planner.alike import Gap, expanded, gaps_in
from sac.planner.planner import Planner
from sac.planner.prepare import prepare
from sac.planner.sharding import fake_ranks, fsdp_over
from sac.planner.step import StepRecord
from tests.support.model_zoo import tiny
from tests.unit.planner.test_sharding import WIDTH, Block

MIXED = {
    "gemma3": {"num_hidden_layers": 20, "layer_types": ["sliding_attention", "full_attention"] * 10},
    "deepseek_v3": {"num_hidden_layers": 10, "first_k_dense_replace": 2},
}
SHORTENED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, tied weights": ("llama", {"num_hidden_layers": 10, "tie_word_embeddings": True}),
    "GPT-2, dropout": ("gpt2", {"n_layer": 10, "dropout": 0.1}),
    "Gemma3, two kinds of layers": ("gemma3", MIXED["gemma3"]),
    "DeepSeek-V3, dense layers first": ("deepseek_v3", MIXED["deepseek_v3"]),
    "Mamba2": ("mamba2", {"num_hidden_layers": 9}),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "T5, a position bias that all layers read": ("t5", {"num_layers": 9}),
    "ALBERT, one layer for all": ("albert", {"num_hidden_layers": 9}),
    "Qwen3-MoE, a loss that reads the routers": ("qwen3_moe", {"num_hidden_layers": 9, "output_router_logits": True}),
}


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are enough here; no steps are needed to measure each."""
    monkeypatch.setattr(Planner, "measure", lambda self: None)


def _choices(planner: Planner) -> list[tuple[int, ...]]:
    """The same choice everywhere, two choices, another one for each group, and random ones."""
    random = Random(0)
    last = planner.without_checkpointing
    full = planner.everywhere(lambda group: 0)
    half = len(last) // 2
    blend = tuple(random.choice((low, high)) for low, high in zip(full, last, strict=True))
    some = tuple((one * 7) // (10 + group) for group, one in zip(planner.groups, last, strict=True))
    return [full, full[:half] + last[half:], some, blend]


def _differences(planner: Planner) -> list[int]:
    """Return how many layers each choice leaves out; every record has to be that of the whole step."""
    assert planner.alike is not None
    found = []
    for choice in _choices(planner):
        gaps = () if planner.repeats else planner.alike.gaps(planner.step.paths, planner.groups, choice)
        quick = replace(planner, records={})
        with quick._applied(choice):
            quick._step(quick.ledger())  # the first call of a group is recorded, and frees some values earlier
            short = quick._shortened(choice)
            whole = quick._step(quick.ledger())
        assert (short is not None) is bool(gaps), (choice, gaps)
        if short is not None:
            assert short == whole
        found.append(sum(gap.count for gap in gaps))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTENED)
def test_the_record_of_a_shortened_step_is_that_of_the_whole_one(name: str) -> None:
    family, changes = SHORTENED[name]
    left_out = _differences(prepare(*tiny(family, **changes)))
    assert max(left_out) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WHOLE)
def test_every_layer_runs_where_layers_exchange_more_than_the_chain(name: str) -> None:
    family, changes = WHOLE[name]
    assert max(_differences(prepare(*tiny(family, **changes)))) == 0


class Chain(nn.Module):
    """Blocks in a row, whose results a function may see."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Skipping(Chain):
    """Every layer's result is read again at the end."""

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return torch.stack(found).square().mean()


class Remembering(Chain):
    """The results stay until the end, and nothing reads them."""

    def forward(self, x: Tensor) -> Tensor:
        found = [self.first(x)]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return found[-1].square().mean()


class Grown(Block):
    """A block that reads what the block before it has made, past its arguments."""

    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        made = torch.relu(self.up(self.norm(x)))
        out: Tensor = x + self.down(made + self.before.seen if self.before is not None else made)
        self.seen = made
        return out


def _whispering() -> nn.Module:
    model = Chain(0)
    layers = [Grown() for _ in range(10)]
    for one, before in zip(layers, [None, *layers], strict=False):
        object.__setattr__(one, "before", before)
    model.layers = nn.ModuleList(layers)
    return model


def _of_one_matrix() -> nn.Module:
    model = Chain()
    for layer in model.layers[1:]:
        layer.down.weight = model.layers[0].down.weight
    return model


def _partly_frozen() -> nn.Module:
    model = Chain(12)
    for layer in model.layers[::2]:
        layer.down.bias.requires_grad_(False)
    return model


def _inputs() -> tuple[Tensor, ...]:
    return (torch.randn(16, WIDTH),)


@pytest.mark.parametrize("make", [Skipping, _whispering, _of_one_matrix], ids=["results", "past arguments", "matrix"])
def test_layers_that_are_read_elsewhere_or_share_a_matrix_all_run(make: Any) -> None:
    assert max(_differences(prepare(make(), _inputs()))) == 0


def test_results_that_are_only_held_do_not_change_the_record() -> None:
    planner = prepare(Remembering(), _inputs())
    choice = planner.everywhere(lambda group: 0)
    with planner._applied(choice):
        planner._step(planner.ledger())
        short, whole = planner._shortened(choice), planner._step(planner.ledger())
    assert short is None or short == whole


@pytest.mark.parametrize("ranks", [0, 4])
def test_shortened_steps_of_sharded_models(ranks: int) -> None:
    with fake_ranks(ranks) if ranks else nullcontext():
        parallelize = fsdp_over(ranks) if ranks else None
        planner = prepare(Chain(), _inputs(), parallelize=parallelize)
        assert max(_differences(planner)) == 4


def test_layers_that_train_other_parameters_are_not_alike() -> None:
    planner = prepare(_partly_frozen(), _inputs())
    choice = planner.everywhere(lambda group: 0)
    assert planner.alike is not None
    gaps = planner.alike.gaps(planner.step.paths, planner.groups, choice)
    assert all(gap.period == 2 for gap in gaps)
    assert max(_differences(planner)) == 0


def test_gaps_leave_three_periods_at_each_end() -> None:
    assert gaps_in("aaaaaa") == ()
    assert gaps_in("aaaaaaa") == (Gap(3, 1, 1),)
    assert gaps_in("x" + "a" * 10 + "y") == (Gap(4, 1, 4),)
    assert gaps_in("aab" * 9) == (Gap(9, 3, 9),)
    assert gaps_in("a" * 8 + "b" * 9) == (Gap(3, 1, 2), Gap(11, 1, 3))
    assert gaps_in([*range(40)]) == ()


def _record(planner: Planner) -> tuple[StepRecord, tuple[Gap, ...]]:
    choice = planner.everywhere(lambda group: 0)
    assert planner.alike is not None
    gaps = planner.alike.gaps(planner.step.paths, planner.groups, choice)
    with planner.alike.leaving_out(planner.step.paths[gaps[0].start : gaps[0].start + gaps[0].count]):
        return planner._step(planner.ledger()), gaps


def test_a_record_whose_layers_differ_around_a_gap_is_not_expanded() -> None:
    planner = prepare(Chain(), _inputs())
    record, gaps = _record(planner)
    gradients = sum(one.numel() * 4 for one in planner.model.layers[0].parameters())
    assert expanded(record, gaps, planner.step.paths, lambda path: gradients) is not None
    assert expanded(record, gaps, planner.step.paths, lambda path: gradients + 1) is None
    for number, phase in enumerate(record.phases):
        if phase.position == gaps[0].start and phase.part != "between":
            other = (*record.phases[:number], replace(phase, peak=phase.peak + 1), *record.phases[number + 1 :])
            found = expanded(replace(record, phases=other), gaps, planner.step.paths, lambda path: gradients)
            assert found is None
