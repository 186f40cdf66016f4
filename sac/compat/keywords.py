"""From the keywords of another system to the options of sac: one table for each function."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sac.config_keys import Reader
from sac.errors import ConfigError, Problem, SacError, listing, nearest


def _as_it_is(value: Any, place: str) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Keyword:
    """What a keyword of another system becomes: the option ``ours``, or none if that is empty; ``read`` as in ``Key``.

    A keyword that becomes an option of ``sac.checkpoint`` needs no ``read``: ``settings_of`` checks it.
    """

    ours: str = ""
    read: Reader = _as_it_is


def same(names: Iterable[str]) -> dict[str, Keyword]:
    """Return a table of keywords that have the same name and meaning here."""
    return {name: Keyword(name) for name in names}


def only(*legal: Any, found: str, expected: str = "", fix: str = "") -> Reader:
    """Return a reader that refuses all but some objects; ``{!r}`` in ``found`` stands for the value."""

    def read(value: Any, place: str) -> Any:
        if not any(value is one for one in legal):
            raise ConfigError(Problem(place, found.format(value), expected, fix=fix))
        return value

    return read


NO_DEBUG = Keyword(
    read=only(
        False,
        found="{!r} is not supported: errors of recomputation name the saved tensor without it",
        expected="false",
    )
)


def options_of(
    given: Mapping[Any, Any], keywords: Mapping[str, Keyword], where: str, legal: Sequence[str] = ()
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the options that ``given`` becomes, by their names here, and the problems of the rest.

    ``where`` is the prefix of a keyword in messages; ``legal``: the keywords that they list, by default all.
    """
    options: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        keyword, place = keywords.get(name), f"{where}.{name}"
        if keyword is None:
            legal = legal or (*keywords,)
            problems.append(Problem(place, "it is not known", listing(legal), nearest(str(name), legal)))
            continue
        try:
            read = keyword.read(value, place)
        except SacError as error:
            problems += error.problems
        else:
            options |= {keyword.ours: read} if keyword.ours else {}
    return options, problems


def raise_if(problems: Sequence[Problem]) -> None:
    """Raise ``ConfigError`` if there are problems."""
    if problems:
        raise ConfigError(problems)
