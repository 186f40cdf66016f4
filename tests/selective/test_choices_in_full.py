"""`full` keeps what a mixture of experts chooses, in every call, and looks at ops of modules that choose only."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

import sac
from tests.support.blocks import FULL, Stack
from tests.support.training import assert_same, train

STEPS = 4
BIAS = torch.linspace(0, 5, 8)


def in_forward() -> bool:
    return torch._C._current_graph_task_id() == -1


def unsteady(scores: Tensor) -> Tensor:
    """Scores of which others are the largest in recomputation, as with ties on a GPU."""
    return scores.detach() + (BIAS if in_forward() else BIAS.flip(0))


def pick(scores: Tensor) -> Tensor:
    """A function whose name says nothing: no class that calls it names an op that chooses."""
    chosen: Tensor = unsteady(scores).topk(2).indices
    return chosen


class Expert(nn.Module):
    """Notes how many dispatch modes are on when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        MODES_ON["expert"].append(torch._C._len_torch_dispatch_stack())
        return self.linear(x).sin()


MODES_ON: dict[str, list[int]] = {"expert": [], "mixture": []}


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Expert() for _ in range(8))

    def choose(self, scores: Tensor) -> Tensor:
        return unsteady(scores).topk(2).indices

    def forward(self, x: Tensor) -> Tensor:
        MODES_ON["mixture"].append(torch._C._len_torch_dispatch_stack())
        scores = self.router(x)
        chosen = self.choose(scores)
        weights = scores.softmax(-1).gather(1, chosen)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, slot = (chosen == index).nonzero(as_tuple=True)
            out.index_add_(0, row, expert(x[row]) * weights[row, slot].unsqueeze(-1))
        return out


class ByHelper(Mixture):
    def choose(self, scores: Tensor) -> Tensor:
        return pick(scores)


class Nested(Mixture):
    """The mixture's router chooses, and a part of it does too."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Gate()

    def choose(self, scores: Tensor) -> Tensor:
        return self.router.last + 0


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.last = torch.zeros(8, 2, dtype=torch.int64)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x)
        self.last = unsteady(scores).topk(2).indices
        return scores.sort(-1, descending=True).values


class WritesToChoice(Mixture):
    """By an op, in the module that chooses."""

    def choose(self, scores: Tensor) -> Tensor:
        chosen = super().choose(scores)
        return chosen.add_(1).remainder_(8)


class Outer(nn.Module):
    def __init__(self, mixture: nn.Module) -> None:
        super().__init__()
        self.first, self.mixture, self.last = nn.Linear(8, 8), mixture, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixture(self.first(x).sin()).cos()) + x


class InTheBlock(nn.Module):
    """The block itself chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        chosen = unsteady(h).topk(3).indices
        return self.last(h).gather(1, chosen).sin().sum(1, keepdim=True) * x


class SkippedAtFirst(Outer):
    """What the first call does not run is known from the class."""

    def __init__(self, mixture: nn.Module) -> None:
        super().__init__(mixture)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls > 1 else self.first(x).sin()


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "a mixture": lambda: Outer(Mixture()),
    "by a helper function": lambda: Outer(ByHelper()),
    "a gate inside": lambda: Outer(Nested()),
    "in the block's own code": InTheBlock,
    "not in the first call": lambda: SkippedAtFirst(Mixture()),
}


def model_of(build: Callable[[], nn.Module], value: Any) -> Stack:
    torch.manual_seed(0)
    model: Stack = sac.apply(Stack(*(build() for _ in range(2))), value)
    return model


def eight(device: str) -> tuple[Tensor]:
    return (torch.randn(8, 8, device=device),)


@pytest.mark.parametrize("name", BLOCKS)
def test_choices_are_those_of_the_forward_in_every_call(name: str) -> None:
    def trained(value: Any) -> dict[str, Tensor]:
        return train(model_of(BLOCKS[name], value), steps=STEPS, make_input=eight)

    expected = trained("none")
    assert_same(expected, trained(FULL))


def test_a_choice_that_is_written_to_is_made_again() -> None:
    """It is the same one as long as the op repeats itself."""

    class Steady(WritesToChoice):
        def choose(self, scores: Tensor) -> Tensor:
            return scores.topk(2).indices.add_(1).remainder_(8)

    def trained(value: Any) -> dict[str, Tensor]:
        return train(model_of(lambda: Outer(Steady()), value), steps=STEPS, make_input=eight)

    assert_same(trained("none"), trained(FULL))


def test_ops_of_experts_pass_no_mode() -> None:
    model = model_of(BLOCKS["a mixture"], FULL)
    for step in range(3):
        for seen in MODES_ON.values():
            seen.clear()
        model(*eight("cpu")).sum().backward()
        if step:  # the first call has a recorder that sees all
            assert (set(MODES_ON["expert"]), set(MODES_ON["mixture"])) == ({0}, {1})
            assert (len(MODES_ON["expert"]), len(MODES_ON["mixture"])) == (2 * 2 * 8, 2 * 2)


def test_the_report_is_that_of_the_recorded_call() -> None:
    model = model_of(BLOCKS["a mixture"], FULL)
    x = torch.randn(8, 8)
    model(x).sum().backward()
    first = sac.report(model).kinds[0]
    model(x).sum().backward()
    again = sac.report(model).kinds[0]
    assert first.saved_bytes > 0
    assert (again.saved_bytes, again.input_bytes, again.dead_bytes, again.engine) == (
        first.saved_bytes,
        first.input_bytes,
        first.dead_bytes,
        first.engine,
    )


def test_backward_as_often_as_autograd_allows_it() -> None:
    def run(value: Any) -> list[Tensor]:
        model = model_of(BLOCKS["a mixture"], value)
        for _ in range(2):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
            out = model(x)
            loss = out.square().sum()
            first = torch.autograd.grad(loss, x, retain_graph=True)
            second = torch.autograd.grad(loss, x, create_graph=True)
            third = torch.autograd.grad(second[0].sum(), [*model.parameters()], allow_unused=True)
        return [*first, *second, *(one for one in third if one is not None)]

    for expected, ours in zip(run("none"), run(FULL), strict=True):
        assert torch.equal(expected, ours)


def test_hooks_around_get_what_is_kept() -> None:
    def run(value: Any) -> dict[str, Tensor]:
        return train(model_of(BLOCKS["a mixture"], value), steps=STEPS, make_input=eight, around_forward=save_on_cpu)

    assert_same(run("none"), run(FULL))


def test_no_leak() -> None:
    model = model_of(BLOCKS["a mixture"], FULL)
    for _ in range(2):
        model(*eight("cpu")).sum().backward()
    gc.collect()
    gc.disable()
    try:
        out = model(*eight("cpu"))
        assert living() == 2 * 2
        out.sum().backward()
        del out
        assert living() == 0
    finally:
        gc.enable()


def living() -> int:
    """Frames and recorders there are."""
    return sum(type(one).__name__ in ("Frame", "ChoiceRecorder") for one in gc.get_objects())
