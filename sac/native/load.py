"""Whether this process uses the C++ library: decided once, at the first question. Nothing is ever compiled here."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from sac.native.places import cache_directory, distrusted, package_directory
from sac.native.self_test import check_built_for, load_file
from sac.native.target import MODULE, Target, this_target, unsupported
from sac.native.trial import last_line, outcome

VARIABLE = "SAC_NATIVE"
_OFF = ("0", "false", "no", "off")
_BUILD = "(run `sac build`)"


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether there is a library for this process. ``module`` is None if there is none; ``reason`` says why."""

    module: ModuleType | None
    reason: str
    file: Path | None = None


# The decision of this process, and of what it forks. The lock belongs to one process: a thread of the parent may hold
# the one that a fork copies.
_decided: Decision | None = None
_locks: dict[int, threading.Lock] = {}


def library() -> ModuleType | None:
    """Return the C++ library, or None if this process runs without one; ``status`` says why.

    The first call decides for the whole process. It may start a child process that tests the library (once per library
    and user). An error is never raised: what is wrong with a library keeps it off.
    """
    return (_decided or decision()).module


def status() -> str:
    """Return one line that says whether the library is on, and for which torch; or why it is off."""
    found = decision()
    return f"native: on, {found.reason}" if found.module is not None else f"native: off, {found.reason}"


def decision() -> Decision:
    """Return the decision of this process, and make it first if this is the first question."""
    global _decided
    if _decided is None:
        with _locks.setdefault(os.getpid(), threading.Lock()):
            if _decided is None:
                _decided = decide()
    return _decided


def decide() -> Decision:
    """Look for a library that fits this process, and load it if it may be loaded."""
    if os.environ.get(VARIABLE, "").lower() in _OFF:
        return Decision(None, f"{VARIABLE}={os.environ[VARIABLE]}")
    if reason := unsupported():
        return Decision(None, reason)
    refused: list[str] = []
    others: list[Target] = []
    try:
        target = this_target()
    except OSError as error:
        return Decision(None, f"{error.filename or 'a file'} cannot be read: {error.strerror}")
    for place in (package_directory(), cache_directory()):
        try:
            if place is not None and (place / target.file_name).exists():
                file = place / target.file_name
                module, reason = _open(file, target)
                if module is not None:
                    return Decision(module, f"built for torch {target.torch}", file)
                refused.append(reason)
            elif place is not None:
                others += filter(None, map(Target.of_file, place.glob(f"{MODULE}-*.so")))
        except OSError as error:
            refused.append(f"{error.filename or place} cannot be read: {error.strerror}")
    if refused:
        return Decision(None, refused[0])
    if others:
        return Decision(None, f"{target.difference(max(others, key=target.likeness))} {_BUILD}")
    return Decision(None, f"not built {_BUILD}")


def _open(file: Path, target: Target) -> tuple[ModuleType | None, str]:
    """Return the library in a file, or None and why it is not loaded. Raises ``OSError`` if it cannot be read."""
    if file.parent != package_directory():
        for path in (file.parent, file):
            if reason := distrusted(path):
                return None, reason
    if reason := outcome(file, target.digest):
        return None, f"{reason} ({file}; `sac build --force` builds it again)"
    try:
        module = load_file(str(file))
        check_built_for(module, target.digest)
        reason = module.wrap_interpreter()
    except Exception as error:  # it has passed in a child, so this is a difference between the two processes
        return None, f"{file} cannot be loaded: {last_line(str(error)) or type(error).__name__}"
    return (None, reason) if reason else (module, "")
