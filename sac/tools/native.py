"""`sac build` and `sac --version`: the C++ library that sac can use."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from sac.native.build import Built, Progress, build
from sac.native.load import decision, status
from sac.native.target import Target


def version_text() -> str:
    """Return the lines of ``sac --version``: the version of sac, and whether it uses its C++ library."""
    try:
        number = version("sac")
    except PackageNotFoundError:
        number = "(not installed)"  # found on the path, as in a checkout
    return f"sac {number}\n{status()}"


def check_library() -> int:
    """Print whether this process uses a library, and its file; return 1 if it does not."""
    found = decision()
    print(status())
    if found.file is not None:
        print(found.file)
    return 0 if found.module is not None else 1


def build_library(*, force: bool) -> int:
    """Compile the library if there is none yet, or if ``force``; progress goes to stderr."""
    built = build(_progress(), force=force)
    print(_result(built))
    print(status())
    return 0


def _result(built: Built) -> str:
    return f"built: {built.file}" if built.compiled else f"built already: {built.file}"


def _progress() -> Progress:
    """Return progress for people: lines, and on a terminal the seconds that have passed."""
    shown = sys.stderr.isatty()

    def compiling(target: Target, compiler: str) -> None:
        print(f"compiling for torch {target.torch} with {compiler}, which takes about a minute", file=sys.stderr)

    def elapsed(seconds: float) -> None:
        if shown:
            print(f"\r{seconds:4.0f} s\r", end="", file=sys.stderr, flush=True)

    return Progress(lambda: print("waiting for another process that compiles", file=sys.stderr), compiling, elapsed)
