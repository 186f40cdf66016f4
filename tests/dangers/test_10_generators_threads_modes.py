"""Generators, threads and modes: recomputation finds those of the forward, and leaves those of the backward alone.

Streams of trackers are in tests/unit/region/test_rng.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.blocks import FunctionBlock, Stack
from tests.support.oracle import assert_exact, assert_replayed_exactly, built_model, on_every_way
from tests.support.programs import CATALOGUE, WIDTH, Block, HalvedProducts, Program, programs
from tests.support.training import assert_same, built
from tests.support.ways import NONE, POLICIES, WAYS

# -- Generators


def twice_with_draws_between(loss: Tensor, inputs: list[Tensor], parameters: list[nn.Parameter]) -> list[Tensor]:
    """What the training draws is not drawn from a generator that recomputation has moved."""
    loss.backward(retain_graph=True)
    between = torch.rand(3)
    loss.backward()
    return [between, torch.rand(3)]


@on_every_way([each for each in programs("random") if not each.between])
def test_generators_in_recomputation_and_after_it(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy, steps=2, backward=twice_with_draws_between)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_needs_no_comparison_to_draw_the_same(policy: str) -> None:
    for program in programs("random"):
        assert_replayed_exactly(program, policy, blocks=1, steps=2)


class CountsAll(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", ["full", "checkpoint"])
def test_a_mode_around_a_region_sees_no_bookkeeping(way: str) -> None:
    def ops(chosen: Any) -> list[str]:
        model = built_model(CATALOGUE["generator_of_a_module"], chosen)
        for _ in range(2):
            with CountsAll() as mode:
                model(torch.randn(WIDTH, WIDTH, requires_grad=True))
        return [name for name in mode.names if "detach" not in name]

    assert ops(WAYS[way]) == ops(NONE)


# -- Threads and modes


def on_another_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def backward_elsewhere(loss: Tensor, *_: Any) -> list[Tensor]:
    def work() -> list[Tensor]:
        loss.backward()
        return []

    return on_another_thread(work)  # type: ignore[no-any-return]


def backward_under_other_modes(loss: Tensor, *_: Any) -> list[Tensor]:
    one = torch.ones((), dtype=loss.dtype)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        torch.autograd.backward(loss, one)
    return []


def device_of_the_forward(block: Block, x: Tensor) -> Tensor:
    """On another device it fails."""
    return block.down(block.up(x).sin() * torch.arange(float(WIDTH)))


SURROUNDED = [*(CATALOGUE[n] for n in ("autocast_around", "torch_function_mode_around", "two_dropouts", "llama_block"))]
DEVICE = Program("device_of_the_forward", device_of_the_forward, around=lambda: torch.device("cpu"))


@on_every_way([*SURROUNDED, DEVICE])
def test_backward_on_another_thread(program: Program, way: str, policy: str) -> None:
    """Autocast, function modes and grad mode are states of the thread."""
    assert_exact(program, way, policy, steps=2, backward=backward_elsewhere)


@on_every_way([*SURROUNDED[1:3], DEVICE], "full", "auto", "replay", "served rerun", "checkpoint")
def test_backward_under_other_modes(program: Program, way: str, policy: str) -> None:
    assert_exact(program, way, policy, steps=2, backward=backward_under_other_modes)


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("way", ["auto", "replay"])
def test_an_op_of_a_traced_function_under_a_mode(way: str) -> None:
    """No function is called there that the mode would see."""
    sine = torch.jit.trace(lambda x: torch.sin(x), torch.ones(2, 2))
    program = Program("traced", lambda block, x: block.down(sine(x) * block.up(x)), around=HalvedProducts)
    assert_exact(program, way, "matmuls", steps=2)


@contextlib.contextmanager
def innermost_mode(mode: Any) -> Iterator[None]:
    with torch.device("cpu"), mode():
        yield


def backward_through_the_innermost_mode(loss: Tensor, *_: Any) -> list[Tensor]:
    """A method called on a tensor goes through the mode, which is off meanwhile."""
    assert SURROUNDED[1].around is not None
    with innermost_mode(SURROUNDED[1].around):
        loss.backward()
    return []


@pytest.mark.parametrize("way", ["full", "auto", "replay", "served rerun", "checkpoint"])
def test_backward_called_through_a_function_mode(way: str) -> None:
    assert_exact(SURROUNDED[1], way, "matmuls", steps=2, backward=backward_through_the_innermost_mode)


class SaysCosine(Tensor):
    """A subclass that gives other results for functions."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = {torch.Tensor.sin: torch.Tensor.cos, torch.cos: torch.sin}
        return super().__torch_function__(others.get(func, func), types, args, kwargs)


@pytest.mark.filterwarnings("error::sac.errors.SacWarning")
@pytest.mark.parametrize("turns_off", [True, False])
@pytest.mark.parametrize("way", ["full", "auto", "replay", "served rerun", "checkpoint"])
def test_backward_called_on_a_subclass(way: str, turns_off: bool) -> None:
    """torch turns subclasses off while `backward` is called on one."""

    def gradients(put: Callable[[Stack], Any]) -> dict[str, Tensor]:
        model = built(lambda: Stack(FunctionBlock(lambda block, x: (x @ block.a).sin() * x.sin().exp())))
        put(model)
        torch.manual_seed(1)
        x = torch.randn(8, 8).as_subclass(SaysCosine).requires_grad_()
        loss = model(x).sum()
        (loss if turns_off else loss.as_subclass(Tensor)).backward()
        return {"input": x.grad.as_subclass(Tensor), "a": model.blocks[0].a.grad.as_subclass(Tensor)}

    assert_same(gradients(lambda model: None), gradients(lambda model: WAYS[way].put(model, POLICIES["matmuls"])))


@pytest.mark.parametrize("way", ["full", "auto", "served rerun"])
def test_two_threads_run_one_model_at_once(way: str) -> None:
    program = CATALOGUE["two_products"]
    model, reference = built_model(program, WAYS[way], "matmuls"), built_model(program)
    inputs = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    gate, found = threading.Barrier(2), {}

    def work(index: int, of: nn.Module = model) -> Any:
        return torch.autograd.grad(of(inputs[index]).square().sum(), list(of.parameters()))

    def steps(index: int) -> None:
        for step in range(4):
            gate.wait(timeout=60)
            found[index, step] = work(index)

    threads = [threading.Thread(target=steps, args=(index,)) for index in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    for index in range(2):
        expected = work(index, reference)
        assert all(torch.equal(*pair) for step in range(4) for pair in zip(expected, found[index, step], strict=True))
