"""Patterns over dotted module paths, used by rules and regions to select modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

MAX_LENGTH = 20_000
MAX_ALTERNATIVES = 1_000
ANY_SEGMENTS = "**"
_INNERMOST_BRACES = re.compile(r"\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class PathPattern:
    """A pattern over module paths such as ``self_attn.q_proj``, matched by whole segments and case-sensitive.

    ``*`` matches any characters of one segment (``*_proj``); ``**``, alone between dots, matches any number of
    segments, including zero; ``{a,b}`` matches either, and alternatives may contain dots and nested braces. The empty
    path is the region itself, and the empty pattern matches it. A pattern matches exactly these modules, not their
    children, and ops run inside leaf modules. So write a rule for a whole subtree as ``self_attn.**``, which also
    matches ``self_attn``.
    """

    text: str
    alternatives: tuple[tuple[str, ...], ...] = field(compare=False, repr=False)  # segments of each way to spell it out

    @classmethod
    def parse(cls, text: str) -> PathPattern:
        """Return the parsed pattern; raises ``ValueError`` with the reason if ``text`` is not a pattern."""
        _refuse_foreign_characters(text)
        return cls(text, tuple(_segments(way) for way in _spelled_out(text)))

    @classmethod
    def any_of(cls, texts: Iterable[str]) -> PathPattern:
        """Return one pattern that matches if any of ``texts`` matches; raises ``ValueError`` like ``parse``."""
        parts = tuple(texts)
        for part in parts:
            cls.parse(part)
        return cls.parse(parts[0]) if len(parts) == 1 else cls.parse("{" + ",".join(parts) + "}")

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the module at ``path``."""
        segments = tuple(path.split(".")) if path else ()
        return any(_path_fits(way, segments) for way in self.alternatives)


def fits_name(pattern: str, name: str) -> bool:
    """Return whether a name or glob fits a class, by its qualified name ``package.module.Class`` or by its bare one."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _refuse_foreign_characters(text: str) -> None:
    if len(text) > MAX_LENGTH:
        raise ValueError(f"it is {len(text)} characters long, more than {MAX_LENGTH}")
    for character in text:
        if character.isspace():
            raise ValueError("it has a space in it")
        if character in "[]?":
            raise ValueError(f'"{character}" has no meaning here; only *, ** and {{a,b}} are special')
        if character in "/\\":
            raise ValueError(f'module paths are written with dots, not with "{character}"')


def _spelled_out(text: str) -> list[str]:
    """Return what the braces of a pattern spell out, from the innermost on: ``a.b``, ``a.c`` for ``a.{b,c}``."""
    ways = [text]
    while len(parts := _INNERMOST_BRACES.split(ways[0], 1)) > 1:  # all ways have the same braces left
        if not parts[1]:
            raise ValueError('"{}" has nothing in it')
        if len(ways) * len(parts[1].split(",")) > MAX_ALTERNATIVES:
            raise ValueError(f"its braces spell out more than {MAX_ALTERNATIVES} paths")
        split = (_INNERMOST_BRACES.split(way, 1) for way in ways)
        ways = [
            *dict.fromkeys(before + choice + after for before, inside, after in split for choice in inside.split(","))
        ]
    if "{" in ways[0]:
        raise ValueError('a "{" has no "}" after it')
    if "}" in ways[0]:
        raise ValueError('a "}" has no "{" before it')
    if "," in ways[0]:
        raise ValueError('a comma stands outside of braces; alternatives are written "{a,b}", or as a list')
    return ways


def _segments(way: str) -> tuple[str, ...]:
    segments = tuple(way.split(".")) if way else ()
    for segment in segments:
        if not segment:
            raise ValueError("it has an empty segment: two dots in a row, or a dot at an end")
        if ANY_SEGMENTS in segment and segment != ANY_SEGMENTS:
            raise ValueError(f'"**" stands alone between dots, not inside of "{segment}"')
    return segments


def _path_fits(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Match segments one by one; on a mismatch, extend the last ``**`` by one segment (no exponential search)."""
    at, here, last_any, resume = 0, 0, -1, 0
    while here < len(path):
        if at < len(pattern) and pattern[at] == ANY_SEGMENTS:
            last_any, resume, at = at, here, at + 1
        elif at < len(pattern) and fnmatchcase(path[here], pattern[at]):
            at, here = at + 1, here + 1
        elif last_any >= 0:
            resume += 1
            at, here = last_any + 1, resume
        else:
            return False
    return all(segment == ANY_SEGMENTS for segment in pattern[at:])
