"""Running a script of this repository as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in this interpreter, on one thread if OMP_NUM_THREADS does not say otherwise; its exit status is the caller's to look at."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=False,
    )
