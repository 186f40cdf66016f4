"""What is compiled in, around or by a region: its own graph for each micro-batch, compiled in both passes, and once."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import sac
from sac.errors import SacWarning
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.compiling import Compiled
from tests.support.oracle import train_program
from tests.support.programs import WIDTH, Block, Program
from tests.support.training import assert_same, built
from tests.support.ways import NONE, WAYS

PRODUCTS = selective(policy(save("matmul", optional=True)))
VALUES = {"full": FULL, "auto": PRODUCTS, "served rerun": {**PRODUCTS, "engine": "rerun"}}


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


def attention(x: Tensor, weight: Tensor) -> Tensor:
    q, k, v = (part.view(1, len(x), 2, -1).transpose(1, 2) for part in (x, x.sin(), x @ weight))
    mixed = flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + (i - j))
    return mixed.transpose(1, 2).reshape(x.shape)


@functools.cache
def runs_of_a_compiled_function(function: Any, way: str, hidden: bool) -> tuple[dict[str, Tensor], list[Any], int]:
    """What training shows, runs of the graph in forward and backward by step, and graphs."""
    torch._dynamo.reset()
    log, runs = Compiled(hidden=hidden), []
    compiled = torch.compile(function, backend=log.backend)

    def body(block: Block, x: Tensor) -> Tensor:
        return block.down(compiled(block.up(x), block.down.weight).relu()) + x

    def backward(loss: Tensor, *_: Any) -> list[Tensor]:
        forward, log.runs = log.runs, 0
        loss.backward()
        runs.append((forward, log.runs))
        log.runs = 0
        return []

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        put = NONE if way == "none" else WAYS[way]
        seen = train_program(Program("compiled inside", body), put, "matmuls", backward=backward)
    return seen, runs, len(log.forward)


@pytest.mark.parametrize(
    ("function", "hidden", "way"),
    [
        *((products, hidden, way) for way in WAYS for hidden in (False, True)),
        *((attention, hidden, way) for hidden, way in ((False, "full"), (True, "auto"), (True, "served rerun"))),
    ],
)
def test_what_is_compiled_inside_a_region_stays_compiled(
    function: Any, hidden: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo leaves a function alone, without a word, if it meets a mode that it does not know.

    Attention by `flex_attention` then makes its whole matrix of scores. It has a backward on the CPU (the graph's ops),
    but for a check that inductor's CPU kernels need.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)
    expected, plain, _ = runs_of_a_compiled_function(function, "none", hidden)
    ours, runs, graphs = runs_of_a_compiled_function(function, way, hidden)
    assert_same(expected, ours)
    assert plain == [(2, 0)] * 3
    assert [forward for forward, _ in runs] == [2] * 3
    assert all(again in (0, 2) for _, again in runs)
    assert graphs == (2 if way == "reentrant" else 1)  # one of them for the forward without gradients


@pytest.mark.parametrize("name", ["full", "auto"])
def test_equal_blocks_are_compiled_once(name: str) -> None:
    """A path or another object in what Dynamo traces would compile each region alone, and give up on the ninth."""

    def graphs(value: Any) -> int:
        torch._dynamo.reset()
        log = Compiled()
        backend = log.backend  # one object: another one would be another compilation
        model = sac.apply(built(lambda: Stack(*(Averaging() for _ in range(4)))), value)
        for block in model.blocks:
            block.compile(backend=backend)
        for _ in range(2):
            model(torch.randn(4, WIDTH, WIDTH, requires_grad=True)).sum().backward()
        return len(log.forward)

    assert graphs(VALUES[name]) == graphs("none") == 1
