"""Regions under `torch.compile`: plain ones are part of the graph; what no graph can hold is done, in eager.

The oracle is the eager model without us: the backend here is aot_eager, which runs the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.blocks.install import regions_of
from sac.full import FullConfig, RngTracker
from tests.support.blocks import FULL, llama_stack, tokens, with_dropout
from tests.support.compiling import Compiled, count
from tests.support.training import assert_same, built, train


class Counting:
    """A provider that notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def snapshot(self) -> int:
        self.asked.append("snapshot")
        return 0

    def restore(self, state: int) -> None:
        self.asked.append("restore")


def tracker() -> RngTracker:
    return TRACKER


TRACKER = RngTracker()

NEEDY: dict[str, tuple[dict[str, Any], Any]] = {
    "host": ({"store": "host"}, None),
    "contiguous": ({"store": "contiguous", "num_checkpoints": 2}, None),
    "reentrant": ({"use_reentrant": True}, None),
    "tracker": ({}, tracker),
    "state": ({"state": [Counting()]}, None),
}


def one_block() -> nn.Module:
    return llama_stack(1)


def dropping_stack() -> nn.Module:
    return with_dropout(one_block(), 0.2)


def compiled(model: nn.Module, **more: Any) -> nn.Module:
    """The model, compiled as a whole, as a module that `train` takes."""
    torch._dynamo.reset()
    return torch.compile(model, backend="aot_eager", **more)


@pytest.mark.parametrize(("keys", "get_tracker"), NEEDY.values(), ids=NEEDY.keys())
def test_settings_hold_inside_a_compiled_model(keys: dict[str, Any], get_tracker: Any) -> None:
    reference = train(built(dropping_stack), steps=2)
    model = sac.apply(built(dropping_stack), {**FULL, **keys}, get_rng_state_tracker=get_tracker)
    ours = train(compiled(model), steps=2)
    assert_same({name.replace("_orig_mod.", ""): x for name, x in ours.items()}, reference)
    for one in regions_of(model):
        assert one.region.stats.calls == 2  # what was compiled would not count


REASON = (
    "(reason: sac runs this region in eager: inputs that are kept elsewhere, trackers, generators, state providers and "
    "use_reentrant cannot be put into a graph)"
)


def test_one_graph_is_refused_with_our_reason() -> None:
    model = sac.apply(built(llama_stack), {**FULL, "store": "host"})
    with pytest.raises(torch._dynamo.exc.Unsupported) as caught:
        compiled(model, fullgraph=True)(*tokens())
    assert REASON in str(caught.value)


def test_chunks_are_recomputed_in_the_graph() -> None:
    torch._dynamo.reset()
    log = Compiled()
    model = sac.apply(built(lambda: nn.Sequential(*llama_stack(4).blocks)), {"mode": "full", "layers": {"uniform": 2}})
    torch.compile(model, backend=log.backend, fullgraph=True)(*tokens()).sum().backward()
    assert log.products() == [4 * 14 + 2 * 13]  # each chunk of 14 products runs all but its last again


# sac.checkpoint in a compiled function


class Mixed(nn.Module):
    """Calls `sac.checkpoint` by itself, between work of its own."""

    def __init__(self, call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.inner, self.call, self.options = dropping_stack(), call, options

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x.sin(), **self.options).cos()


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


OPTIONS: dict[str, dict[str, Any]] = {
    "host": {"config": FullConfig(store="host")},
    "tracker": {"get_rng_state_tracker": tracker},
    "no check": {"determinism_check": "none"},
    "reentrant": {"use_reentrant": True},
    "group that is not used": {"tp_group": "no group"},
}


def test_plain_region_is_part_of_the_graph() -> None:
    reference = train(built(lambda: Mixed(plainly)))
    ours = train(compiled(built(lambda: Mixed(sac.checkpoint)), fullgraph=True))
    assert_same({name.replace("_orig_mod.", ""): x for name, x in ours.items()}, reference)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options_hold_inside_a_compiled_function(options: dict[str, Any]) -> None:
    reference = train(built(lambda: Mixed(plainly)), steps=2)
    ours = train(compiled(built(lambda: Mixed(sac.checkpoint, **options))), steps=2)
    assert_same({name.replace("_orig_mod.", ""): x for name, x in ours.items()}, reference)


def gradients(function: Callable[..., Any], *weights: Tensor) -> list[Tensor]:
    torch.manual_seed(4)
    x = torch.randn(4, 8, requires_grad=True)
    out = function(x)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *weights])]


def test_routing_is_not_run_again() -> None:
    linear = nn.Linear(8, 8)

    def routed(x: Tensor) -> Tensor:
        weights, chosen = linear(x).softmax(-1).topk(2)
        return x.gather(1, chosen) * weights

    torch._dynamo.reset()
    log = Compiled()
    run = torch.compile(lambda x: sac.checkpoint(routed, x), backend=log.backend, fullgraph=True)
    ours = gradients(run, *linear.parameters())
    assert count(log.backward[0], torch.ops.aten.topk.default) == 0
    assert log.products()[0] > 2  # and the product before it is
    for mine, theirs in zip(ours, gradients(routed, *linear.parameters()), strict=True):
        assert torch.equal(mine, theirs)
