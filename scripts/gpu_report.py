"""The steps of ``scripts/gpu_report``, and the page that it writes of them.

Each step is a command. What it prints goes to a log and into the page, whether it passed or failed; a step that cannot
be run here has the reason. Nothing in a section is judged but the exit code.
"""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from bench_overhead import cpu_model

from sac.policy.read import bytes_text

ROOT = Path(__file__).resolve().parents[1]
NO_DEVICE = 3  # as scripts/test -m gpu
PASSED, FAILED, MISSING = "passed", "failed", "not available"
PACKAGES = ("triton", "transformers", "accelerate", "diffusers", "trl", "lightning", "torchao", "numpy")
EVERY_S = 30.0  # between two lines of progress
FIRST_LINES, LAST_LINES = 100, 400  # of a step's output, in the page
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Step:
    """A command to run from the root of the repository. ``missing``: why it cannot be run here; empty if it can."""

    key: str
    title: str
    command: tuple[str, ...]
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: ``status`` is one of PASSED, FAILED, MISSING, ``reason`` says why if it did not pass."""

    step: Step
    status: str
    reason: str = ""
    seconds: float = 0.0
    output: str = ""
    log: str = ""


def steps(*, toy: bool) -> list[Step]:
    """Return all steps, in their order; ``toy``: with tiny sizes."""
    python, small = sys.executable, ("--toy",) if toy else ()
    return [
        Step("tests", "Tests that need a GPU", ("scripts/test", "-m", "gpu")),
        _script("bench", "Step time and memory of each way to checkpoint", python, "bench_gpu.py", *small),
    ]


def _script(key: str, title: str, python: str, name: str, *arguments: str) -> Step:
    missing = "" if (ROOT / "scripts" / name).is_file() else f"there is no scripts/{name}"
    return Step(key, title, (python, f"scripts/{name}", *arguments), missing)


def run(step: Step, logs: Path, limit_s: float, say: Callable[[str], None]) -> Outcome:
    """Run a step, with a line of progress now and then; it fails if it does not end within ``limit_s`` seconds."""
    if step.missing:
        return Outcome(step, MISSING, step.missing)
    logs.mkdir(parents=True, exist_ok=True)
    log, started = logs / f"{step.key}.log", time.monotonic()
    environment = {**os.environ, "SAC_PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                step.command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        except OSError as error:
            return Outcome(step, FAILED, f"it cannot be started: {error.strerror}")
        code = _waited(process, limit_s, lambda passed: say(f"  {step.key}: {passed:.0f} s"))
    seconds = time.monotonic() - started
    output = _COLOURS.sub("", log.read_text(encoding="utf-8", errors="replace")).replace("\r", "\n")
    if code is None:
        return Outcome(step, FAILED, f"it did not end within {limit_s:g} s", seconds, output, str(log))
    return Outcome(step, FAILED if code else PASSED, f"exit code {code}" if code else "", seconds, output, str(log))


def _waited(process: subprocess.Popen[bytes], limit_s: float, passed: Callable[[float], None]) -> int | None:
    """Return the exit code, or None if the process had to be killed."""
    started = time.monotonic()
    while True:
        left = limit_s - (time.monotonic() - started)
        try:
            return process.wait(max(0.0, min(EVERY_S, left)))
        except subprocess.TimeoutExpired:
            if time.monotonic() - started >= limit_s:
                _kill(process)
                return None
            passed(time.monotonic() - started)
        except BaseException:
            _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # and the ranks and workers that it has started
    process.wait()


def facts() -> dict[str, str]:
    """Return the hardware and the versions that the steps run with."""
    gpus: dict[str, int] = {}
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        name = f"{found.name}, {bytes_text(found.total_memory)}, compute capability {found.major}.{found.minor}"
        gpus[name] = gpus.get(name, 0) + 1
    versions = []
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{package} {metadata.version(package)}")
    return {
        "GPU": "; ".join(f"{count} × {name}" for name, count in gpus.items()),
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}",
        "packages": ", ".join(versions),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        "CPU": f"{os.cpu_count()} cores of {cpu_model()}",
        "sac": _said("git", "describe", "--always", "--dirty", "--exclude", "*"),
    }


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def page(seen: dict[str, str], outcomes: Sequence[Outcome], command: str) -> str:
    """Return the page: hardware and versions, a row per step, and a section per step with what it printed."""
    counts = [f"{sum(one.status == kind for one in outcomes)} {kind}" for kind in (PASSED, FAILED, MISSING)]
    verdict = f"Of {len(outcomes)} steps: {', '.join(counts)}."
    lines = ["# On a GPU", "", f"`{command}`. {verdict}", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value.replace('|', '/')} |" for name, value in seen.items()]
    lines += ["", "| step | status | time |", "|---|---|---:|"]
    lines += [f"| {one.step.title} | {_verdict(one)} | {one.seconds:.0f} s |" for one in outcomes]
    for one in outcomes:
        lines += ["", f"## {one.step.title}: {one.status}", "", f"`{_typed(one.step)}`"]
        if one.reason:
            lines[-1] += f": {one.reason}"
        if one.output.strip():
            lines += ["", "````text", *_shortened(one), "````"]
    return "\n".join(lines) + "\n"


def _verdict(one: Outcome) -> str:
    return f"{one.status}: {one.reason}" if one.reason else one.status


def _typed(step: Step) -> str:
    """Return the command as one types it: the interpreter's path is of no use to a reader."""
    return shlex.join("python" if word == sys.executable else word for word in step.command)


def _shortened(one: Outcome) -> Iterator[str]:
    lines = [line.rstrip() for line in one.output.strip("\n").splitlines()]
    left_out = len(lines) - FIRST_LINES - LAST_LINES
    if left_out <= 0:
        yield from lines
        return
    yield from lines[:FIRST_LINES]
    yield f"… {left_out} lines are left out here; {one.log} has all"
    yield from lines[-LAST_LINES:]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/gpu_report", description=__doc__)
    keys = [step.key for step in steps(toy=False)]
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu.md", help="the page (docs/gpu.md)")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=keys, help=f"only these of {', '.join(keys)}")
    parser.add_argument("--toy", action="store_true", help="tiny sizes: that it works")
    parser.add_argument("--limit", type=float, default=3600, metavar="SECONDS", help="for one step (3600)")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("scripts/gpu_report: torch sees no CUDA device here, so nothing was run", file=sys.stderr)
        return NO_DEVICE
    if not given.out.parent.is_dir():
        parser.error(f"--out: there is no folder {given.out.parent}")
    chosen = [step for step in steps(toy=given.toy) if given.only is None or step.key in given.only]
    command = shlex.join(["scripts/gpu_report", *(sys.argv[1:] if argv is None else argv)])
    outcomes: list[Outcome] = []
    seen = facts()
    for number, step in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {step.title}: {_typed(step)}", flush=True)
        outcomes.append(run(step, ROOT / "out" / "gpu_report", given.limit, lambda line: print(line, flush=True)))
        print(f"  {_verdict(outcomes[-1])}, {outcomes[-1].seconds:.0f} s", flush=True)
        given.out.write_text(page(seen, outcomes, command), encoding="utf-8")  # what an interruption leaves is there
    print(f"page: {given.out}")
    return int(any(one.status == FAILED for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
