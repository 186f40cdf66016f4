"""Other accelerators (MPS, XPU, NPUs), by a simulated one: the same gradients, or an error that says why not."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.stacks.other_accelerator import VALUES
from tests.support.accelerator import compile_accelerator

pytestmark = pytest.mark.slow

SAID = """\
device: 'sim:0' cannot be measured
    legal: cpu, cuda, cuda:0, …
Stack: its parameters are on sim
    legal: cpu, cuda, meta
    fix: plan it on the CPU or on the meta device and name the GPU: device="h100"\
"""


def test_an_accelerator_that_is_neither_the_cpu_nor_cuda(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = compile_accelerator(tmp_path, shlex.split(compiler))
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.stacks.other_accelerator", str(library)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line for line in lines if "equal" in line] == [
        *(f"{name}{dtype}: equal" for dtype in ("", " in bfloat16") for name in VALUES),
        "named streams: equal",
    ]
    assert "\n".join(line for line in lines if "equal" not in line) == SAID
