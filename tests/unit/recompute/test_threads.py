"""A region whose body forks threads is refused. Backward on another thread, and two that train: tests/dangers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
