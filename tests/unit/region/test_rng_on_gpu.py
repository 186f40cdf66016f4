"""Random states of CUDA devices: what the tests next to this one claim on the CPU, and what the CPU does not have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.errors import RegionError
from sac.full import RngTracker
from tests.support.trackers import DeepSpeedLike, bytes_of, filled

pytestmark = pytest.mark.gpu


class GraphSafe(DeepSpeedLike):
    """States are generators, to which the default one is tied for the time of a fork: TransformerEngine, Megatron."""

    def first_state(self, seed: int) -> torch.Generator:
        return torch.cuda.default_generators[0].clone_state().manual_seed(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        default = torch.cuda.default_generators[0]
        outer = default.graphsafe_get_state()
        default.graphsafe_set_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = default.graphsafe_get_state()
            default.graphsafe_set_state(outer)


def body(tracker: Any, x: Tensor) -> Tensor:
    h = F.dropout(x.sin(), 0.3)
    with tracker.fork():
        h = F.dropout(h.cos(), 0.5)
        with tracker.fork("expert-parallel-rng"):
            h = F.dropout(h.sin(), 0.5)
    return F.dropout(h, 0.3).sin()


@pytest.fixture(autouse=True)
def initialised() -> None:
    torch.cuda.init()


@pytest.mark.parametrize("maker", [lambda: RngTracker("cuda"), GraphSafe], ids=["ours", "graph-safe"])
def test_streams_are_put_back_in_a_region_inside_a_fork(maker):
    outcomes = []
    for region in (False, True):
        torch.manual_seed(0)
        tracker = filled(maker)
        call: Callable[..., Tensor] = functools.partial(body, tracker)
        if region:
            call = functools.partial(sac.checkpoint, call, get_rng_state_tracker=lambda tracker=tracker: tracker)
        x = torch.randn(32, 32, device="cuda", requires_grad=True)
        for _ in range(3):
            with tracker.fork():
                out = call(call(x))
            out.sum().backward()
        outcomes.append([x.grad, torch.cuda.get_rng_state(), torch.get_rng_state(), *bytes_of(tracker).values()])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_the_device_of_a_keyword_argument_is_put_back():
    outcomes = []
    for call in (lambda f, x, **more: f(x, **more), sac.checkpoint):
        torch.manual_seed(0)
        x = torch.randn(32, 32, requires_grad=True)
        y = torch.randn(32, 32, device="cuda", requires_grad=True)
        call(lambda x, *, y: x.cuda() * F.dropout(y.sin(), 0.5), x, y=y).sum().backward()
        outcomes.append([x.grad, y.grad, torch.cuda.get_rng_state()])
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))


def test_a_graph_that_is_captured_is_told_of():
    x = torch.randn(32, 32, device="cuda", requires_grad=True)
    x.sin()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RegionError, match="while a CUDA graph is captured"):
        sac.checkpoint(torch.sin, x)
