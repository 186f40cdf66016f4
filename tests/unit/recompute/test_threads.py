"""A region whose body forks threads is refused. Backward on another thread, and two that train: tests/dangers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FORKS = """
import os, warnings
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

for engine in ("replay", "rerun"):
    model = Stack(FunctionBlock(lambda block, x: forks(x @ block.a, block.b)))
    sac.apply(model, selective(policy(save("matmul")), engine=engine))
    for _ in range(3):
        try:
            model(torch.randn(8, 8))
        except RuntimeError as error:  # of the interpreter of TorchScript, around ours
            print("it failed", flush=True)
os._exit(0)  # torch may abort at exit if threads that it has forked have run Python
"""


def test_a_region_that_forks_is_refused(tmp_path: Path) -> None:
    """Threads that TorchScript forks run their ops under our mode, in whatever order."""
    program = tmp_path / "forks.py"  # TorchScript reads the source of functions
    program.write_text(FORKS)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 6 * "it failed\n"
