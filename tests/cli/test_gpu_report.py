"""scripts/gpu_report: the page that it writes of its steps, with steps that only print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"

sys.path.insert(0, str(SCRIPTS))
import gpu_report  # noqa: E402
from gpu_report import Outcome, Step, page, run  # noqa: E402

sys.path.remove(str(SCRIPTS))

PYTHON = sys.executable
GOOD = Step("good", "Good", (PYTHON, "-c", "print('\\x1b[1mten\\x1b[0m of ten')"))
BAD = Step("bad", "Bad", (PYTHON, "-c", "import sys; print('one', flush=True); sys.exit('E  wrong')"))
ABSENT = Step("absent", "Absent", ("scripts/none",), "there is no scripts/none")
SEEN = {"GPU": "1 × NVIDIA H100", "torch": "2.13.0, CUDA 13.0"}

PAGE = """\
# On a GPU

`scripts/gpu_report`. Of 3 steps: 1 passed, 1 failed, 1 not available.

| | |
|---|---|
| GPU | 1 × NVIDIA H100 |
| torch | 2.13.0, CUDA 13.0 |

| step | status | time |
|---|---|---:|
| Good | passed | 0 s |
| Bad | failed: exit code 1 | 0 s |
| Absent | not available: there is no scripts/none | 0 s |

## Good: passed

`python -c 'print('"'"'\\x1b[1mten\\x1b[0m of ten'"'"')'`

````text
ten of ten
````

## Bad: failed

`python -c 'import sys; print('"'"'one'"'"', flush=True); sys.exit('"'"'E  wrong'"'"')'`: exit code 1

````text
one
E  wrong
````

## Absent: not available

`scripts/none`: there is no scripts/none
"""


def ran(step: Step, folder: Path, limit_s: float = 60) -> Outcome:
    return run(step, folder, limit_s, lambda line: None)


def test_the_whole_page(tmp_path: Path) -> None:
    outcomes = [ran(step, tmp_path) for step in (GOOD, BAD, ABSENT)]
    still = [Outcome(one.step, one.status, one.reason, 0.0, one.output, one.log) for one in outcomes]
    assert page(SEEN, still, "scripts/gpu_report") == PAGE


def test_a_step_that_does_not_end_or_begin_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_report, "EVERY_S", 0.1)
    told: list[str] = []
    forever = Step("forever", "Forever", (PYTHON, "-c", "import time; print('begun', flush=True); time.sleep(600)"))
    late = run(forever, tmp_path, 3, told.append)
    assert (late.status, late.reason) == ("failed", "it did not end within 3 s")
    assert late.output == "begun\n"
    assert told
    assert all(line.startswith("  forever: ") for line in told)
    lost = ran(Step("lost", "Lost", ("scripts/none",)), tmp_path)
    assert (lost.status, lost.reason) == ("failed", "it cannot be started: No such file or directory")


def test_of_a_long_output_the_middle_is_left_out_and_said(tmp_path: Path) -> None:
    outcome = ran(Step("long", "Long", (PYTHON, "-c", "for n in range(2000): print('line', n)")), tmp_path)
    text = page({}, [outcome], "x")
    assert f"line 99\n… 1500 lines are left out here; {tmp_path / 'long.log'} has all\nline 1600\n" in text
    assert text.endswith("line 1999\n````\n")


@pytest.mark.parametrize(("chosen", "status"), [([GOOD, ABSENT], 0), ([BAD, GOOD], 1)])
def test_every_step_runs_and_the_exit_code_tells_whether_one_failed(
    chosen: list[Step], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "steps", lambda *, toy: chosen)
    monkeypatch.setattr(gpu_report, "facts", lambda: SEEN)
    monkeypatch.setattr(gpu_report, "ROOT", tmp_path)
    out = tmp_path / "gpu.md"
    assert gpu_report.main(["--out", str(out)]) == status
    text = out.read_text(encoding="utf-8")
    assert all(f"## {step.title}: " in text for step in chosen)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[")] == [
        f"[{number}/2] {step.title}: {gpu_report._typed(step)}" for number, step in enumerate(chosen, 1)
    ]
    assert lines[-1] == f"page: {out}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_nothing_is_run(tmp_path: Path) -> None:
    out = tmp_path / "gpu.md"
    done = subprocess.run(
        [SCRIPTS / "gpu_report", "--out", out],
        env={**os.environ, "SAC_PYTHON": PYTHON},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.endswith("scripts/gpu_report: torch sees no CUDA device here, so nothing was run\n")
    assert not out.exists()


def test_the_steps_are_commands_of_this_repository() -> None:
    for step in gpu_report.steps(toy=True):
        script = next(ROOT / word for word in step.command if word.startswith("scripts/"))
        assert script.is_file() != bool(step.missing)
        if script.suffix == ".py" and not step.missing:
            text = script.read_text(encoding="utf-8")
            assert all(f'"{word}"' in text for word in step.command if word.startswith("--"))


def test_hardware_and_versions_are_found() -> None:
    found = gpu_report.facts()
    assert found["torch"].startswith(torch.__version__)
    assert "numpy " in found["packages"] or "transformers " in found["packages"]
    assert all(found[name] for name in ("driver", "Python", "CPU", "sac", "C++ library"))
