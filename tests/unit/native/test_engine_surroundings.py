"""The library and other users of torch's dispatcher: modes, subclasses, transforms, compilers, the profiler."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack
from tests.support.native_engine import Sequence, assert_same_with_library, needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, gradients, replay
from tests.support.training import assert_same, built, same_bits

pytestmark = needs_library


def ordinary(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin().view(4, 16)
    return F.dropout(h.reshape(8, 8), 0.3) @ block.b


class Doubling(TorchDispatchMode):
    """A mode that changes what ops return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.sin.default else result


class Noting(TorchFunctionMode):
    """A mode above autograd."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def steps(model: nn.Module, around: Callable[[], AbstractContextManager[Any]]) -> dict[str, Tensor]:
    """The gradients of four steps, every second one with something around the forward."""
    torch.manual_seed(0)
    seen = {}
    for step in range(4):
        with around() if step % 2 else contextlib.nullcontext():
            loss = model(torch.randn(8, 8)).square().sum()
        loss.backward()
        seen |= {f"{step} {name}": one for name, one in gradients(model).items()}
        model.zero_grad()
    return seen | {"random numbers": torch.get_rng_state()}


@ON_EACH
@pytest.mark.parametrize("mode", [Doubling, Sequence, Noting])
def test_a_mode_around_the_region(mode: type[Any], chosen: dict[str, Any]) -> None:
    """What a mode around the forward alone changes is unknown in backward, as under any checkpoint."""
    seen = {}
    for native in (True, False):
        with with_library(native):
            seen[native] = steps(applied(block_of(ordinary), replay(chosen)), mode)
    assert_same(seen[False], seen[True])
    if mode is not Doubling:
        assert_same(steps(built(block_of(ordinary)), mode), seen[True])


def test_a_mode_around_the_region_sees_the_ops_that_it_sees_without_the_library() -> None:
    seen = []
    for native in (True, False):
        with with_library(native):
            model = applied(block_of(ordinary), replay(POLICIES["matmuls"]))
            steps(model, contextlib.nullcontext)
            with Sequence() as mode:
                model(torch.randn(8, 8)).sum().backward()
        seen.append(mode.seen)
    assert seen[0] == seen[1]


@ON_EACH
@pytest.mark.parametrize("mode", [Doubling, Sequence, Noting])
def test_a_mode_inside_the_region(mode: type[Any], chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).cos()
        with mode() if block.calls % 3 else contextlib.nullcontext():
            h = h.sin() * F.dropout(h, 0.3)
        return h.sin() @ block.b

    assert_same_with_library(block_of(body), replay(chosen), steps=5, ops=1)


def test_fake_tensors_around() -> None:
    """What a FakeTensorMode makes is fake, and the calls before and after are not."""
    with with_library():
        model = applied(block_of(ordinary), replay(POLICIES["nothing"]))
        expected = steps(built(block_of(ordinary)), contextlib.nullcontext)
        assert_same(expected, steps(model, contextlib.nullcontext))
        with FakeTensorMode(allow_non_fake_inputs=True):
            out = model(torch.randn(8, 8))
            assert type(out).__name__ == "FakeTensor"
            out.sum().backward()
        model.zero_grad()
        assert_same(expected, steps(model, contextlib.nullcontext))


@ON_EACH
def test_fake_tensors_inside(chosen: dict[str, Any]) -> None:
    """A mode of torch's own that the region enters goes below ours, and ops on plain tensors give fake ones."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        with FakeTensorMode(allow_non_fake_inputs=True):
            shape = (h.detach() @ torch.ones(8, 8)).cos().shape
        return h.view(shape) @ block.b

    assert_same_with_library(block_of(body), replay(chosen), steps=4, ops=1)


@ON_EACH
def test_fake_models(chosen: dict[str, Any]) -> None:
    with with_library(), FakeTensorMode():
        model = sac.apply(block_of(ordinary)(), replay(chosen))
        for _ in range(3):
            model(torch.randn(8, 8)).sum().backward()
    assert type(model.blocks[0].a.grad).__name__ == "FakeTensor"


def two(x: Tensor) -> Any:
    return TwoTensor(x.detach().clone(), x.detach().clone() * 2).requires_grad_()


@ON_EACH
def test_a_subclass_as_input_in_some_calls(chosen: dict[str, Any]) -> None:
    def train(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(0)
        seen = {}
        for step in range(5):
            x = torch.randn(8, 8)
            x = two(x) if step in (2, 3) else x.requires_grad_()
            loss = model(x).sin().sum()
            loss.backward()
            grads = {**{name: p.grad for name, p in model.named_parameters()}, "x": x.grad}
            for name, grad in grads.items():
                parts = (grad.a, grad.b) if isinstance(grad, TwoTensor) else (grad,)
                seen |= {f"{step} {name} {i}": part.clone() for i, part in enumerate(parts)}
            model.zero_grad()
        return seen

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return ((x @ block.a).sin() * x.cos()) @ block.b

    expected = train(built(block_of(body)))
    for native in (True, False):
        with with_library(native):
            assert_same(expected, train(applied(block_of(body), replay(chosen))))


@ON_EACH
def test_a_subclass_made_inside(chosen: dict[str, Any]) -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        if block.calls % 2:
            h = h * TwoTensor(OUTSIDE, OUTSIDE * 2).sin().a
        return h @ block.b

    assert_same_with_library(block_of(body), replay(chosen), steps=4, ops=None)


OUTSIDE = torch.linspace(0.5, 2, 64).view(8, 8)


def by_vmap(block: FunctionBlock, x: Tensor) -> Tensor:
    h = torch.vmap(lambda row: (row.sin() @ block.b) * row)(x @ block.a)
    return h.cos() @ block.a


def by_jvp(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    value, tangent = torch.func.jvp(lambda y: y.sin() * y, (h,), (torch.ones_like(h),))
    return (value * tangent.cos()) @ block.b


def by_custom_function(block: FunctionBlock, x: Tensor) -> Tensor:
    return Cube.apply((x @ block.a).sin()) @ block.b  # type: ignore[no-untyped-call,no-any-return]


def by_checkpoint(block: FunctionBlock, x: Tensor) -> Tensor:
    h = checkpoint(lambda y: F.dropout((y @ block.b).sin(), 0.3) * y, x @ block.a, use_reentrant=False)
    return h.cos() @ block.a


def without_grad(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = F.dropout((x @ block.b).exp(), 0.2)
    return (x @ block.a * scale).sin() @ block.b


def under_inference_mode(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    if block.calls == 3:
        with torch.inference_mode():
            (x.detach() @ torch.eye(8)).sin()
    return h.sin() @ block.b


def under_hooks(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    with torch.autograd.graph.save_on_cpu():
        h = h.sin() * h.exp()
    return h @ block.b


def from_numpy(block: FunctionBlock, x: Tensor) -> Tensor:
    h = (x @ block.a).sin()
    other = torch.from_numpy(h.detach().numpy() * 2)
    return (h * other) @ block.b


def script(block: FunctionBlock, x: Tensor) -> Tensor:
    with torch.autograd.set_multithreading_enabled(False), torch.autograd.profiler.record_function("a part"):
        return torch.special.i0(x @ block.a).clamp(max=3) @ block.b


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


@ON_EACH
@pytest.mark.parametrize(
    "body",
    [
        by_vmap,
        by_jvp,
        by_custom_function,
        by_checkpoint,
        without_grad,
        under_inference_mode,
        under_hooks,
        from_numpy,
        script,
    ],
)
def test_inside(body: Callable[..., Tensor], chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(body), replay(chosen), steps=4, ops=None)


@ON_EACH
def test_forward_without_grad_between_steps(chosen: dict[str, Any]) -> None:
    def around(model: Stack) -> dict[str, Tensor]:
        torch.manual_seed(0)
        seen = {}
        for step in range(4):
            with torch.no_grad():
                seen[f"{step} without"] = model(torch.randn(8, 8))
            with torch.inference_mode():
                seen[f"{step} inference"] = model(torch.randn(8, 8)).clone()
            model(torch.randn(8, 8)).sum().backward()
            seen |= {f"{step} {name}": one for name, one in gradients(model).items()}
        return seen

    expected = around(built(block_of(ordinary)))
    with with_library():
        ours = around(applied(block_of(ordinary), replay(chosen)))
    assert expected.keys() == ours.keys()
    assert all(same_bits(expected[name], ours[name]) for name in expected)


@pytest.mark.slow
@ON_EACH
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_inside(backend: str, chosen: dict[str, Any]) -> None:
    torch._dynamo.reset()

    @torch.compile(backend=backend)
    def part(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin() * x.cos()

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return part((x @ block.a).tanh(), block.b) @ block.a

    try:
        expected = steps(built(block_of(body)), contextlib.nullcontext)
        for native in (True, False):
            with with_library(native):
                assert_same(expected, steps(applied(block_of(body), replay(chosen)), contextlib.nullcontext))
    finally:
        torch._dynamo.reset()


@ON_EACH
def test_the_profiler_around_and_switched_in_the_middle_of_a_region(chosen: dict[str, Any]) -> None:
    profiler: list[Any] = []

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        if block.calls == 3:
            profiler.append(profile(activities=[ProfilerActivity.CPU]))
            profiler[-1].start()
        h = F.dropout(h.cos(), 0.2) @ block.b
        if block.calls == 4:
            profiler.pop().stop()
        return h.tanh() * x

    def train(model: Stack) -> dict[str, Tensor]:
        return steps(model, contextlib.nullcontext)

    expected = train(built(block_of(body)))
    with with_library(), recorded() as seen:
        model = applied(block_of(body), replay(chosen))
        assert_same(expected, train(model))
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as around:
            model(torch.randn(8, 8)).sum().backward()
    assert min(seen.ops[1:]) > 4
    assert {"aten::sin", "aten::mm", "aten::cos"} <= {one.key for one in around.key_averages()}


def test_the_stack_of_modes_is_as_before() -> None:
    with with_library():
        model = applied(block_of(ordinary), replay(POLICIES["matmuls"]))
        steps(model, contextlib.nullcontext)
        assert _get_current_dispatch_mode_stack() == []
        with Doubling() as mode:
            model(torch.randn(8, 8)).sum().backward()
            assert _get_current_dispatch_mode_stack() == [mode]
