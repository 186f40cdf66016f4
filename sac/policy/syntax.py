"""YAML text and Python values as nodes with source locations; plain values as YAML text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import yaml

from sac.errors import PolicyError, Problem

# -- Nodes: scalars, lists and mappings, each with its source location

MAX_NODES = 10_000  # with every alias expanded; the longest shipped policy has a few hundred
MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """The place of a value in a file; ``line`` and ``column`` count from 1, and are 0 for a value without a file."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Node:
    """A value; prints as its description in a message.

    ``kind``: ``str``, ``null``, ``bool``, ``int`` or ``float``, with the ``text`` exactly as in the file; ``other``,
    with a description; ``seq``, with ``items``; ``map``, with ``entries`` in the order written.
    """

    kind: str
    location: SourceLocation
    text: str = ""
    items: tuple[Node, ...] = ()
    entries: tuple[tuple[Node, Node], ...] = ()

    def __str__(self) -> str:
        match self.kind:
            case "seq":
                return "a list" if self.items else "an empty list"
            case "map":
                return "a mapping" if self.entries else "an empty mapping"
            case "null":
                return "empty"
            case "str":
                return f'"{shown(self.text)}"'
            case _:
                return shown(self.text)


class Findings:
    """Collects the problems of one file, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._found: list[tuple[SourceLocation, Problem]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self, location: SourceLocation, found: str, *, expected: str = "", nearest: str = "", fix: str = ""
    ) -> None:
        """Record one problem at ``location``."""
        self._found.append((location, Problem(str(location), found, expected, nearest, fix)))

    def refuse(self, node: Node, what: str, expected: str, *, nearest: str = "", fix: str = "") -> None:
        """Record that ``node``, which is ``what``, is none of what is ``expected``."""
        self.add(node.location, f"{what} is {node}", expected=expected, nearest=nearest, fix=fix)

    def stop(self, location: SourceLocation, found: str, *, expected: str = "", fix: str = "") -> NoReturn:
        """Record a problem after which nothing can be read, and raise all problems found."""
        self.add(location, found, expected=expected, fix=fix)
        raise PolicyError(self.problems())

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems found, in order of location (in order of discovery if there are no lines)."""
        return tuple(problem for _, problem in sorted(self._found, key=lambda found: (found[0].line, found[0].column)))


def shown(text: str) -> str:
    """Return ``text`` for a message: truncated, with unprintable characters escaped."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def node_from_value(value: object, path: str, findings: Findings) -> Node:
    """Return the node of a Python value (a policy given as a mapping); locations are paths: ``policy.rules[0]``."""
    return _Nodes(findings, path).of_value(value, path, MAX_DEPTH)


class _Nodes:
    """Makes the nodes of one policy, bounded in number and depth."""

    def __init__(self, findings: Findings, file: str) -> None:
        self.findings = findings
        self.file = file
        self.nodes_left = MAX_NODES

    def count(self, location: SourceLocation, depth_left: int) -> None:
        self.nodes_left -= 1
        if self.nodes_left < 0:
            found = f"up to here the policy holds more than {MAX_NODES} values, with every alias written out"
            self.findings.stop(location, found, fix="use fewer aliases, or split the policy with `extends`")
        if depth_left < 0:
            self.findings.stop(location, f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")

    def of_value(self, value: object, path: str, depth_left: int) -> Node:
        location = SourceLocation(path)
        self.count(location, depth_left)
        if isinstance(value, Mapping):
            below = [(key, item, f"{path}.{shown(str(key))}") for key, item in value.items()]
            return Node(
                "map",
                location,
                entries=tuple(
                    (_scalar(key, SourceLocation(at)), self.of_value(item, at, depth_left - 1))
                    for key, item, at in below
                ),
            )
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            items = (self.of_value(item, f"{path}[{index}]", depth_left - 1) for index, item in enumerate(value))
            return Node("seq", location, items=tuple(items))
        return _scalar(value, location)

    def of_yaml(self, node: Any, depth_left: int) -> Node:
        location = _location(node.start_mark, self.file)
        self.count(location, depth_left)
        kind = node.tag.removeprefix(_TAG)
        if kind not in ("str", "seq", "map", *_KINDS):
            found = f"the tag {shown(node.tag.replace(_TAG, '!!'))} is not allowed"
            self.findings.stop(location, found, fix="remove it; a policy is plain words, numbers, lists and mappings")
        if isinstance(node, yaml.ScalarNode):
            return Node(kind, location, node.value)
        if isinstance(node, yaml.SequenceNode):
            return Node(kind, location, items=tuple(self.of_yaml(item, depth_left - 1) for item in node.value))
        entries: dict[str, tuple[Node, Node]] = {}
        for written, item in node.value:
            key, value = self.of_yaml(written, depth_left - 1), self.of_yaml(item, depth_left - 1)
            if key.kind in ("seq", "map"):
                self.findings.add(key.location, "a list or mapping is used as a key", fix="quote it if text is meant")
            elif key.text in entries:
                first = entries[key.text][0].location
                found = f'the key "{shown(key.text)}" is given twice; the first is at {first}'
                self.findings.add(key.location, found, fix="keep one of them")
            else:
                entries[key.text] = (key, value)
        return Node(kind, location, entries=tuple(entries.values()))


def _scalar(value: object, location: SourceLocation) -> Node:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return Node("null", location, "null")
    if isinstance(value, bool):
        return Node("bool", location, str(value).lower())
    if isinstance(value, str):
        return Node("str", location, str(value))
    if isinstance(value, int) and value.bit_length() <= 128:  # much longer ones cannot even be printed
        return Node("int", location, str(int(value)))
    if isinstance(value, float):
        return Node("float", location, repr(float(value)))
    return Node("other", location, f"a value of type {type(value).__name__}")


# -- YAML text: only plain data; duplicate keys are reported, where PyYAML silently lets the second one win

_TAG = "tag:yaml.org,2002:"
_KINDS = {  # of unquoted scalars, by the rules of YAML 1.2: `on`, `no` and `1:8` are text, `1e-3` is a number
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}


_RESOLVERS = [(_TAG + kind, re.compile(rf"({pattern})\Z")) for kind, pattern in _KINDS.items()]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: Any = {None: _RESOLVERS}  # noqa: RUF012  (pyyaml wants it on the class)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or YAML 1.2 would not read as text."""

    yaml_implicit_resolvers: Any = yaml.SafeDumper.yaml_implicit_resolvers | {None: _RESOLVERS}

    def ignore_aliases(self, data: object) -> bool:
        return True


def yaml_text(value: object, *, flow: bool | None = None, width: float = 100) -> str:
    """Return plain values as YAML text, as pyyaml's ``dump`` does."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=flow, allow_unicode=True, width=width)


_SYNTAX_FIXES = {  # by a part of what PyYAML says
    "alias": 'an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"',
    "another document": "one policy per file",
    r"'\t'": "indent with spaces, not with tabs",
    "block scalar": 'quote text that starts with a sign, as in ">=4096"',
    "cannot start any token": 'quote text that starts with a sign, as in ">=4096"',
    "quoted scalar": "close the quote",
    "got '{'": 'quote patterns with braces, as in "mlp.{gate,up}"',
    "found '?'": "indent all keys of a rule alike, under its first one",
    "mapping values": "indent all keys of a mapping alike, or quote text with a colon",
}


def compose_yaml(text: str, file: str, findings: Findings) -> Node | None:
    """Return the root node of ``text``, or None if it is empty; raises ``PolicyError`` if reading cannot continue.

    Duplicate keys are reported in ``findings``, and the first one is kept.
    """
    try:
        composed = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        found = ": ".join(part for part in (error.context, error.problem) if part)
        fixes = (fix for part, fix in _SYNTAX_FIXES.items() if part in found)
        fix = next(fixes, "check brackets, indentation and quotes")
        findings.stop(_location(error.problem_mark or error.context_mark, file), f"this is not YAML: {found}", fix=fix)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = SourceLocation(file, before.count("\n") + 1, error.position - before.rfind("\n"))
        findings.stop(where, f"the character {error.character:#06x} is not allowed in YAML", fix="remove it")
    except RecursionError:
        findings.stop(SourceLocation(file), f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
    except (ValueError, OverflowError):  # PyYAML raises these for an escape such as "\Uffffffff"
        found = "this is not YAML: an escape in quoted text does not encode a character"
        findings.stop(SourceLocation(file), found, fix="look for a wrong \\")
    root = None if composed is None else _Nodes(findings, file).of_yaml(composed, MAX_DEPTH)
    return None if root is not None and root.kind == "null" else root


def _location(mark: Any, file: str) -> SourceLocation:
    return SourceLocation(file, mark.line + 1, mark.column + 1) if mark else SourceLocation(file)
