"""Orders of sac.apply and torch.compile that puts the region into the graph: the same gradients, the policy's graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from tests.support.blocks import FULL, alternate, llama_stack, policy, save, selective, tokens, with_dropout
from tests.support.compiling import Compiled, nothing, train_compiled
from tests.support.pairs import in_pairs
from tests.support.training import assert_same, built

PER_BLOCK = 14  # matrix products in the backward of one block; `full` runs six of seven again
VALUES = {"full": (FULL, 6), "in turn": (selective(policy(save("attention"), alternate("matmul"))), 3)}
Way = Callable[[nn.Module, Any], Any]


def whole(model: nn.Module, backend: Any) -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def in_place(model: nn.Module, backend: Any) -> None:
    model.compile(backend=backend, fullgraph=True)


def each_in_place(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.compile(backend=backend, fullgraph=True)


def each_replaced(model: nn.Module, backend: Any) -> None:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = torch.compile(block, backend=backend, fullgraph=True)


WAYS: dict[str, Way] = {
    "whole": whole,
    "in place": in_place,
    "each in place": each_in_place,
    "each replaced": each_replaced,
}


def clean(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace("_orig_mod.", ""): value for name, value in seen.items()}


@functools.cache
def without_us(way: Way) -> tuple[dict[str, Tensor], Compiled]:
    return train_compiled(llama_stack, nothing, compile_it=way)


@in_pairs(way=WAYS, order=["apply, compile", "compile, apply"], name=VALUES.keys())
def test_gradients_and_graphs(way: Way, order: str, name: str) -> None:
    value, again = VALUES[name]

    def compile_then_apply(model: nn.Module, backend: Any) -> Any:
        compiled = way(model, backend)
        sac.apply(model if compiled is None else compiled, value)
        return compiled

    reference, plain = without_us(way)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)  # the region is in the graph, so there is nothing to warn of
        if order == "apply, compile":
            ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=way)
        else:
            ours, log = train_compiled(llama_stack, nothing, compile_it=compile_then_apply)
    at_once = 2 if way in (whole, in_place) else 1
    assert set(plain.products()) == {at_once * PER_BLOCK}
    assert set(log.products()) == {at_once * (PER_BLOCK + again)}
    assert len(log.backward) == len(plain.backward)
    assert_same(clean(reference), clean(ours))


def lengths(model: nn.Module, run: Any, sizes: tuple[int, ...]) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    for step, size in enumerate(sizes):
        model.zero_grad()
        torch.manual_seed(step)
        (x,) = tokens(length=size)
        out = run(x.requires_grad_())
        out.square().sum().backward()
        seen |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        seen |= {f"{step} output": out.detach(), f"{step} input": x.grad}
    return seen


@functools.cache
def of_lengths(dynamic: bool | None, name: str) -> tuple[dict[str, Tensor], Compiled]:
    torch._dynamo.reset()
    log = Compiled()
    value = VALUES[name][0] if name in VALUES else "none"
    model = sac.apply(built(lambda: with_dropout(llama_stack(1), 0.2)), value)
    run = torch.compile(model, backend=log.backend, fullgraph=True, dynamic=dynamic)
    return lengths(model, run, (8, 12, 6)), log


@pytest.mark.parametrize(
    ("dynamic", "name", "again"),
    [(None, "in turn", 3), (True, "full", 7)],
    ids=["automatic, in turn", "from the start, full"],
)
def test_lengths(dynamic: bool | None, name: str, again: int) -> None:
    """As many graphs as without us, static and dynamic ones, and the policy is in each.

    With dropout `full` runs the last product again too: its result is an argument of the draw.
    """
    (expected, plain), (ours, log) = (of_lengths(dynamic, one) for one in ("none", name))
    assert len(log.forward) == len(plain.forward) == (1 if dynamic else 2)
    assert log.products() == [PER_BLOCK + again] * len(log.forward)
    assert_same(expected, ours)


@pytest.mark.parametrize("value", [FULL, VALUES["in turn"][0]], ids=VALUES.keys())
def test_backend_that_runs_the_graph_as_it_is(value: Any) -> None:
    """A region is torch's checkpoint under our eager modes then, and torch puts no random state back."""
    runs = []
    for config, backend in (("none", None), (value, "eager")):
        torch._dynamo.reset()
        model = sac.apply(built(lambda: with_dropout(llama_stack(1), 0.2)), config)
        run = torch.compile(model, backend=backend, fullgraph=True) if backend else model
        runs.append(lengths(model, run, (8, 12)))
    assert_same(*runs)
