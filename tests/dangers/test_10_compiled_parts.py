"""What is compiled in, around or by a region: its own graph for each micro-batch, compiled in both passes, and once."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

import sac
from sac.errors import SacWarning
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.oracle import train_program
from tests.support.programs import WIDTH, Block, Program
from tests.support.training import assert_same, built
from tests.support.ways import NONE, SELECTIVE, WAYS

PRODUCTS = selective(policy(save("matmul", optional=True)))
VALUES = {"full": FULL, "auto": PRODUCTS, "served rerun": {**PRODUCTS, "engine": "rerun"}}


class Counted:
    """A backend that counts the graphs of forwards, and how often they run."""

    def __init__(self) -> None:
        self.graphs = self.runs = 0
        forward = partial(self._compiled, counts=True)
        backward = partial(self._compiled, counts=False)
        self.backend = aot_autograd(fw_compiler=forward, inference_compiler=forward, bw_compiler=backward)

    def _compiled(self, graph: torch.fx.GraphModule, examples: Any, *, counts: bool) -> Any:
        self.graphs += counts

        def run(*args: Any) -> Any:
            self.runs += counts
            return graph.forward(*args)

        return make_boxed_func(run)


class Averaging(nn.Module):
    """A block of which a static graph saves other tensors for its backward than a dynamic one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.a(x).softmax(-1).mean(0, keepdim=True)
        return self.b(mean * self.a(x).tanh() / x.shape[0]) + x


def micro_batches(value: Any, order: tuple[int, ...]) -> dict[str, Tensor]:
    """Three forwards of two lengths in flight, then the backwards in `order`; twice."""
    torch._dynamo.reset()
    torch._C._dynamo.eval_frame._set_lru_cache(True)  # as a process begins
    model = built(lambda: Stack(Averaging(), Averaging()))
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    sac.apply(model, value)
    seen: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for turn in range(2):
        inputs = [torch.randn(*shape, WIDTH, generator=generator) for shape in ((4, 6), (5, 7), (4, 6))]
        outputs = [model(x.requires_grad_()) for x in inputs]
        for place in order:
            outputs[place].square().sum().backward()
        seen |= {f"{turn} {name}": p.grad.clone() for name, p in model.named_parameters()}
        seen |= {f"{turn} input {place}": x.grad for place, x in enumerate(inputs)}
        model.zero_grad()
    return seen


@pytest.mark.parametrize(
    ("name", "order"), [("full", (0, 1, 2)), pytest.param("served rerun", (2, 1, 0), marks=pytest.mark.slow)]
)
def test_a_micro_batch_gets_the_graph_of_its_own_forward(name: str, order: tuple[int, ...]) -> None:
    """A dynamic graph, which the second length makes, fits the first length too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # rules do not look into what is compiled
        assert_same(micro_batches("none", order), micro_batches(VALUES[name], order))


def products(x: Tensor, weight: Tensor) -> Tensor:
    return ((x @ weight).sin() @ weight).cos() * x


def runs_of_a_compiled_function(way: str) -> tuple[dict[str, Tensor], list[tuple[int, int]], int]:
    """What training shows, runs of the graph in forward and backward by step, and graphs."""
    torch._dynamo.reset()
    counted, runs = Counted(), []
    compiled = torch.compile(products, backend=counted.backend)

    def body(block: Block, x: Tensor) -> Tensor:
        return block.down(compiled(block.up(x), block.down.weight).relu()) + x

    def backward(loss: Tensor, *_: Any) -> list[Tensor]:
        forward, counted.runs = counted.runs, 0
        loss.backward()
        runs.append((forward, counted.runs))
        counted.runs = 0
        return []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        put = NONE if way == "none" else WAYS[way]
        seen = train_program(Program("compiled inside", body), put, "matmuls", backward=backward)
    return seen, runs, counted.graphs


@pytest.mark.parametrize("way", ["full", "checkpoint", *SELECTIVE])
def test_what_is_compiled_inside_a_region_stays_compiled(way: str) -> None:
    """Dynamo leaves a function alone, without a word, if it meets a mode that it does not know."""
    (expected, plain, _), (ours, runs, graphs) = runs_of_a_compiled_function("none"), runs_of_a_compiled_function(way)
    assert_same(expected, ours)
    assert plain == [(2, 0)] * 3
    assert [forward for forward, _ in runs] == [2] * 3
    assert all(again in (0, 2) for _, again in runs)
    assert graphs == 1


@pytest.mark.parametrize("name", ["full", "auto"])
def test_equal_blocks_are_compiled_once(name: str) -> None:
    """A path or another object in what Dynamo traces would compile each region alone, and give up on the ninth."""

    def graphs(value: Any) -> int:
        torch._dynamo.reset()
        counted = Counted()
        model = sac.apply(built(lambda: Stack(*(Averaging() for _ in range(4)))), value)
        for block in model.blocks:
            block.compile(backend=counted.backend)
        for _ in range(2):
            model(torch.randn(4, WIDTH, WIDTH, requires_grad=True)).sum().backward()
        return counted.graphs

    assert graphs(VALUES[name]) == graphs("none") == 1


@pytest.mark.parametrize("name", ["full", "auto"])
def test_a_compiled_model_is_one_graph_with_the_gradients_of_the_compiled_model(name: str) -> None:
    """AOTAutograd traces a region twice: what a region learns from a call is not learned from a trace."""

    def gradients(value: Any) -> tuple[dict[str, Tensor], int]:
        torch._dynamo.reset()
        counters.clear()
        model = sac.apply(built(lambda: Stack(Averaging(), Averaging())), value)
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        for step in range(2):
            (torch.manual_seed(step), run(torch.randn(3, 4, WIDTH)).square().sum().backward())
        return {name: p.grad for name, p in model.named_parameters()}, counters["stats"]["unique_graphs"]

    (expected, _), (ours, graphs) = gradients("none"), gradients(VALUES[name])
    assert_same(expected, ours)
    assert graphs == 1
