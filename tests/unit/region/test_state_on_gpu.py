"""The state of the forward on a GPU: what the tests next to this one claim on the CPU, and what a GPU has besides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import sac
from sac.full import RngTracker
from tests.support.blocks import FULL, Stack
from tests.support.trackers import DeepSpeedLike, bytes_of, filled
from tests.support.training import assert_same_training

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
        call: Callable[..., Tensor] = partial(body, tracker)
        if region:
            call = partial(sac.checkpoint, call, get_rng_state_tracker=lambda tracker=tracker: tracker)
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


# -- Autocast, attention kernels, TF32, and statistics that live on the GPU

SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bf16": partial(torch.autocast, "cuda", torch.bfloat16),
    "math": partial(sdpa_kernel, SDPBackend.MATH),
    "order": partial(sdpa_kernel, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "cudnn off": partial(torch.backends.cudnn.flags, enabled=False),
    "device": partial(torch.device, "cuda"),
}


class Block(nn.Module):
    """Attention in half precision, a convolution, statistics, a counter; a tensor made where the surroundings say."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.norm = nn.Linear(64, 192), nn.BatchNorm1d(64)
        self.convolution = nn.Conv1d(64, 64, 3, padding=1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += torch.ones(()).to(self.calls)
        q, k, v = self.project(x_BTD).to(torch.bfloat16).unflatten(-1, (3, 1, 64)).unbind(2)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        h_BDT = self.convolution(mixed.squeeze(1).to(x_BTD.dtype).transpose(1, 2))
        return F.dropout(self.norm(h_BDT).transpose(1, 2).float().sin(), 0.2) * x_BTD


@pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_recomputation_on_a_gpu_meets_the_state_of_forward(
    surrounding: Callable[[], AbstractContextManager[Any]],
) -> None:
    def inputs(device: str) -> tuple[Tensor, ...]:
        return (torch.randn(4, 32, 64, device=device),)

    training: dict[str, Any] = {"make_input": inputs, "steps": 3, "around_forward": surrounding}
    assert_same_training(lambda: Stack(Block()), FULL, device="cuda", **training)
