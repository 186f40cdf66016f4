"""Errors that a user of sac can cause, and the one shape in which each problem is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong: where it stands, what was found, what is legal, and what to do.

    ``where`` is ``file:line:column`` for something written in a file, the path of a module for something about a
    model, and the name of an argument otherwise. ``expected``, ``nearest`` and ``fix`` may be empty.
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
    """Root of every error that a user of sac can cause; ``problems`` holds all that was found, in order."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[SacError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class PolicyError(SacError, ValueError):
    """A policy (file or mapping) that cannot be read, or that names what does not exist."""


class ConfigError(SacError, ValueError):
    """A config value, or an argument of the public face, that means nothing to sac."""


class ModelError(SacError, ValueError):
    """A model that a policy or config cannot be put on; the model is left as it was."""


class PlanError(SacError, ValueError):
    """No plan can be made as asked: a budget that is too small, a model that cannot be profiled, an unknown device."""


class RegionError(SacError, RuntimeError):
    """A region that cannot be recomputed as it was run; raised in forward or backward."""


class SacWarning(UserWarning):
    """Something works, but not as its author will have meant it."""


def nearest(word: str, legal: Iterable[str]) -> str:
    """Return the legal word closest in spelling to ``word``, or ``""`` when none is close."""
    found = get_close_matches(word.lower(), {name.lower(): name for name in legal}, n=1, cutoff=0.6)
    return next((name for name in legal if found and name.lower() == found[0]), "")


def listing(words: Sequence[str], limit: int = 40) -> str:
    """Return ``words`` joined for an error's ``expected``, cut after ``limit`` of them."""
    shown = ", ".join(words[:limit])
    return shown if len(words) <= limit else f"{shown}, … ({len(words) - limit} more)"
