"""Several threads record and replay at once, and a backward may run on another thread than its forward."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from sac.errors import SacWarning
from sac.recompute.native_recorder import NativeReplayFrame, NativeReplayRecorder
from tests.support.blocks import FunctionBlock, Stack, llama_stack, tokens
from tests.support.custom_ops import Wobble, wobble
from tests.support.native_engine import assert_same_with_library, needs_library, recorded, with_library
from tests.support.replay_programs import ON_EACH, POLICIES, applied, block_of, replay
from tests.support.training import assert_same, built
from tests.unit.recompute.test_threads import backward_elsewhere

pytestmark = needs_library
THREADS = 4


def body(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    for _ in range(5):
        h = (h.sin() * h.view(4, 16).cos().reshape(8, 8)).tanh()
    return (h * 2).add_(1) @ block.b


def gradients_of(model: Stack, seed: int, steps: int = 10) -> dict[str, Tensor]:
    """Gradients of steps whose inputs come from a generator of their own; `.grad` is not used."""
    generator = torch.Generator().manual_seed(seed)
    seen = {}
    for step in range(steps):
        x = torch.randn(8, 8, generator=generator)
        loss = model(x).square().sum()
        for (name, _), one in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            seen[f"{step} {name}"] = one
    return seen


def stack() -> Stack:
    return Stack(*(FunctionBlock(body) for _ in range(3)))


@ON_EACH
@pytest.mark.parametrize("is_shared", [False, True], ids=["models of their own", "one model"])
def test_threads_that_train_at_once(chosen: dict[str, Any], is_shared: bool) -> None:
    expected = [gradients_of(built(stack), seed) for seed in range(THREADS)]
    models = [applied(stack, replay(chosen)) for _ in range(1 if is_shared else THREADS)]
    gate = threading.Barrier(THREADS)

    def work(seed: int) -> dict[str, Tensor]:
        gate.wait()
        return gradients_of(models[seed % len(models)], seed)

    with with_library(), recorded() as seen, ThreadPoolExecutor(THREADS) as pool:
        ours = list(pool.map(work, range(THREADS)))
    for reference, one in zip(expected, ours, strict=True):
        assert_same(reference, one)
    assert min(seen.ops[-THREADS:]) > 20


def test_a_thread_that_records_and_one_that_does_not() -> None:
    """Ops of a thread without a region are not recorded while another thread is inside of one."""
    inside, done = threading.Event(), threading.Event()

    def waiting(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        if block.waits:
            inside.set()
            assert done.wait(60)
        return h.cos() @ block.b

    with with_library(), recorded() as seen, ThreadPoolExecutor(1) as pool:
        model = applied(block_of(waiting), replay(POLICIES["nothing"]))
        model.blocks[0].waits = False
        for _ in range(2):
            model(torch.randn(8, 8)).sum().backward()
        model.blocks[0].waits = True
        future = pool.submit(lambda: model(torch.randn(8, 8)))
        assert inside.wait(60)
        weight = torch.randn(8, 8, requires_grad=True)
        (weight @ weight).sin().sum().backward()
        done.set()
        future.result().sum().backward()
    assert seen.ops[-1] == seen.entries[-1] == seen.entries[-2]


@ON_EACH
def test_backward_on_another_thread(chosen: dict[str, Any]) -> None:
    assert_same_with_library(block_of(body), replay(chosen), backward=backward_elsewhere)


@ON_EACH
def test_two_backwards_of_one_graph_at_once(chosen: dict[str, Any]) -> None:
    """The replay releases the GIL: a second thread may ask for the same region meanwhile."""
    x = torch.randn(8, 8)
    reference = built(stack)
    loss = reference(x).square().sum()
    expected = torch.autograd.grad(loss, list(reference.parameters()))
    with with_library(), ThreadPoolExecutor(THREADS) as pool:
        model = applied(stack, replay(chosen))
        for _ in range(10):
            loss = model(x).square().sum()
            gate = threading.Barrier(THREADS)

            def ask(_: int, loss: Tensor = loss, gate: threading.Barrier = gate) -> tuple[Tensor, ...]:
                gate.wait()
                return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

            for found in pool.map(ask, range(THREADS)):
                assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_region_that_waits_for_a_thread() -> None:
    """What a thread computes that the region waits for is not part of the region."""

    def waiting(block: FunctionBlock, x: Tensor) -> Tensor:
        h = (x @ block.a).sin()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(
                lambda: (torch.ones(8, 8, requires_grad=True) @ torch.ones(8, 8)).sin().sum().backward()
            ).result()
        return h.cos() @ block.b

    assert_same_with_library(block_of(waiting), replay(POLICIES["nothing"]), ops=3)


def test_gradients_of_a_decoder_on_two_threads() -> None:
    with with_library(), ThreadPoolExecutor(2) as pool:
        torch.manual_seed(0)
        inputs = tokens()
        expected = built(llama_stack)
        expected(*inputs).square().sum().backward()
        models = [applied(llama_stack, replay(POLICIES["matmuls"])) for _ in range(2)]

        def work(model: Stack) -> None:
            for _ in range(5):
                model.zero_grad()
                model(*inputs).square().sum().backward()

        list(pool.map(work, models))
    for model in models:
        for one, other in zip(expected.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


@ON_EACH
def test_another_thread_waits_until_replayed_values_are_verified(chosen: dict[str, Any]) -> None:
    """They differ from those of the forward, which Python then computes anew."""

    def unsteady(block: FunctionBlock, x: Tensor) -> Tensor:
        Wobble.sign = 1.0
        h = wobble(x @ block.a)
        saved.append(h.detach().clone())
        return (h.sin() * x).cos() @ block.b

    hooks = NativeReplayFrame._saved_tensor_hooks
    different = NativeReplayRecorder.different
    calls: list[Any] = []
    saved: list[Tensor] = []
    found: list[Tensor] = []
    threads: list[threading.Thread] = []

    def noting_hooks(self: NativeReplayFrame) -> tuple[Any, Any]:
        pack, unpack = hooks(self)
        calls.append((unpack, self))
        return pack, unpack

    def reading_elsewhere(self: NativeReplayRecorder, values: list[tuple[int, Any]]) -> list[tuple[int, Tensor]]:
        if len(threads) == len(calls):  # one thread for each forward: it may run the region again, which verifies, too
            return different(self, values)
        unpack, frame = calls[-1]
        index = next(index for index, value in values if torch.allclose(value, saved[-1], atol=1e-3))
        wanted = frame._handles.get(index)
        threads.append(threading.Thread(target=lambda: found.append(unpack(wanted))))
        threads[-1].start()
        threads[-1].join(0.1)
        return different(self, values)

    with (
        with_library(),
        mock.patch.object(NativeReplayFrame, "_saved_tensor_hooks", noting_hooks),
        mock.patch.object(NativeReplayRecorder, "different", reading_elsewhere),
    ):
        model = applied(block_of(unsteady), replay(chosen, "always"))
        model(torch.randn(8, 8)).sum().backward()
        loss = model(torch.randn(8, 8)).sum()
        expected = saved[-1]
        Wobble.sign = -1.0
        with pytest.warns(SacWarning, match="is replayed with other values"):
            loss.backward(retain_graph=True)
        for thread in threads:
            thread.join()
    assert_same({"h": expected}, {"h": found[-1]})
