"""What ``scripts/gpu_report`` does: runs the tests that need a GPU and the benchmark, and writes a page of both."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_overhead import cpu_model

from sac.tables import bytes_text

ROOT = Path(__file__).resolve().parents[1]
NO_DEVICE = 3  # as scripts/test -m gpu
PACKAGES = ("triton", "transformers", "accelerate", "diffusers", "trl", "lightning", "torchao", "numpy")
STEPS = {
    "Tests that need a GPU": ("scripts/test", "-m", "gpu"),
    "Step time and memory of each way to checkpoint": (sys.executable, "scripts/bench_gpu.py"),
}
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(command: tuple[str, ...], limit_s: float) -> tuple[str, str]:
    """Run a command; return "passed" or why it failed, and what it printed."""
    environment = {**os.environ, "SAC_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = f"FAILED: exit code {process.returncode}" if process.returncode else "passed"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # and the ranks and workers that it has started
        output, _ = process.communicate()
        status = f"FAILED: it did not end within {limit_s:g} s"
    return status, COLOURS.sub("", output.decode(errors="replace")).replace("\r", "\n").strip("\n")


def facts() -> dict[str, str]:
    """Return the hardware and the versions that the steps run with."""
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    versions = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return {
        "GPU": "; ".join(f"{one.name}, {bytes_text(one.total_memory)}" for one in devices),
        "driver": answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "packages": ", ".join(versions),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "CPU": f"{os.cpu_count()} cores of {cpu_model()}",
        "sac": answer("git", "describe", "--always", "--dirty", "--exclude", "*"),
    }


def answer(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_report", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md", help="the page (docs/gpu.md)")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for one step (3600)")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("scripts/gpu_report: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return NO_DEVICE
    rows, sections = [], []
    for title, command in STEPS.items():
        typed, started = shlex.join("python" if word == sys.executable else word for word in command), time.monotonic()
        print(f"{title}: {typed}", flush=True)
        status, output = run(command, given.limit)
        print(f"  {status}, {time.monotonic() - started:.0f} s", flush=True)
        rows.append(f"| {title} | {status} | {time.monotonic() - started:.0f} s |")
        sections += ["", f"## {title}: {status}", "", f"`{typed}`", "", "````text", output, "````"]
    page = ["# On a GPU", "", f"`{shlex.join(['scripts/gpu_report', *sys.argv[1:]])}`", "", "| | |", "|---|---|"]
    page += [f"| {name} | {value.replace('|', '/')} |" for name, value in facts().items()]
    page += ["", "| step | status | time |", "|---|---|---:|", *rows, *sections]
    given.out.write_text("\n".join(page) + "\n", encoding="utf-8")
    print(f"page: {given.out}")
    return int(any("FAILED" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
