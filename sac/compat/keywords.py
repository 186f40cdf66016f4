"""The keywords of other systems' functions: one table of readers for each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sac.config_keys import Reader
from sac.errors import ConfigError, Problem, SacError, listing, nearest


def only(*legal: Any, found: str, expected: str = "", fix: str = "") -> Reader:
    """Return a reader that refuses all but some objects; ``{!r}`` in ``found`` stands for the value."""

    def read(value: Any, place: str) -> Any:
        if not any(value is one for one in legal):
            raise ConfigError(Problem(place, found.format(value), expected, fix=fix))
        return value

    return read


NO_DEBUG = only(
    False, found="{!r} is not supported: errors of recomputation name the saved tensor without it", expected="false"
)


def read_keywords(given: Mapping[Any, Any], readers: Mapping[str, Reader], where: str) -> dict[str, Any]:
    """Return the values of ``given``, each read; ``where`` is the prefix of a keyword in messages.

    Raises ``ConfigError`` with all problems.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        place = f"{where}.{name}"
        if name not in readers:
            problems.append(Problem(place, "it is not known", listing([*readers]), nearest(str(name), readers)))
            continue
        try:
            values[name] = readers[name](value, place)
        except SacError as error:
            problems += error.problems
    raise_if(problems)
    return values


def raise_if(problems: Sequence[Problem]) -> None:
    """Raise ``ConfigError`` if there are problems."""
    if problems:
        raise ConfigError(problems)
