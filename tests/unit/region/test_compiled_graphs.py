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
from tests.support.compiling import Compiled, lean_stack
from tests.support.training import assert_same, built, train

TRACKER = RngTracker()


def tracker() -> RngTracker:
    return TRACKER


class Nothing:
    """A provider of no state."""

    def snapshot(self) -> None: ...

    def restore(self, state: None) -> None: ...


def dropping_stack() -> nn.Module:
    return with_dropout(llama_stack(1), 0.2)


class Mixed(nn.Module):
    """Calls the stack through ``call``, between work of its own."""

    def __init__(self, call: Callable[..., Any], **options: Any) -> None:
        super().__init__()
        self.inner, self.call, self.options = dropping_stack(), call, options

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.inner, x.sin(), **self.options).cos()


def plainly(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def assert_compiled_same(reference: Callable[[], nn.Module], model: nn.Module, **more: Any) -> None:
    """Hold that the model, compiled as a whole, trains as the reference does in eager."""
    torch._dynamo.reset()
    ours = train(torch.compile(model, backend="aot_eager", **more), steps=2)
    assert_same({name.replace("_orig_mod.", ""): x for name, x in ours.items()}, train(built(reference), steps=2))


NEEDY: dict[str, tuple[dict[str, Any], Any]] = {
    "host": ({"store": "host"}, None),
    "contiguous": ({"store": "contiguous", "num_checkpoints": 2}, None),
    "reentrant": ({"use_reentrant": True}, None),
    "tracker": ({}, tracker),
    "state": ({"state": [Nothing()]}, None),
}


@pytest.mark.parametrize(("keys", "get_tracker"), NEEDY.values(), ids=NEEDY.keys())
def test_settings_hold_inside_a_compiled_model(keys: dict[str, Any], get_tracker: Any) -> None:
    model = sac.apply(built(dropping_stack), {**FULL, **keys}, get_rng_state_tracker=get_tracker)
    assert_compiled_same(dropping_stack, model)
    for one in regions_of(model):
        assert one.region.stats.calls == 2  # what was compiled would not count


def test_one_graph_is_refused_with_our_reason() -> None:
    model = sac.apply(built(llama_stack), {**FULL, "store": "host"})
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"\(reason: sac runs this region in eager: inputs that "):
        torch.compile(model, backend="aot_eager", fullgraph=True)(*tokens())


def test_chunks_are_recomputed_in_the_graph() -> None:
    torch._dynamo.reset()
    log = Compiled()
    model = sac.apply(built(lambda: nn.Sequential(*lean_stack(4).blocks)), {"mode": "full", "layers": {"uniform": 2}})
    torch.compile(model, backend=log.backend, fullgraph=True)(*tokens()).sum().backward()
    # Each chunk of 14 products runs all but its last again; no gradient goes to the input, through q, k and v.
    assert log.products() == [4 * 14 - 3 + 2 * 13]


OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, True),
    "no check": ({"determinism_check": "none"}, False),
    "group that is not used": ({"tp_group": "no group"}, False),
    "tracker": ({"get_rng_state_tracker": tracker}, False),
    "host": ({"config": FullConfig(store="host")}, False),
}


@pytest.mark.parametrize(("options", "in_one_graph"), OPTIONS.values(), ids=OPTIONS.keys())
def test_a_region_inside_a_compiled_function(options: dict[str, Any], in_one_graph: bool) -> None:
    ours = built(lambda: Mixed(sac.checkpoint, **options))
    assert_compiled_same(lambda: Mixed(plainly), ours, fullgraph=in_one_graph)
