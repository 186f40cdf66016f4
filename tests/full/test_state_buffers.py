"""Buffers advance once with `freeze_buffers`, and again in recomputation without it; gradients are equal in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sac
from sac.errors import RegionError
from sac.full import FullConfig
from sac.region.state import Bindings, owners_of
from tests.full.stateful import MATMULS, ON_EACH_WAY, WAYS, Way, as_it_is, by_function, stepped
from tests.semantics.blocks import FULL, Stack, install
from tests.semantics.training import assert_same, built

Run = Callable[..., Any]
LOOSE = FullConfig(freeze_buffers=False)
FROZEN = FullConfig()


class Normed(nn.Module):
    """Running statistics and counters in place, and one counter bound anew; the value depends on none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("largest", None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.linear(F.dropout(x, 0.3)))
        self.calls = self.calls + 1
        self.largest = h.detach().amax(0) if self.largest is None else self.largest.maximum(h.detach().amax(0))
        return h.sin() * x.cos()


class Scaled(nn.Module):
    """The value depends on a counter bound anew and on one changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("bound", torch.zeros(()))
        self.register_buffer("counted", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.bound = self.bound + 1
        with torch.no_grad():
            self.counted += 1
        return (self.linear(x) * self.bound + self.counted).sin()


def stack(*kinds: type[nn.Module]) -> Callable[[], Stack]:
    return lambda: Stack(*(kind() for kind in kinds))


@ON_EACH_WAY
def test_buffers_advance_once(way: Way) -> None:
    build = stack(Normed, Scaled)
    assert_same(stepped(build, as_it_is), stepped(build, way))


@ON_EACH_WAY
def test_buffers_advance_once_in_eager_use_without_training(way: Way) -> None:
    """Evaluation in between learns other things of a region than training."""

    def build() -> Stack:
        model = Stack(Normed(), Scaled())
        model.eval()
        return model

    assert_same(stepped(build, as_it_is), stepped(build, way))


LOOSE_WAYS: dict[str, Way] = {
    "function": lambda model: by_function(model, LOOSE),
    "full": lambda model: install(model, {**FULL, "freeze_buffers": False}),
    "selective": lambda model: install(model, {**MATMULS, "freeze_buffers": False}),
}


class Stock(Stack):
    """Blocks under torch's own checkpoint."""

    def _call(self, index: int, block: nn.Module, *values: Tensor) -> Any:
        return checkpoint(block, *values, use_reentrant=False)


def by_torch(model: Stack) -> Stack:
    model.__class__ = Stock
    return model


@pytest.mark.parametrize("way", LOOSE_WAYS.values(), ids=LOOSE_WAYS.keys())
def test_without_it_buffers_advance_as_under_torch(way: Way) -> None:
    """Twice, and gradients are what they were, since the value does not depend on them."""
    build = stack(Normed, Normed)
    plain, stock, ours = (stepped(build, one) for one in (as_it_is, by_torch, way))
    assert_same(stock, ours)
    assert float(ours["2 buffer blocks.0.calls"]) == 2 * float(plain["2 buffer blocks.0.calls"]) == 6
    gradients = [name for name in plain if "buffer" not in name]
    assert_same({name: plain[name] for name in gradients}, {name: ours[name] for name in gradients})


def test_calls_of_one_function_with_and_without_it_share_no_evidence() -> None:
    """What needs no mode without it needs one with it."""
    module = Normed()
    for config in (LOOSE, LOOSE, FROZEN, FROZEN):
        before = float(module.calls), int(module.norm.num_batches_tracked)
        x = torch.randn(8, 8, requires_grad=True)
        sac.checkpoint(module, x, config=config).sum().backward()
        more = 2 if config is LOOSE else 1
        assert (float(module.calls), int(module.norm.num_batches_tracked)) == (before[0] + more, before[1] + more)


def test_without_it_a_region_that_writes_buffers_needs_no_mode() -> None:
    module, x = Scaled(), torch.randn(8, 8, requires_grad=True)
    depth: list[int] = []
    module.linear.register_forward_pre_hook(lambda *_: depth.append(torch._C._len_torch_dispatch_stack()))
    for config in (LOOSE, LOOSE, FROZEN, FROZEN):
        sac.checkpoint(module, x, config=config)
    assert depth == [1, 0, 1, 1]


class _Holder:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def method(self, x: Tensor) -> Tensor:
        return self.layer(x)


def closures(module: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
    held = {"module": module}
    kept = _Holder(module)
    return {
        "the module": module,
        "a lambda": lambda x: module(x),
        "a default": lambda x, layer=module: layer(x),
        "a dict": lambda x: held["module"](x),
        "a method": kept.method,
        "an object": lambda x: kept.layer(x),
        "a method of the module": module.forward,
        "nested": lambda x: (lambda y: module(y))(x),
    }


@pytest.mark.parametrize("name", closures(nn.Identity()))
@pytest.mark.parametrize("block", [Normed, Scaled])
def test_modules_are_found_behind_functions(block: type[nn.Module], name: str) -> None:
    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = block()
        function = closures(module)[name]
        seen = {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            run(function, x).square().sum().backward()
            seen[f"{step} input"] = x.grad
            seen |= {f"{step} {name}": buffer.clone() for name, buffer in module.named_buffers()}
            seen |= {f"{step} {name}": parameter.grad.clone() for name, parameter in module.named_parameters()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


def test_buffers_of_nested_regions_advance_once() -> None:
    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        inner, outer = Scaled(), Normed()

        def both(x: Tensor) -> Tensor:
            return outer(run(inner, x) + run(lambda x: inner(outer(x)), x))

        seen = {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            run(both, x).square().sum().backward()
            seen[f"{step} input"] = x.grad
            for place, module in enumerate((inner, outer)):
                seen |= {f"{step} {place} {name}": buffer.clone() for name, buffer in module.named_buffers()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


def test_a_nested_region_that_writes_to_the_input_of_the_outer_one() -> None:
    """What the inner one copies of it is not taken by the outer one for something of its own."""

    def train(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, seen = Scaled(), {}

        def outer(h: Tensor) -> Tensor:
            return run(lambda h: module(h.mul_(2)), h).cos() * h

        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            h = x * 1
            run(outer, h).square().sum().backward()
            seen |= {f"{step} input": x.grad, f"{step} changed": h.detach().clone()}
        return seen

    assert_same(train(lambda function, x: function(x)), train(sac.checkpoint))


@ON_EACH_WAY
def test_two_forwards_before_the_first_backward(way: Way) -> None:
    """As in a pipeline: recomputation of the first goes back over what the second changed."""

    def train(way: Way) -> dict[str, Tensor]:
        model = way(built(stack(Scaled, Normed, Scaled)))
        torch.manual_seed(2)
        seen = {}
        for step in range(2):
            batches = [torch.randn(8, 8, requires_grad=True) for _ in range(3)]
            losses = [model(x).square().sum() for x in batches]
            for loss in losses:
                loss.backward()
            seen |= {f"{step} input {place}": x.grad for place, x in enumerate(batches)}
            seen |= {f"{step} {name}": buffer.clone() for name, buffer in model.named_buffers()}
        return seen

    assert_same(train(as_it_is), train(way))


@ON_EACH_WAY
def test_one_that_raises_in_recomputation_leaves_buffers_as_they_were(way: Way) -> None:
    class Failing(Scaled):
        runs, fails_on = 0, 2

        def forward(self, x: Tensor) -> Tensor:
            self.runs += 1
            out = super().forward(x)
            if self.runs == self.fails_on:
                raise KeyError("the user's own")
            return out.cos()

    model = way(Stack(Failing()))
    x = torch.randn(8, 8, requires_grad=True)
    out = model(x)
    with pytest.raises(KeyError):
        out.sum().backward()
    assert (float(model.blocks[0].bound), float(model.blocks[0].counted)) == (1, 1)
    assert [*model.blocks[0]._buffers] == ["bound", "counted"]


class Functional(nn.Module):
    """A region inside a module whose buffers and parameters are exchanged for one call."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.block, self.run = Scaled(), run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.block, x)


def test_buffers_put_in_place_for_one_call_are_found_again() -> None:
    def grads(run: Run) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module, seen = Functional(run), {}
        for step in range(3):
            x = torch.randn(8, 8, requires_grad=True)
            others = {"block.bound": torch.full((), 5.0), "block.counted": torch.full((), 3.0 + step)}
            out = torch.func.functional_call(module, others, (x,))
            out.sum().backward()
            seen |= {f"{step} input": x.grad, f"{step} bound": module.block.bound.clone()}
            seen |= {f"{step} counted": others["block.counted"].clone(), f"{step} own": module.block.counted.clone()}
        return seen

    assert_same(grads(lambda function, x: function(x)), grads(sac.checkpoint))


class Assigning(nn.Module):
    """A buffer whose data is exchanged: no op writes to anything, and no name means another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("transposed", torch.ones(8, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data = self.calls.data + 1
        self.transposed.data = self.transposed.data * 2
        return (self.linear(x) * self.calls).sin() * self.transposed.sum()


class Unseen(nn.Module):
    """A counter that a kernel changes which no mode sees, as those of a compiled function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        guard = torch._C._DisableTorchDispatch()
        with torch.no_grad():
            self.calls += 1
        del guard
        return (self.linear(x) + self.calls).sin() * x


class Compiled(nn.Module):
    """Statistics that a compiled function updates."""

    backend = "aot_eager"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.inner = nn.Linear(8, 8), Scaled()
        self.norm = nn.BatchNorm1d(8)
        self.compiled = torch.compile(lambda x: self.norm(self.inner(x)), backend=self.backend)

    def forward(self, x: Tensor) -> Tensor:
        return self.compiled(self.linear(x)).sin() * x


class CompiledToKernels(Compiled):
    """The same, to kernels that no mode sees."""

    backend = "inductor"


@ON_EACH_WAY
@pytest.mark.parametrize(
    "block", [Assigning, Unseen, Compiled, pytest.param(CompiledToKernels, marks=pytest.mark.slow)]
)
def test_changes_that_no_recorder_sees(block: type[nn.Module], way: Way) -> None:
    try:
        assert_same(stepped(stack(block, block), as_it_is), stepped(stack(block, block), way))
    finally:
        torch._dynamo.reset()


class LateStarter(nn.Module):
    """Begins to write to a buffer in some later call, for a reason that is in no argument."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear, self.active = nn.Linear(8, 8), False
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        if self.active:
            self.seen.add_(1)
        return (self.linear(x) * (1 + self.seen[0])).sin() * x


LATE = """\
blocks.0: this call changed buffer 'seen' of LateStarter (float32[4]) in place, as no call with such inputs had \
before, so that nothing was kept to recompute it from
    fix: go back to a checkpoint of the training: from now on the region keeps what it writes to"""


def test_a_write_that_begins_late_is_an_error_once() -> None:
    model = WAYS["full"](Stack(LateStarter(4)))
    block = model.blocks[0]
    x = torch.randn(8, 8, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    block.active = True
    with pytest.raises(RegionError) as error:
        model(x)
    assert str(error.value) == LATE
    for active in (False, True, False, True):
        block.active, before = active, float(block.seen[0])
        model(x).sum().backward()
        assert float(block.seen[0]) == before + active


def test_a_write_that_begins_late_is_no_error_where_buffers_are_not_frozen() -> None:
    block, x = LateStarter(4), torch.randn(8, 8, requires_grad=True)
    sac.checkpoint(block, x, config=LOOSE).sum().backward()
    block.active = True
    sac.checkpoint(block, x, config=LOOSE).sum().backward()
    assert float(block.seen[0]) == 2


@contextmanager
def seen_ops() -> Iterator[list[str]]:
    ops: list[str] = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ops.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listing():
        yield ops


def test_bookkeeping_of_buffers_is_seen_by_no_mode() -> None:
    module = Scaled()
    with seen_ops() as ops:
        bindings = Bindings(owners_of(module))
        with torch.no_grad():
            ops.clear()
            module.counted += 1
        assert ops == ["aten.add_.Tensor"]
        written = bindings.close()
    assert written is module.counted
    assert ops == ["aten.add_.Tensor"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(0),
        lambda: torch.zeros(3, dtype=torch.bool),
        lambda: torch.zeros(2, dtype=torch.complex64),
        lambda: torch.zeros(2, dtype=torch.float8_e4m3fn),
        lambda: torch.zeros(1).expand(5),
        lambda: torch.zeros(4, 4)[1:, ::2],
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
    ],
    ids=["empty", "bool", "complex", "float8", "expanded", "strided", "meta", "sparse", "nested"],
)
def test_buffers_of_any_kind_may_be_there(make: Callable[[], Tensor]) -> None:
    module = nn.Linear(4, 4)
    module.register_buffer("other", make())
    module.register_buffer("none", None)
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        sac.checkpoint(module, x).sin().sum().backward()
    assert module.other is not None


def test_buffers_that_share_memory_are_put_back_together() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.zeros(6)
            self.register_buffer("base", base)
            self.register_buffer("part", base[2:4])

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.part += 1
                self.base += 1
            return (x * self.base.sum()).sin() * self.part.sum()

    assert_same(stepped(stack(Sharing), as_it_is), stepped(stack(Sharing), by_function))


def test_a_buffer_made_under_inference_mode_may_be_there() -> None:
    module = nn.Linear(4, 4)
    with torch.inference_mode():
        module.register_buffer("table", torch.ones(4))
    for _ in range(2):
        x = torch.randn(2, 4, requires_grad=True)
        sac.checkpoint(lambda x: module(x).sin() * x, x).sum().backward()


def test_scripted_modules_may_be_there() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    for _ in range(2):
        x = torch.randn(3, 4, requires_grad=True)
        sac.checkpoint(lambda x: scripted(x).sin() * x, x).sum().backward()
    assert int(scripted.state_dict()["1.num_batches_tracked"]) == 2
