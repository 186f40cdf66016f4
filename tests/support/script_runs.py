"""Running a script of this repository as a user does, but in this process: to import torch anew takes seconds."""

from __future__ import annotations

import contextlib
import io
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import torch


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it as `__main__`; its exit status is for the caller. Exceptions that it does not catch pass through."""
    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    argv = [str(script), *arguments]
    status: object = 0
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(sys, "path", [str(script.parent), *sys.path]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        finally:
            torch.set_num_threads(threads)
    if isinstance(status, str):  # sys.exit("text") prints it and ends with 1
        err.write(f"{status}\n")
    return subprocess.CompletedProcess(argv, status if isinstance(status, int) else 1, out.getvalue(), err.getvalue())
