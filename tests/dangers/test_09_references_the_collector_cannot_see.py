"""Nothing is held that is part of a cycle through autograd's nodes, which the collector does not see.

A region that holds its caller's object, an attribute or a context value that has the region itself in its history is
never freed. So it holds none of them. What it does hold is free with the graph: `tests/promises/test_07_no_leaks.py`.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.support.custom_ops import Luck, lucky
from tests.support.oracle import assert_exact, built_model
from tests.support.programs import CATALOGUE, WIDTH, Block, Program
from tests.support.recording import without_collector
from tests.support.ways import WAYS

ALIVE: weakref.WeakSet[Tensor] = weakref.WeakSet()
MEMORY: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("MEMORY", default=None)
EVERY_WAY = pytest.mark.parametrize("way", WAYS)
# A reentrant region runs its forward without gradients: its Python sees no graph.
EVERY_GRAPH = pytest.mark.parametrize("way", [name for name in WAYS if name != "reentrant"])


@contextlib.contextmanager
def nothing_alive() -> Iterator[None]:
    ALIVE.clear()
    with without_collector():
        yield
    MEMORY.set(None)


# -- State that has the region in its history


def in_an_attribute(block: Block, h: Tensor) -> None:
    block.memory = h


def in_a_list_that_stays(block: Block, h: Tensor) -> None:
    if not hasattr(block, "memory"):
        block.memory = [h]
    block.memory[0] = h


class Holder:
    last: Tensor


def in_an_object(block: Block, h: Tensor) -> None:
    if not hasattr(block, "memory"):
        block.memory = Holder()
    block.memory.last = h


def in_a_context_variable(block: Block, h: Tensor) -> None:
    MEMORY.set(h)


HOLDERS = (in_an_attribute, in_a_list_that_stays, in_an_object, in_a_context_variable)


@EVERY_GRAPH
@pytest.mark.parametrize("hold", HOLDERS, ids=lambda hold: hold.__name__)
def test_a_chain_of_forwards_holds_no_graphs(hold: Callable[[Block, Tensor], None], way: str) -> None:
    """Each call replaces what the one before remembered, which nothing else holds."""

    def remembers(block: Block, x: Tensor) -> Tensor:
        h = block.down(block.up(x).sin())
        hold(block, h)
        ALIVE.add(h)
        return h * 2

    model = built_model(Program("remembers", remembers), WAYS[way], "matmuls")
    with nothing_alive():
        alive = []
        for _ in range(4):
            model(torch.randn(WIDTH, WIDTH))
            alive.append(len(ALIVE))
    last = 1 if hold is in_a_context_variable else 2  # of both blocks
    assert alive == [last] * 4


@EVERY_GRAPH
@pytest.mark.parametrize("hold", [in_an_attribute, in_an_object], ids=lambda hold: hold.__name__)
def test_what_the_last_call_remembered_is_there_in_recomputation(
    hold: Callable[[Block, Tensor], None], way: str
) -> None:
    """Though the call has replaced it, and nothing else holds it."""

    def goes_on(block: Block, x: Tensor) -> Tensor:
        h = block.up(x).sin()
        last = getattr(getattr(block, "memory", None), "last", getattr(block, "memory", None))
        if isinstance(last, Tensor):
            h = h * last.detach().cos()
        h = block.down(h.sin())
        hold(block, h)
        return h.cos()

    assert_exact(Program("goes on", goes_on), way, "matmuls")


class Cache:
    """What a model hands from call to call; `last` has the call's graph."""

    def __init__(self) -> None:
        self.last: Tensor | None = None


@pytest.mark.parametrize("way", [name for name in WAYS if name not in ("reentrant", "context_fn")])
def test_an_argument_that_remembers_the_call_is_free_with_the_graph(way: str) -> None:
    """Under `context_fn` it is torch that holds the arguments."""

    def uses_a_cache(block: Block, x: Tensor, cache: Cache) -> Tensor:
        h = block.up(x)
        cache.last = (h if cache.last is None else h + cache.last).sin()
        ALIVE.add(cache.last)
        return block.down(cache.last)

    model = built_model(Program("uses a cache", uses_a_cache), WAYS[way], "matmuls", blocks=1)
    with nothing_alive():
        for backward in (False, True, False):
            cache = Cache()
            seen = weakref.ref(cache)
            for _ in range(2):
                out = model(torch.randn(WIDTH, WIDTH), cache)
            if backward:
                out.sum().backward()
            del out, cache
            assert seen() is None
            assert len(ALIVE) == 0


def test_what_a_module_holds_of_the_call_does_not_hold_the_module() -> None:
    """The model is free when its last reference goes, even while a graph of it lives."""
    for way in ("full", "auto"):
        model = built_model(CATALOGUE["two_products"], WAYS[way], "matmuls")
        model(torch.randn(WIDTH, WIDTH)).sum().backward()
        out = model(torch.randn(WIDTH, WIDTH))
        seen = weakref.ref(model.blocks[0].up.weight)
        del model, out
        gc.collect()  # modules are in cycles of torch's and Python's own
        assert seen() is None


@pytest.mark.parametrize("way", ["auto", "replay", "served rerun"])  # without a tape: until the forward ends
def test_an_intermediate_value_dies_in_the_forward(way: str) -> None:
    """Whoever records a forward keeps no tensor alive but those that a policy saves."""
    alive: list[bool] = []

    def looks_back(block: Block, x: Tensor) -> Tensor:
        h = block.up(x).sin()
        seen = weakref.ref(h)
        h = h.cos()
        alive.append(seen() is not None)
        return block.down(h)

    model = built_model(Program("looks back", looks_back), WAYS[way], "matmuls")
    with without_collector():
        for _ in range(3):
            model(torch.randn(WIDTH, WIDTH)).sum().backward()
    assert not any(alive)


# -- After errors


@EVERY_WAY
def test_inputs_are_free_after_an_error_in_the_forward(way: str) -> None:
    def body(block: Block, x: Tensor) -> Tensor:
        return block.down(lucky(block.up(x)).sin())

    model = built_model(Program("unlucky", body), WAYS[way], "matmuls")
    with without_collector():
        for _ in range(2):
            x = torch.randn(WIDTH, WIDTH, requires_grad=True)
            seen = weakref.ref(x)
            Luck.left = False
            try:
                model(x)
            except ValueError:
                pass
            finally:
                Luck.left = True
            del x
            assert seen() is None
