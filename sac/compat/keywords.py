"""The keywords of other systems' functions: one table of readers for each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sac.config_keys import Reader
from sac.errors import ConfigError, Problem, SacError, listing, nearest


def as_it_is(value: Any, place: str) -> Any:
    """Return ``value``: a reader of what is checked elsewhere."""
    return value


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


def read_keywords(
    given: Mapping[Any, Any], readers: Mapping[str, Reader], where: str, legal: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values of ``given``, each read, and the problems of the others; ``legal``: the keywords in messages.

    ``where`` is the prefix of a keyword in messages.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        place, legal = f"{where}.{name}", legal or (*readers,)
        if name not in readers:
            problems.append(Problem(place, "it is not known", listing(legal), nearest(str(name), legal)))
            continue
        try:
            values[name] = readers[name](value, place)
        except SacError as error:
            problems += error.problems
    return values, problems


def raise_if(problems: Sequence[Problem]) -> None:
    """Raise ``ConfigError`` if there are problems."""
    if problems:
        raise ConfigError(problems)
