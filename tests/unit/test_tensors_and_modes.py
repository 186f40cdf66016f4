"""Dynamo does not compile the modes, and regions under its eyes run as they do without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sac
from sac.engine.tracker import CAN_SKIP_DYNAMO, BareMode
from tests.support.blocks import ENGINES, alternate, llama_stack, policy, save, selective, tokens


class Ours(BareMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


def called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@pytest.mark.skipif(not CAN_SKIP_DYNAMO, reason="this torch has no names to mark code with; its own wrapper is in use")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modes_are_not_compiled() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(x: Tensor) -> Tensor:
        with Ours():
            torch._dynamo.graph_break()
            return x.sin().cos()

    torch._dynamo.reset()
    x = torch.randn(3)
    assert torch.equal(torch.compile(function, backend=backend)(x), x.sin().cos())
    assert graphs == []
    torch._dynamo.reset()


class BreaksItsGraph(torch.nn.Module):
    """Dynamo has to break its graph before what is in it."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.inner(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_regions_behind_a_graph_break_have_the_gradients_of_eager(engine: str) -> None:
    """Under Dynamo's eyes but not in its graph, regions run as they do without it."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = llama_stack(blocks=1)
        (x,) = tokens()
        x.requires_grad_()
        sac.apply(model, selective(policy(save("attention"), alternate("matmul")), engine=engine))
        around = BreaksItsGraph(model)
        out = torch.compile(around, backend="eager")(x) if compiled else around(x)
        out.square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch._dynamo.reset()
    assert all(map(torch.equal, *found))
