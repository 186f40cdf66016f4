"""Ops whose memory differs with and without data: their planned bytes are those of a real step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.errors import PlanError
from sac.memory_timeline import measure_memory
from sac.planner.fakes import fake_mode
from sac.planner.live_bytes import Ledger
from sac.planner.plan_file import make_plan
from sac.planner.planning import plan
from sac.planner.prepare import prepare
from tests.unit.planner.truth import measured, predicted, put_on

WIDTH = 16


class Bag(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(50, WIDTH, mode=mode), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.out(self.bag(tokens))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.rnn(x)[0])


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, *rest)
        return x.square().mean()


@pytest.mark.parametrize("name", ["sum", "mean", "max"])
def test_a_real_step_keeps_the_budget(name: str) -> None:
    inputs: tuple[Tensor, ...] = (torch.randn(8, WIDTH), torch.arange(40).reshape(8, 5))
    model = Model(*(Bag(name) for _ in range(3)))
    planner = prepare(model, inputs)
    made = make_plan(planner, "50%")
    record = planner.run(made.point.choice)
    assert measured(model, inputs, put_on(made.policy)).peak <= record.peak - record.static


def test_recurrent_layers_are_refused_for_a_gpu() -> None:
    model = Model(Recurrent(), Recurrent())
    with pytest.raises(PlanError) as caught:
        plan(model, (torch.randn(4, 6, WIDTH),), "50%", device="h100")
    assert str(caught.value) == (
        "aten.lstm: h100 runs it in one kernel of cuDNN or MIOpen, and how many bytes that keeps for backward is not "
        "known\n    fix: plan where it runs: --real --device cuda, use mode: full, or a policy by hand"
    )


class Fan(nn.Module):
    """One value with three users of the same size, or four columns that are read one by one."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.out, self.last = name, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(x)
        if self.name == "users":
            return self.last(x + y * y.sigmoid() * y.tanh() + y)
        if self.name == "shared gradients":
            return self.last(x + (y + y) + y)
        columns = [y[:, column] for column in range(WIDTH)]  # a scan over the columns
        for column in range(1, WIDTH):
            columns[column] = columns[column] + columns[column - 1] * 0.5
        return self.last(x + torch.stack(columns, dim=1))


@pytest.mark.parametrize("name", ["users", "shared gradients", "scan"])
def test_sums_of_gradients_take_what_they_take_in_a_real_step(name: str) -> None:
    model, inputs = Model(Fan(name), Fan(name)), (torch.randn(512, WIDTH),)
    real, said = measured(model, inputs, None), predicted(model, inputs, None)
    assert (said.kept, said.peak) == (real.kept, real.peak)


def test_a_gradient_that_something_else_holds_is_not_added_into() -> None:
    held: list[Tensor] = []

    def holding(x: Tensor, *, is_held: bool) -> None:
        x = x * 1
        if is_held:
            x.register_hook(held.append)
        y = x * 2
        if is_held:
            y.register_hook(held.append)
        (y * 3 + y * 4).sum().backward()

    for is_held in (False, True):
        x = fake_mode().from_tensor(torch.zeros(1000)).requires_grad_()
        real = torch.zeros(1000, requires_grad=True)
        with Ledger() as ledger:
            holding(x, is_held=is_held)
        peak = measure_memory(lambda: holding(real, is_held=is_held)).peak_bytes  # noqa: B023
        assert ledger.peak == pytest.approx(peak, abs=100)
        held.clear()


class Hidden(Model):
    """Returns what its last block returns."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy"])
def test_losses_are_counted_with_the_memory_that_their_terms_were_in(loss: str) -> None:
    model, wanted = Hidden(Fan("users"), Fan("users")), torch.rand(16, WIDTH)

    def loss_fn(out: Tensor) -> Tensor:
        found: Tensor = getattr(F, loss)(out.sigmoid(), wanted)
        return found

    inputs = (torch.randn(16, WIDTH),)
    real, said = (one(model, inputs, None, loss_fn) for one in (measured, predicted))
    assert (said.kept, said.peak) == (real.kept, real.peak)
