"""What makes the modes cheap leaves no trace: no mode sees our own detaching, and Dynamo does not compile the modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from sac.engine.tracker import CAN_SKIP_DYNAMO, BareMode
from sac.planner.fakes import fake_mode
from sac.tensors import detached, version_watch
from tests.support.blocks import ENGINES, alternate, llama_stack, policy, save, selective, tokens


class Seen(TorchDispatchMode):
    """Collects the ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


def test_detached_is_seen_by_no_mode() -> None:
    tensor = torch.randn(3, requires_grad=True) * 2
    with Seen() as seen:
        bare = detached(tensor)
        assert seen.ops == []
        bare.sin()
    assert seen.ops == [torch.ops.aten.sin.default]
    with Seen() as seen:
        tensor.detach()
    assert seen.ops == [torch.ops.aten.detach.default]
    assert not bare.requires_grad
    assert bare.data_ptr() == tensor.data_ptr()
    with torch.no_grad():
        tensor.add_(1)
    assert bare._version == tensor._version == 1


class Unmarked(TorchDispatchMode):
    """A mode without torch's wrapper, and without our mark."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


class Marked(BareMode):
    """A mode of ours."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return called(func, args, kwargs or {})


def called(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


def graphs_compiled_around(mode: type[TorchDispatchMode]) -> int:
    """How many graphs Dynamo makes of a compiled function that breaks its graph inside the mode."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def function(x: Tensor) -> Tensor:
        with mode():
            torch._dynamo.graph_break()
            return x.sin().cos()

    torch._dynamo.reset()
    x = torch.randn(3)
    assert torch.equal(torch.compile(function, backend=backend)(x), x.sin().cos())
    torch._dynamo.reset()
    return len(graphs)


@pytest.mark.skipif(not CAN_SKIP_DYNAMO, reason="this torch has no names to mark code with; its own wrapper is in use")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_fake", [False, True], ids=["real", "fake"])
def test_a_watch_of_a_version_holds_no_data(is_fake: bool) -> None:
    tensor = fake_mode().from_tensor(torch.ones(3)) if is_fake else torch.ones(3)
    watch = version_watch(tensor)
    tensor.add_(1)
    assert watch._version == tensor._version == 1
    assert watch.untyped_storage().nbytes() == 0


def test_modes_are_not_compiled() -> None:
    assert graphs_compiled_around(Unmarked) > 0
    assert graphs_compiled_around(Marked) == 0


class BreaksItsGraph(torch.nn.Module):
    """A block in the middle of which Dynamo has to break its graph."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return self.block(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("inner", [False, True], ids=["a region inside", "the block of the region"])
def test_compiled_with_a_graph_break_has_the_gradients_of_eager(inner: bool, engine: str) -> None:
    """Under Dynamo's eyes but not in its graph, regions run as they do without it."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        model = llama_stack(blocks=1)
        (x,) = tokens()
        x.requires_grad_()
        if inner:
            model.blocks[0] = BreaksItsGraph(model.blocks[0])
        sac.apply(model, selective(policy(save("attention"), alternate("matmul")), engine=engine))
        around = model if inner else BreaksItsGraph(model)
        out = torch.compile(around, backend="eager")(x) if compiled else around(x)
        out.square().sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    torch._dynamo.reset()
    assert all(map(torch.equal, *found))
