"""One step: it is cut at the borders of its regions, and says what it wants for a loss."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import PlanError
from sac.planner.fakes import fake_copy, fake_inputs, fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.step import BACKWARD, BETWEEN, FORWARD, StepRecord, run_step, scalar_loss

DIM = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """Blocks that are called in the order given, between an embedding and a loss."""

    def __init__(self, count: int, order: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.order = tuple(range(count)) if order is None else order

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number in self.order:
            x = self.blocks[number](x)
        return x.square().mean()


def step_of(
    model: nn.Module, loss_fn: Callable[[Any], Tensor] | None = None, *, rows: int = 4, config: Any = None, **more: Any
) -> StepRecord:
    mode = fake_mode()
    copied = fake_copy(model, mode)
    if config is not None:
        sac.apply(copied, config)
    inputs = fake_inputs((torch.zeros(rows, DIM),), mode)
    regions = [(f"blocks.{number}", block) for number, block in enumerate(copied.blocks)]
    return run_step(copied, inputs, regions, Ledger(), loss_fn, **more)


def parts_of(record: StepRecord) -> list[tuple[str, int]]:
    return [(window.part, window.position) for window in record.phases]


FORWARDS = [(BETWEEN, 0), (FORWARD, 0), (BETWEEN, 1), (FORWARD, 1), (BETWEEN, 2)]


def test_windows_of_a_step() -> None:
    record = step_of(Model(2))
    assert record.paths == ("blocks.0", "blocks.1")
    assert parts_of(record) == [
        *FORWARDS,
        (BETWEEN, 2),  # backward begins
        (BACKWARD, 1),
        (BACKWARD, 0),  # nothing lies between: what one is given is what the other returned
        (BETWEEN, 0),
    ]


def test_windows_join_and_hold_the_peak() -> None:
    record = step_of(Model(3))
    for window, following in zip(record.phases, record.phases[1:], strict=False):
        assert window.after == following.before
    for window in record.phases:
        assert window.peak >= max(window.before, window.after)
    assert record.phases[0].before == record.static
    assert record.peak == max(window.peak for window in record.phases)
    middle = [(window.part, window.position) for window in record.phases].index((BETWEEN, 3)) + 1
    assert record.kept == record.phases[middle].before
    assert record.static == 4 * (sum(p.numel() for p in Model(3).parameters()) + 4 * DIM)


def test_a_region_leaves_behind_what_backward_needs_of_it() -> None:
    record = step_of(Model(2))
    for window in record.phases:
        if window.part == FORWARD:
            hidden, result = 4 * 4 * DIM * 4, 4 * DIM * 4  # what relu returns, which is kept, and what the block does
            assert window.after - window.before == hidden + result
            assert window.peak - window.before == 2 * hidden  # in relu


def test_a_block_that_is_called_twice_has_two_places() -> None:
    record = step_of(Model(2, order=(0, 1, 0)))
    assert record.paths == ("blocks.0", "blocks.1", "blocks.0")
    assert [position for part, position in parts_of(record) if part == FORWARD] == [0, 1, 2]
    assert [position for part, position in parts_of(record) if part == BACKWARD] == [2, 1, 0]


def test_a_block_that_is_not_called_has_no_place() -> None:
    record = step_of(Model(3, order=(0, 2)))
    assert record.paths == ("blocks.0", "blocks.2")
    assert [position for part, position in parts_of(record) if part == BACKWARD] == [1, 0]


def test_frozen_first_layers_have_no_backward() -> None:
    model = Model(3)
    model.first.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    record = step_of(model)
    assert [position for part, position in parts_of(record) if part == FORWARD] == [0, 1, 2]
    backwards = [position for part, position in parts_of(record) if part == BACKWARD]
    assert backwards == [2, 1]
    first = next(window for window in record.phases if (window.part, window.position) == (FORWARD, 0))
    assert first.after - first.before == 4 * DIM * 4  # its result only


def test_gradients_that_are_there_count_as_static() -> None:
    model = Model(2)
    once, again = step_of(model), step_of(model, accumulates=True)
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert again.static == once.static + size
    assert once.peak <= again.peak <= once.peak + size


def test_full_checkpointing_is_seen_at_the_borders() -> None:
    full, none = step_of(Model(2), rows=256, config="full"), step_of(Model(2), rows=256)
    assert full.kept < none.kept
    assert parts_of(full) == parts_of(none)


def test_the_step_leaves_no_gradient_no_hook_and_no_random_number_behind() -> None:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5))
    state = torch.get_rng_state()
    run_step(model, (torch.ones(4, DIM),), [("0", model[0])], Ledger(), torch.sum)
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].weight.grad is None
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_nothing_is_left_behind_after_an_error_either() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(DIM, DIM))
    state = torch.get_rng_state()
    with pytest.raises(PlanError):
        run_step(model, (torch.ones(4, DIM),), [("1", model[1])], Ledger())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks


ONE = torch.zeros((), requires_grad=True)


@pytest.mark.parametrize(
    ("output", "loss_fn"),
    [
        (ONE, None),
        (ONE.reshape(1), None),
        ({"loss": ONE}, None),
        (SimpleNamespace(loss=ONE), None),
        ("anything", lambda output: ONE),
        ({"loss": torch.zeros(3)}, lambda output: ONE),
    ],
)
def test_losses(output: Any, loss_fn: Any) -> None:
    assert scalar_loss(output, loss_fn).data_ptr() == ONE.data_ptr()


LEGAL = "\n    legal: a scalar tensor that needs a gradient"
FIX = "\n    fix: pass loss_fn=, which takes what the model returns"


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (torch.zeros(2, 3), "a tensor of shape [2, 3]"),
        (torch.zeros(()), "a scalar that needs no gradient"),
        ((ONE, ONE), "a tuple"),
        ({"logits": ONE}, "a dict"),
        ({"loss": torch.zeros(3)}, "a tensor of shape [3]"),
        (SimpleNamespace(loss=None, logits=ONE), "a SimpleNamespace"),
        (None, "a NoneType"),
        (1.5, "a float"),
    ],
)
def test_what_is_no_loss(output: Any, found: str) -> None:
    with pytest.raises(PlanError) as error:
        scalar_loss(output, None)
    assert str(error.value) == f"loss: the model returns {found}{LEGAL}{FIX}"


@pytest.mark.parametrize(
    ("returned", "found"), [(torch.zeros(3, requires_grad=True), "a tensor of shape [3]"), (0.0, "a float")]
)
def test_what_a_loss_function_may_not_return(returned: Any, found: str) -> None:
    with pytest.raises(PlanError) as error:
        scalar_loss(None, lambda output: returned)
    assert str(error.value) == f"loss: loss_fn returns {found}{LEGAL}"


@pytest.mark.parametrize("was_on", [True, False])
@pytest.mark.parametrize("loss_fn", [torch.sum, None])  # without one it is an error
def test_the_collector_waits_for_the_end_of_a_step(was_on: bool, loss_fn: Any) -> None:
    seen: list[bool] = []
    model = nn.Sequential(nn.Linear(DIM, DIM))
    model.register_forward_hook(lambda *_: seen.append(gc.isenabled()))
    try:
        if not was_on:
            gc.disable()
        with nullcontext() if loss_fn is not None else pytest.raises(PlanError):
            run_step(model, (torch.ones(4, DIM),), [], Ledger(), loss_fn)
        assert (seen, gc.isenabled()) == ([False], was_on)
    finally:
        gc.enable()
