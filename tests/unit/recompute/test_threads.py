"""Backward on another thread, and two threads that train at once: no state of ours is shared between them.

torch's selective checkpoint passes these.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.blocks import (
    FULL,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    ways,
)
from tests.support.training import assert_same, built

VALUES = {
    "full": FULL,
    "attention and alternating matmuls": selective(policy(save("attention"), alternate("matmul"))),
    "everything": selective(policy(default="save")),
}
ON_EACH_WAY = pytest.mark.parametrize(("name", "entry"), ways(VALUES))
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def on_two_threads(work: Callable[[int], None]) -> None:
    """Run `work` with 0 and with 1, at once; what it raises fails the test."""
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            work(index)
        except BaseException as error:  # asserted on below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def train_steps(model: Stack, seed: int, gate: threading.Barrier | None, steps: int = 6) -> dict[str, Tensor]:
    """Train with a generator of its own, in step with the other threads."""
    generator = torch.Generator().manual_seed(seed)
    seen: dict[str, Tensor] = {}
    for index in range(steps):
        x = torch.randn(2, 8, 32, generator=generator)
        if gate is not None:
            gate.wait(timeout=60)
        model(x).square().mean().backward()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                seen[f"{index} {name}"] = parameter.grad.clone()
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return seen


@ON_EACH_WAY
def test_two_threads_train_two_models_at_once(name: str, entry: str) -> None:
    expected = [train_steps(built(llama_stack, seed=seed), seed, None) for seed in (1, 2)]
    models = [install(built(llama_stack, seed=seed), VALUES[name], entry) for seed in (1, 2)]
    gate = threading.Barrier(2)
    found: dict[int, dict[str, Tensor]] = {}

    def work(index: int) -> None:
        found[index] = train_steps(models[index], index + 1, gate)

    on_two_threads(work)
    for index in range(2):
        assert_same(expected[index], found[index])


FORKS = """
import os, sys, warnings
import torch
import sac
from tests.support.blocks import FunctionBlock, Stack, policy, save, selective

warnings.simplefilter("ignore")

@torch.jit.script
def sines(h, w):
    for _ in range(50):
        h = (h.cos() * 0.5 + w).sin()
    return h

@torch.jit.script
def forks(h, w):
    one = torch.jit.fork(sines, h, w)
    two = torch.jit.fork(sines, 2 * h, w)
    g = sines(h, w)
    return g + torch.jit.wait(one) + torch.jit.wait(two)

model = Stack(FunctionBlock(lambda block, x: forks(x @ block.a, block.b)))
model = sac.apply(model, selective(policy(save("matmul")), engine=sys.argv[1]))
for _ in range(3):
    try:
        model(torch.randn(8, 8))
    except RuntimeError as error:  # of the interpreter of TorchScript, around ours
        print("it failed", flush=True)
os._exit(0)  # torch may abort at exit if threads that it has forked have run Python
"""


@pytest.mark.parametrize("engine", ["replay", "rerun"])
def test_a_region_that_forks_is_refused(engine: str, tmp_path: Path) -> None:
    """Threads that TorchScript forks run their ops under our mode, in whatever order."""
    program = tmp_path / "forks.py"  # TorchScript reads the source of functions
    program.write_text(FORKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(program), engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 3 * "it failed\n"
