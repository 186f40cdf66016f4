"""Regions inside torch.utils.checkpoint with and without the library: the same numbers, bytes, ops and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sac
from sac.outer_hooks import OuterPacked, active_hooks
from tests.support.blocks import FunctionBlock, Stack, install, llama_stack, policy, save, selective, square, tokens
from tests.support.custom_ops import lucky
from tests.support.native_engine import (
    Recorded,
    assert_same_with_library,
    error_of,
    needs_library,
    recorded,
    with_library,
)
from tests.support.recording import backward_ops
from tests.support.replay_programs import POLICIES, block_of, gradients
from tests.support.training import assert_same, built, gradient_penalty, inputs_then_weights
from tests.support.whole_module_blocks import Apply, whole
from tests.unit.native.test_engine_errors import FAILURES, Stop, failing
from tests.unit.native.test_engine_programs import CHANGING, NATIVE, Nested, inside
from tests.unit.native.test_rerun import (
    draws_from_its_own,
    routes,
    writes_late,
    writes_to_a_view_of_what_is_saved,
    writes_to_its_own,
    writes_to_what_is_saved,
)
from tests.unit.recompute.test_replay_kinds_of_ops import BODIES as KINDS
from tests.unit.recompute.test_replay_random_numbers import BODIES as RANDOM
from tests.unit.recompute.test_replay_random_numbers import holding_a_generator
from tests.unit.recompute.test_threads import backward_elsewhere

pytestmark = needs_library
ON_TWO = pytest.mark.parametrize("name", ["matmuls", "every second op"])
Body = Callable[[FunctionBlock, Tensor], Any]


def compared(build: Callable[[], Stack], chosen: dict[str, Any], **more: Any) -> Recorded:
    """`assert_same_with_library` under torch's checkpoint; without the module, torch would not restore its state."""
    return assert_same_with_library(
        build, selective(chosen), **{"entry": "context_fn with module", "ops": None, **more}
    )


@pytest.mark.parametrize("program", NATIVE)
def test_kinds_of_ops(program: str) -> None:
    compared(block_of(NATIVE[program]), POLICIES["matmuls"], ops=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nothing", "every second op"])
@pytest.mark.parametrize("program", NATIVE)
def test_kinds_of_ops_under_other_policies(program: str, name: str) -> None:
    compared(block_of(NATIVE[program]), POLICIES[name])


@pytest.mark.slow
@ON_TWO
@pytest.mark.parametrize("program", sorted(KINDS.keys() - {"either_branch"}))  # rerun cannot run `torch.cond`
def test_programs_of_replay(program: str, name: str) -> None:
    compared(block_of(KINDS[program]), POLICIES[name])


@pytest.mark.slow
@ON_TWO
@pytest.mark.parametrize("program", RANDOM)
def test_programs_that_draw(program: str, name: str) -> None:
    compared(holding_a_generator(RANDOM[program]), POLICIES[name])


@ON_TWO
@pytest.mark.parametrize(
    "function",
    [
        *(routes, draws_from_its_own, writes_late, inside),
        *(writes_to_its_own, writes_to_what_is_saved, writes_to_a_view_of_what_is_saved),
    ],
    ids=lambda one: one.__name__,
)
def test_programs_of_rerun(function: Body, name: str) -> None:
    compared(block_of(function), POLICIES[name])


@pytest.mark.parametrize("function", CHANGING)
def test_programs_that_differ_from_step_to_step(function: Body) -> None:
    compared(block_of(function), POLICIES["matmuls"], steps=5)


@ON_TWO
def test_nested_modules(name: str) -> None:
    compared(lambda: Stack(Nested(), Nested()), POLICIES[name])


def test_no_op_of_a_decoder_that_nothing_decides_on_comes_to_python() -> None:
    seen = compared(lambda: llama_stack(3), POLICIES["matmuls"], make_input=tokens, ops=40, entry="context_fn")
    assert min(seen.rerun[-3:]) >= 30


@pytest.mark.parametrize("backward", [backward_elsewhere, inputs_then_weights, gradient_penalty])
def test_backwards(backward: Callable[..., Any]) -> None:
    def smooth(block: FunctionBlock, x: Tensor) -> Tensor:
        h = F.dropout(x @ block.a, 0.3).view(4, 16).tanh()
        return h.reshape(8, 8).sin() @ block.b + h.exp().view(8, 8) * 0.1

    compared(lambda: Stack(FunctionBlock(smooth), FunctionBlock(smooth)), POLICIES["matmuls"], backward=backward)


def test_modules_that_are_saved_whole() -> None:
    """Their ops go to Python; those around them run in the library."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = block.part((x @ block.a).cos())
        return (F.dropout(h, 0.5).sin() @ block.b).sin() * block.part(h.tanh())

    def build() -> Stack:
        return Stack(*(FunctionBlock(body, part=Apply(lambda part, x: (x @ part.weight).sin())) for _ in range(2)))

    compared(build, policy(whole("part")), ops=5)
    compared(build, policy(whole("part", "alternate"), save("matmul", optional=True)), ops=1)


def test_torch_stops_out_of_the_library() -> None:
    """The last tensor that torch lacks is passed on before the next op, which does not run: see the Note's example."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return F.gelu(x @ block.a) @ block.b

    for native in (True, False):
        with with_library(native):
            plain = backward_ops(built(block_of(body)), square())
            model = install(built(block_of(body)), selective(policy(save("aten.mm"))), "context_fn")
            again = backward_ops(model, square())
        assert again.ops["aten.gelu.default"] - plain.ops["aten.gelu.default"] == 1
        assert again.ops["aten.mm.default"] == plain.ops["aten.mm.default"]


def test_python_and_the_library_sign_alike() -> None:
    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        return lucky(h.cos()) * (h.exp() @ block.b)

    compared(block_of(body), POLICIES["matmuls"], ops=1)


def test_objects_among_the_arguments_are_restored() -> None:
    """They are found in the frame of torch's function, wherever our mode is entered from."""

    def body(block: FunctionBlock, x: Tensor, state: Any) -> Tensor:
        state.count += 1
        return (x @ block.a).sin() * state.count @ block.b

    seen = []
    for native in (True, False):
        block, state = built(lambda: FunctionBlock(body)), SimpleNamespace(count=1)
        block.forward = lambda x, state, block=block: body(block, x, state)
        with with_library(native):
            contexts = sac.context_fn(POLICIES["matmuls"])
            for _ in range(2):
                (x,) = square()
                checkpoint(block, x, state, use_reentrant=False, context_fn=contexts).sum().backward()
        assert state.count == 3
        seen.append(gradients(block))
        torch.manual_seed(1)
    plain, state = built(lambda: FunctionBlock(body)), SimpleNamespace(count=1)
    for _ in range(2):
        (x,) = square()
        body(plain, x, state).sum().backward()
    assert_same(gradients(plain), seen[1])
    assert_same(gradients(plain), seen[0])


def test_another_value_is_found() -> None:
    """The same error: recomputation computes with another parameter than forward did."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        h = block.a @ (block.a if block.runs % 2 else block.b)  # runs are counted in both passes
        return x * (h.sin() * h.cos()) @ block.b

    rules = selective(policy({**save("attention"), "optional": True}))
    assert "in recomputation it is" in error_of(lambda: install(built(block_of(body)), rules, "context_fn"))


@pytest.mark.parametrize("in_recomputation", [False, True], ids=["in forward", "in recomputation"])
@pytest.mark.parametrize("fail", FAILURES, ids=lambda one: one.__name__)
def test_errors_leave_nothing_behind(fail: Body, in_recomputation: bool) -> None:
    """Neither a mode nor a hook is left, and the next step is right."""
    errors = (Stop, KeyboardInterrupt, RuntimeError, IndexError)
    with with_library():
        build = failing(fail)
        model = install(built(build), selective(POLICIES["matmuls"]), "context_fn")
        for _ in range(2):
            model(*square()).sum().backward()
        model.blocks[1].fails = not in_recomputation
        if in_recomputation:
            loss = model(*square()).sum()
            model.blocks[1].fails = True
            with pytest.raises(errors):
                loss.backward()
        else:
            with pytest.raises(errors):
                model(*square())
        assert not _get_current_dispatch_mode_stack()
        assert active_hooks() is None
        model.blocks[1].fails = False
        plain = built(build)
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(3)
            one(*square()).sum().backward()
    assert_same(gradients(plain), gradients(model))


@pytest.mark.parametrize("native", [True, False], ids=["library", "no library"])
def test_two_backwards_of_one_graph_at_once(native: bool) -> None:
    """They read different outputs, so that the locks of autograd's nodes do not keep them apart."""

    def body(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x
        for _ in range(4):
            h = ((h @ block.a).sin().exp().tanh() @ block.b).cos()
        return h.sin(), h.cos() * h.exp()

    block, x = built(lambda: FunctionBlock(body)), torch.randn(8, 8)

    def asked(outputs: tuple[Tensor, Tensor], gate: threading.Barrier) -> Callable[[int], tuple[Tensor, ...]]:
        losses = [outputs[0].sum(), outputs[1].square().sum()]

        def ask(which: int) -> tuple[Tensor, ...]:
            gate.wait()
            return torch.autograd.grad(losses[which], [block.a, block.b], retain_graph=True)

        return ask

    expected = [asked(block(x), threading.Barrier(1))(which) for which in range(2)]
    with with_library(native), ThreadPoolExecutor(2) as pool:
        contexts = sac.context_fn(POLICIES["matmuls"])
        for _ in range(20):
            outputs = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            for reference, found in zip(
                expected, pool.map(asked(outputs, threading.Barrier(2)), range(2)), strict=True
            ):
                assert all(torch.equal(a, b) for a, b in zip(reference, found, strict=True))


@pytest.mark.parametrize("native", [True, False], ids=["library", "no library"])
def test_what_a_region_outside_recomputes_is_recognised(native: bool) -> None:
    """An inner region fetches that before its own recomputation begins."""
    found = []

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        hooks = active_hooks()
        assert hooks is not None
        found.append(OuterPacked(None, hooks[1]).is_recomputed)
        return (x @ block.a).sin() @ block.b

    with with_library(native):
        for value in ({"mode": "full", "blocks": ["blocks.*"]}, selective(POLICIES["matmuls"], engine="rerun")):
            sac.apply(built(block_of(body)), value)(*square())
        sac.apply(built(block_of(body)), selective(POLICIES["matmuls"], engine="replay"))(*square())
        install(built(block_of(body)), selective(POLICIES["matmuls"]), "context_fn")(*square())
    assert found == [True] * 4


def test_a_graph_that_runs_as_it_is() -> None:
    """Dynamo's backend "eager" calls torch's checkpoint at run time: the library runs the region's ops."""

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        return ((x @ block.a).sin().exp() @ block.b).tanh()

    seen: dict[bool, dict[str, Tensor]] = {}
    for native in (True, False):
        torch._dynamo.reset()
        with with_library(native), recorded() as log:
            model = install(built(lambda: _Plain(body)), selective(POLICIES["matmuls"]), "context_fn")
            compiled = torch.compile(model, backend="eager")
            for _ in range(2):
                compiled(torch.ones(8, 8)).sum().backward()
        assert (sum(log.ops) > 0) == native
        seen[native] = gradients(model)
    plain = built(lambda: _Plain(body))
    for _ in range(2):
        plain(torch.ones(8, 8)).sum().backward()
    assert_same(gradients(plain), seen[True])
    assert_same(gradients(plain), seen[False])


class _Plain(Stack):
    """A stack of one block that Dynamo can trace."""

    def __init__(self, body: Body) -> None:
        super().__init__(_Traceable(body))


class _Traceable(torch.nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body
        self.a, self.b = (torch.nn.Parameter(torch.randn(8, 8) / 3) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)  # type: ignore[arg-type]
