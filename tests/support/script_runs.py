"""Running a script of this repository as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_script(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in this interpreter, on one thread unless OMP_NUM_THREADS is set; its exit status is for the caller."""
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        check=False,
    )
