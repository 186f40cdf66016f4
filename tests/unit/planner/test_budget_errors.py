"""A budget in a training that fails somewhere: nothing of sac is left behind, and later steps are planned."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from sac.torch_private import profiler_is_on
from tests.unit.planner.plan_models import Block, Stack
from tests.unit.planner.small_training import controller_of, within

X = torch.randn(4, 32, 16)


def test_the_pass_that_makes_lazy_parameters_is_not_observed() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(16), nn.Tanh()) for _ in range(3)))
    sac.apply(model, {**within("1GiB"), "blocks": ["*"]})
    for _ in range(3):
        model(X).sum().backward()
        model.zero_grad()
    assert controller_of(model).fitted is not None


class Fails(torch.autograd.Function):
    """An op whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise KeyboardInterrupt


class Model(Stack):
    """Blocks between an input layer and a head, of which one part can fail."""

    where = ""

    def __init__(self) -> None:
        super().__init__(4)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.where == "block" and number == 1:
                self.layers[2](torch.zeros(3))
            if self.where == "backward" and number == 1:
                x = Fails.apply(x)
        if self.where == "head":
            raise RuntimeError("head")
        return self.head(x)


def step(model: Model, optimizer: torch.optim.Optimizer) -> None:
    out = model(X)
    if model.where == "loss":
        raise KeyboardInterrupt
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("where", ["block", "head", "loss", "backward"])
@pytest.mark.parametrize("fails_at", [0, 2])
def test_failure_leaves_no_profiler_and_later_steps_are_planned(where: str, fails_at: int) -> None:
    torch.manual_seed(0)
    model = Model()
    sac.apply(model, within("50%"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for number in range(8):
        model.where = where if number == fails_at else ""
        try:
            step(model, optimizer)
        except (RuntimeError, KeyboardInterrupt):
            assert model.where
        else:
            continue
        assert not profiler_is_on()
    fitted = controller_of(model).fitted
    assert fitted is not None
    assert not profiler_is_on()
    sac.remove(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_model_that_goes_takes_the_profiler_along() -> None:
    model = Model()
    sac.apply(model, within("50%"))
    model(X).square().mean().backward()
    del model
    gc.collect()
    assert not profiler_is_on()


class Odd(Block):
    """A block whose results depend on memory that no op has filled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * torch.empty(16)[:0].sum()


def test_block_that_cannot_be_planned_is_recomputed_in_full_with_one_warning() -> None:
    model = Model()
    model.layers[1] = Odd()
    sac.apply(model, within("50%"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(4):
            step(model, optimizer)
    [text] = [str(one.message) for one in told if issubclass(one.category, SacWarning)]
    assert text.startswith("layers.1: it is recomputed in full, and not planned op by op: ")
    assert controller_of(model).fitted is not None
    assert not profiler_is_on()
