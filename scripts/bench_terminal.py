"""What the benchmarks of this folder print, and what they say of where they ran."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Progress = Callable[[int, int, str], None]


def environment(script: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "command": shlex.join([".venv/bin/python", f"scripts/{script}", *sys.argv[1:]]),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def hardware(device: str) -> dict[str, Any]:
    """What the steps ran on, and the versions that matter in addition to torch's."""
    versions = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions["torch_remat"] = metadata.version("torch_remat")
    if device != "cuda":
        return {"device": "cpu", **versions}
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "device": properties.name,
        "device_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        **versions,
    }


def print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """The first column names the row; the others are numbers."""
    from sac.tools.render import print_rows

    print_rows(columns, rows, right=columns[1:])


def print_skipped(reasons: dict[str, str]) -> None:
    """Each way that cannot run, and why, in lines of a terminal's width."""
    for mode, reason in reasons.items():
        print(textwrap.fill(f"{mode} {reason}", width=100, subsequent_indent="    ", break_on_hyphens=False))


@contextlib.contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Progress]:
    """A bar after two seconds, where somebody looks at stderr."""
    if quiet:
        yield lambda done, total, label: None
        return
    from sac.tools.render import progress_bar

    with progress_bar() as progress:
        yield progress


def counting(progress: Progress, total: int) -> Callable[[str], None]:
    """One more of `total` steps is done, each time that it is called with what was done."""
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, label)

    return advance
