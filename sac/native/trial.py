"""A library is tried in a child process before it is first loaded, and the outcome is remembered by its content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sac.native.places import cache_directory, distrusted, make_private, package_directory
from sac.native.self_test import PASSED

TIMEOUT_S = 180.0  # the child imports torch, which may take a minute from a cold network file system
PROGRAM = Path(__file__).with_name("self_test.py")
_POLL_S = 0.1
_START = "import runpy, sys; sys.path[:] = {path!r}; runpy.run_path({program!r}, run_name='__main__')"

# Note [Trying a library]
#
# A library that is damaged, or fits another torch than its name says, can crash the process that loads it. So:
#  1. A child process loads it first and runs its self-test. If the child fails, dies or hangs, the library is not used.
#  2. The outcome is stored in a marker, a file named after the library and a hash of its content and the self-test. A
#     later process that finds it starts no child. Other content has no marker, whatever its name and time stamps are.
#  3. `sac build` makes the marker, so a process that may not write to the directory needs to write nothing. For a
#     library in a wheel the first process makes it, in the user's cache. If it cannot be stored, each process tries.
#  4. Processes that find no marker at the same time take turns, and those that waited find it.


class NotTriedError(Exception):
    """A library could not be tried, so nothing is known of it."""


def outcome(library: Path, digest: str) -> str:
    """Return why a library must not be loaded, ``""`` if it may be. Starts a child if that is not known yet."""
    marker = _marker(library)
    known = _read(marker)
    if known is None and marker is not None:  # Note [Trying a library], 4
        with turn(marker.with_name("self-test.lock"), 2 * TIMEOUT_S):
            known = _read(marker)
            if known is None:
                known = try_again(library, digest)
    return try_again(library, digest) if known is None else known


def try_again(library: Path, digest: str) -> str:
    """Try a library whatever is known of it, and remember the outcome if it can be stored. Returns it."""
    try:
        failure = try_in_child(library, digest)
    except NotTriedError as error:
        return str(error)  # this process or this machine is to blame, and not the library
    marker = _marker(library)
    if marker is not None:
        with contextlib.suppress(OSError):
            make_private(marker.parent)
            write_at_once(marker, json.dumps({"failure": failure}) + "\n")
    return failure


def try_in_child(library: Path, digest: str) -> str:
    """Run the self-test in a child process; return what went wrong, ``""`` if nothing did.

    Raises ``NotTriedError`` if there can be no child.
    """
    if not sys.executable:
        raise NotTriedError("its self-test cannot run: this process does not know its Python interpreter")
    # Isolated, so that no variable of the environment and no startup file changes what is tested; but the same torch.
    path = [one for one in sys.path if isinstance(one, str)]  # Python ignores the others too
    start = _START.format(path=path, program=str(PROGRAM))
    command = [sys.executable, "-I", "-c", start, str(library), digest]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"its self-test did not end within {TIMEOUT_S:.0f} s"
    except OSError as error:
        raise NotTriedError(f"its self-test cannot run: {error}") from error
    if run.returncode == 0 and PASSED in run.stdout:
        return ""
    if run.returncode < 0:
        return f"its self-test died of {_signal_name(-run.returncode)}"
    return f"its self-test failed: {last_line(run.stderr) or f'exit status {run.returncode}'}"


def last_line(text: str) -> str:
    """Return the last line with something on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


@contextlib.contextmanager
def turn(path: Path, patience_s: float, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock on a file, as one of all processes that want it; ``waiting()`` is called if another one holds it.

    The system releases the lock of a process that dies. Nothing is held where files cannot be locked (some network file
    systems, a directory that is not writable), or if the holder has not finished after ``patience_s``: the work is then
    done more than once, and each process puts a whole file into place.
    """
    try:
        make_private(path.parent)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        _lock(file, time.monotonic() + patience_s, waiting)
        yield
    finally:
        os.close(file)


def _lock(file: int, deadline: float, waiting: Callable[[], None]) -> None:
    import fcntl  # not on Windows, where nothing is locked

    told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        except OSError:
            return
        else:
            return
        if not told:
            waiting()
            told = True
        time.sleep(_POLL_S)


def write_at_once(path: Path, text: str) -> None:
    """Write a file so that no other process ever sees a part of it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # an administrator's cache is read by others; the directory says by whom
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def forget(library: Path) -> None:
    """Remove the markers of a library's file, whatever its content was."""
    with contextlib.suppress(OSError):
        for old in library.parent.glob(f"{library.name}.*.tested"):
            old.unlink(missing_ok=True)


def _marker(library: Path) -> Path | None:
    """Return the path of the marker; None if there is no directory for it."""
    directory = cache_directory() if library.parent == package_directory() else library.parent
    if directory is None:
        return None
    content = hashlib.sha256(library.read_bytes() + PROGRAM.read_bytes())
    return directory / f"{library.name}.{content.hexdigest()[:16]}.tested"


def _read(marker: Path | None) -> str | None:
    """Return the outcome in a marker; None if there is none that can be relied on."""
    if marker is None:
        return None
    try:
        if distrusted(marker.parent) or distrusted(marker):
            return None
        failure = json.loads(marker.read_text(encoding="utf-8"))["failure"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return failure if isinstance(failure, str) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
