"""Patterns over dotted module paths, used by rules and regions to select modules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

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
    regex: re.Pattern[str] = field(compare=False, repr=False)  # over a path with a dot after each segment

    @classmethod
    def parse(cls, *texts: str) -> PathPattern:
        """Return the pattern that matches if any of ``texts`` does; raises ``ValueError`` with the reason."""
        text = texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"
        return cls(text, re.compile("|".join(map(_regex_of, _spelled_out(text)))))

    def matches(self, path: str) -> bool:
        """Return whether the pattern matches the module at ``path``."""
        return self.regex.fullmatch(f"{path}." if path else "") is not None


def fits_name(pattern: str, name: str) -> bool:
    """Return whether a name or glob fits a class, by its qualified name ``package.module.Class`` or by its bare one."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _spelled_out(text: str) -> list[str]:
    """Return what the braces of a pattern spell out, the innermost first: ``a.b``, ``a.c`` for ``a.{b,c}``."""
    ways = [text]
    while len(parts := _INNERMOST_BRACES.split(ways[0], 1)) > 1:  # all ways have the same braces left
        if len(ways) * len(parts[1].split(",")) > 10_000:
            raise ValueError("its braces spell out more than 10,000 patterns")
        split = (_INNERMOST_BRACES.split(way, 1) for way in ways)
        ways = [*dict.fromkeys(head + choice + tail for head, inside, tail in split for choice in inside.split(","))]
    if "{" in ways[0]:
        raise ValueError('a "{" has no "}" after it')
    return ways


def _regex_of(way: str) -> str:
    if wrong := re.search(r"[\s\[\]?/\\{},]", way):
        raise ValueError(f'"{wrong[0]}" has no meaning here; dots, *, ** and {{a,b}} are special')
    if way.count("*") > 12:  # matching takes exponential time
        raise ValueError('it has more than 12 "*"')
    segments = way.split(".") if way else []
    if any(not segment or ("**" in segment and segment != "**") for segment in segments):
        raise ValueError('a segment between dots is empty, or has more than "**" in it')
    return "".join(
        r"(?:[^.]+\.)*" if segment == "**" else re.escape(segment).replace(r"\*", "[^.]*") + r"\."
        for segment in segments
    )
