"""Compile the library for the torch and the Python of this process, into the cache directory or for a wheel."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sac.errors import Problem, SacError
from sac.native.places import CACHE_VARIABLE, cache_directory, distrusted, make_private, package_directory
from sac.native.target import SOURCES, Target, flags, this_target, torch_folder, unsupported
from sac.native.trial import NotTriedError, forget, outcome, try_again, try_in_child, turn, write_at_once

COMMAND = "sac build"
COMPILERS = ("c++", "g++", "clang++")
_LOG_LINES = 12
_PATIENCE_S = 1800.0  # for another process that compiles
_POLL_S = 0.2
_INSTALL_COMPILER = "apt install g++, dnf install gcc-c++ or conda install gxx; on macOS xcode-select --install"


class BuildError(SacError, RuntimeError):
    """The library cannot be compiled, or does not work once compiled. sac works without it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a build reports while it runs: that another process compiles, that it compiles, the seconds since then."""

    waiting: Callable[[], None] = lambda: None
    compiling: Callable[[Target, str], None] = lambda target, compiler: None
    elapsed: Callable[[float], None] = lambda seconds: None


@dataclass(frozen=True, slots=True)
class Built:
    """A library that works: its file, and whether this call compiled it."""

    file: Path
    compiled: bool


def build(progress: Progress, *, force: bool = False) -> Built:
    """Have a library for this process in the cache directory, and remember that it has passed its self-test.

    Nothing is compiled if one that was installed with sac works, unless ``force``. Of several processes that call this
    at once, one compiles and the others wait for it. Raises ``BuildError``.
    """
    _check_supported()
    target = this_target()
    installed = package_directory() / target.file_name
    if not force and installed.exists() and not outcome(installed, target.digest):
        return Built(installed, compiled=False)
    file = _cache() / target.file_name
    before = _identity(file)
    with turn(file.with_suffix(".lock"), _PATIENCE_S, progress.waiting):
        now = _identity(file)
        compiled = now is None or (force and now == before)  # if it has changed, another process has built it just now
        if compiled:
            forget(file)
            compile_library(target, file, progress)
        _check_file(file)
        failure = try_again(file, target.digest) if compiled else outcome(file, target.digest)
        if failure and not compiled:
            failure = try_again(file, target.digest)  # what failed once may have been the machine
    if failure:
        raise BuildError(Problem(str(file), failure, fix=_after_failure(compiled)))
    return Built(file, compiled)


def build_for_package(directory: Path) -> Path:
    """Compile the library into a directory from which a wheel is made; return its file. Raises ``BuildError``."""
    _check_supported()
    target = this_target()
    file = directory / target.file_name
    compile_library(target, file, Progress())
    try:
        failure = try_in_child(file, target.digest)
    except NotTriedError as error:
        failure = str(error)
    if failure:
        raise BuildError(Problem(str(file), failure, fix="build the wheel without SAC_BUILD_NATIVE=1"))
    return file


def compile_library(target: Target, file: Path, progress: Progress) -> None:
    """Compile the sources into ``file``, which appears at once when it is whole. Raises ``BuildError``."""
    compiler = find_compiler()
    _check_headers()
    _check_standard(compiler)
    progress.compiling(target, shlex.join(compiler))
    _remove_leftovers(file)
    try:
        handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=_temporary_prefix(file), suffix=".tmp")
    except OSError as error:
        raise _cannot_write(file.parent, error) from error
    os.close(handle)
    try:
        status, output = _run([*compiler, *arguments(target, temporary)], progress.elapsed)
        if status:
            raise _compile_error(file, compiler, status, output)
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def arguments(target: Target, output: str) -> list[str]:
    """Return the arguments of the compiler: those of torch's own ``cpp_extension``, for one source file."""
    includes, libraries = _torch_paths()
    words = [*flags(), f'-DSAC_SOURCES="{target.digest}"']
    for path in (*includes, *_python_includes()):
        words += ["-isystem", path]
    words += [str(SOURCES / "module.cpp"), "-o", output, *(f"-L{path}" for path in libraries)]
    return [*words, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler: that of ``CXX``, or the first of ``COMPILERS`` on ``PATH``."""
    if given := os.environ.get("CXX", "").strip():
        command = shlex.split(given)
        if shutil.which(command[0]) is None:
            found = f"there is no program {command[0]}, which CXX names"
            raise BuildError(Problem(COMMAND, found, fix="name a C++ compiler, or unset CXX"))
        return command
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    found = f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH"
    raise BuildError(Problem(COMMAND, found, fix=f"install one ({_INSTALL_COMPILER}), or name yours: CXX=… {COMMAND}"))


# -- What has to be there


def _check_supported() -> None:
    if reason := unsupported():
        raise BuildError(Problem(COMMAND, f"no library can be built: {reason}"))
    if not (SOURCES / "module.cpp").is_file():
        found = f"the sources are missing: {SOURCES} has no module.cpp"
        raise BuildError(Problem(COMMAND, found, fix="install sac again"))


def _check_headers() -> None:
    if not any(Path(path, "Python.h").is_file() for path in _python_includes()):
        found = f"the headers of Python are missing: no Python.h in {_python_includes()[0]}"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        fix = f"apt install python{version}-dev (python3-dev for the system's Python) or dnf install python3-devel"
        raise BuildError(Problem(COMMAND, found, fix=fix))
    includes, _ = _torch_paths()
    if not any(Path(path, "ATen", "ATen.h").is_file() for path in includes):
        found = f"the headers of torch are missing: no ATen/ATen.h in {includes[0]}"
        raise BuildError(
            Problem(COMMAND, found, fix="install torch from its wheel, which has them (pip install torch)")
        )


def _check_standard(compiler: Sequence[str]) -> None:
    """Refuse a compiler that does not know C++20 before it is given a minute of work."""
    status, output = _run([*compiler, "-std=c++20", "-fsyntax-only", "-x", "c++", os.devnull])
    if status:
        found = f"{shlex.join(compiler)} does not compile C++20: {(output.strip().splitlines() or ['no output'])[-1]}"
        fix = f"install g++ 11, clang 14 or newer ({_INSTALL_COMPILER}), or name another one: CXX=… {COMMAND}"
        raise BuildError(Problem(COMMAND, found, fix=fix))


def _torch_paths() -> tuple[list[str], list[str]]:
    """Return the directories of torch's headers and libraries."""
    try:
        from torch.utils.cpp_extension import include_paths, library_paths  # conda's torch has them elsewhere
    except ImportError:  # it needs setuptools
        include = torch_folder("include")
        return [str(include), str(include / "torch" / "csrc" / "api" / "include")], [str(torch_folder("lib"))]
    return include_paths(), library_paths()


def _python_includes() -> list[str]:
    return list(dict.fromkeys(sysconfig.get_path(name, scheme="posix_prefix") for name in ("include", "platinclude")))


# -- The directory


def _cache() -> Path:
    """Return the cache directory, made if necessary; raises ``BuildError`` if libraries in it would not be loaded."""
    directory = cache_directory()
    if directory is None:
        found = "there is no directory for the library: the user has no home"
        raise BuildError(Problem(COMMAND, found, fix=f"name one: {CACHE_VARIABLE}=… {COMMAND}"))
    try:
        make_private(directory)
        reason = distrusted(directory)
    except OSError as error:
        raise _cannot_write(directory, error) from error
    if reason:
        raise BuildError(Problem(COMMAND, reason, fix=f"name another directory: {CACHE_VARIABLE}=… {COMMAND}"))
    return directory


def _check_file(file: Path) -> None:
    if reason := distrusted(file):
        raise BuildError(Problem(COMMAND, reason, fix=f"build it again: {COMMAND} --force"))


def _cannot_write(directory: Path, error: OSError) -> BuildError:
    found = f"{directory} cannot be written: {error.strerror}"
    return BuildError(Problem(COMMAND, found, fix=f"name a directory of yours: {CACHE_VARIABLE}=… {COMMAND}"))


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _temporary_prefix(file: Path) -> str:
    return f".{file.stem}.{socket.gethostname()}."


def _remove_leftovers(file: Path) -> None:
    """Remove the files of killed builds of this library on this machine; no other process compiles now."""
    for old in file.parent.glob(f"{_temporary_prefix(file)}*.tmp"):
        with contextlib.suppress(OSError):
            if time.time() - old.stat().st_mtime > _PATIENCE_S:
                old.unlink()


# -- Running the compiler


def _run(command: Sequence[str], elapsed: Callable[[float], None] = lambda seconds: None) -> tuple[int, str]:
    """Run a command; return its exit status and output. What it has started ends with it if this is interrupted."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            return 127, f"{command[0]}: {error.strerror}"
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
                elapsed(time.monotonic() - started)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        output.seek(0)
        return process.returncode, output.read().decode(errors="replace")


def _compile_error(file: Path, compiler: Sequence[str], status: int, output: str) -> BuildError:
    log = file.with_suffix(".log")
    with contextlib.suppress(OSError):
        write_at_once(log, output)
    last = "\n".join(f"    | {line}" for line in output.rstrip().splitlines()[-_LOG_LINES:])
    found = f"{shlex.join(compiler)} ended with status {status}; the end of its output:\n{last}"
    return BuildError(Problem(COMMAND, found, fix=f"the whole output is in {log}; sac works without the library"))


def _after_failure(compiled: bool) -> str:
    return "sac works without the library" if compiled else f"{COMMAND} --force builds it again"
