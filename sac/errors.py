"""Errors that a user of sac can cause, and the common format of each reported problem."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

_NOT_THE_USERS = (str(Path(__file__).parent), f"{os.sep}torch{os.sep}")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its location, what was found, what is legal, and how to fix it.

    ``where`` is ``file:line:column`` for a file, a module path for a model, and otherwise the name of an argument.
    ``expected``, ``nearest`` and ``fix`` may be empty.
    """

    where: str
    found: str
    expected: str = ""
    nearest: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.found}" if self.where else self.found]
        if self.nearest:
            lines.append(f"    did you mean: {self.nearest}")
        if self.expected:
            lines.append(f"    legal: {self.expected}")
        if self.fix:
            lines.append(f"    fix: {self.fix}")
        return "\n".join(lines)


class SacError(Exception):
    """Base class of every error that a user of sac can cause; ``problems`` holds all problems found, in order."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[SacError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class PolicyError(SacError, ValueError):
    """A policy (file or mapping) cannot be read, or refers to names that do not exist."""


class ConfigError(SacError, ValueError):
    """A config value, or an argument of the public API, is invalid."""


class ModelError(SacError, ValueError):
    """A policy or config cannot be applied to the model; the model is unchanged."""


class PlanError(SacError, ValueError):
    """No plan can be computed: the budget is too small, the model cannot be profiled, or the device is unknown."""


class TooSmallError(PlanError):
    """The budget is below the least peak, ``least`` bytes."""

    least = 0


class RegionError(SacError, RuntimeError):
    """A region cannot be recomputed as it ran in forward; raised in forward or backward."""


class SacWarning(UserWarning):
    """Something works, but probably not as intended."""


def warn(problem: Problem | str) -> None:
    """Warn of a problem, at the innermost line that is neither sac's nor torch's."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _NOT_THE_USERS):
        frame, level = frame.f_back, level + 1
    warnings.warn(str(problem), SacWarning, stacklevel=level)


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return the legal word closest in spelling to ``word``, or ``""`` when none is close."""
    close = get_close_matches(word.lower(), {name.lower(): name for name in legal}, n=3, cutoff=0.6)
    close.sort(key=lambda name: sorted(name) != sorted(word.lower()))  # letters in another order come first
    return next((name for name in legal if close and name.lower() == close[0]), "")


def listing(words: Sequence[str], limit: int = 40) -> str:
    """Return ``words`` joined by commas for an error's ``expected``, truncated after ``limit`` words."""
    shown = ", ".join(words[:limit])
    return shown if len(words) <= limit else f"{shown}, … ({len(words) - limit} more)"
