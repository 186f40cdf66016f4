"""Parse YAML text into nodes with source locations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn, TypeAlias

import yaml

from sac.errors import PolicyError, Problem
from sac.policy.model import ScalarType, SourceLocation, plain_type

# -- Nodes: scalars, lists and mappings, each with its source location

MAX_NODES = 10_000  # with every alias expanded; the longest shipped policy has a few hundred
MAX_DEPTH = 20


@dataclass(frozen=True, slots=True)
class Scalar:
    """One word, number or text; ``text`` is exactly as in the file."""

    text: str
    scalar_type: ScalarType
    location: SourceLocation


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]
    location: SourceLocation


@dataclass(frozen=True, slots=True)
class MapNode:
    """A mapping, in the order written; keys are unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    location: SourceLocation


Node: TypeAlias = Scalar | ListNode | MapNode


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

    def stop(self, location: SourceLocation, found: str, *, expected: str = "", fix: str = "") -> NoReturn:
        """Record a problem after which nothing can be read, and raise all problems found."""
        self.add(location, found, expected=expected, fix=fix)
        raise PolicyError(self.problems())

    def problems(self) -> tuple[Problem, ...]:
        """Return the problems found, in order of location (in order of discovery if there are no lines)."""
        return tuple(problem for _, problem in sorted(self._found, key=lambda found: (found[0].line, found[0].column)))


def describe(node: Node) -> str:
    """Return a description of ``node`` for a message."""
    if isinstance(node, ListNode):
        return "a list" if node.items else "an empty list"
    if isinstance(node, MapNode):
        return "a mapping" if node.entries else "an empty mapping"
    if node.scalar_type == "null":
        return "empty"
    if node.scalar_type == "other":
        return f"a {node.text}"
    return f'"{shown(node.text)}"' if node.scalar_type == "text" else shown(node.text)


def shown(text: str) -> str:
    """Return ``text`` for a message: truncated, with unprintable characters escaped."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def node_from_value(value: object, path: str, findings: Findings) -> Node:
    """Return the node of a Python value (a policy given as a mapping); locations are paths: ``policy.rules[0]``."""
    return _Values(findings).convert(value, path, MAX_DEPTH)


class _Nodes:
    """Makes the nodes of one policy, bounded in number and depth."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.nodes_left = MAX_NODES

    def count(self, location: SourceLocation, depth_left: int) -> None:
        self.nodes_left -= 1
        if self.nodes_left < 0:
            found = f"up to here the policy holds more than {MAX_NODES} values, with every alias written out"
            self.findings.stop(location, found, fix="use fewer aliases, or split the policy with `extends`")
        if depth_left < 0:
            self.findings.stop(location, f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")


class _Values(_Nodes):
    """Converts one Python value."""

    def convert(self, value: object, path: str, depth_left: int) -> Node:
        location = SourceLocation(path)
        self.count(location, depth_left)
        if isinstance(value, Mapping):
            below = [(key, item, f"{path}.{shown(str(key))}") for key, item in value.items()]
            entries = [
                (_scalar_from_value(key, SourceLocation(at)), self.convert(item, at, depth_left - 1))
                for key, item, at in below
            ]
            return MapNode(tuple(entries), location)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            items = enumerate(value)
            return ListNode(tuple(self.convert(v, f"{path}[{i}]", depth_left - 1) for i, v in items), location)
        return _scalar_from_value(value, location)


def _scalar_from_value(value: object, location: SourceLocation) -> Scalar:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return Scalar("null", "null", location)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), "bool", location)
    if isinstance(value, str):
        return Scalar(str(value), "text", location)
    if isinstance(value, int) and value.bit_length() <= 128:  # much longer ones cannot even be printed
        return Scalar(str(int(value)), "int", location)
    if isinstance(value, float):
        return Scalar(repr(float(value)), "float", location)
    return Scalar(f"value of type {type(value).__name__}", "other", location)


# -- YAML text to nodes: only plain data; duplicate keys are reported, where PyYAML silently lets the second one win

_QUOTE_STAR = 'an unquoted * at the start of a word refers to an anchor; quote patterns, as in "*_proj"'


class _Loader(yaml.SafeLoader):
    """Leaves unquoted words as they are written; see ``plain_type``."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.yaml_implicit_resolvers: Any = {}


def compose_yaml(text: str, file: str, findings: Findings) -> Node | None:
    """Return the root node of ``text``, or None if it is empty; raises ``PolicyError`` if reading cannot continue.

    Duplicate keys are reported in ``findings``, and the first one is kept.
    """
    try:
        composed = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        found = ": ".join(part for part in (error.context, error.problem) if part)
        fix = _syntax_fix(error, text[mark.index : mark.index + 1] if mark else "")
        findings.stop(_location(mark, file), f"this is not YAML: {found}", fix=fix)
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        where = SourceLocation(file, before.count("\n") + 1, error.position - before.rfind("\n"))
        findings.stop(where, f"the character {error.character:#06x} is not allowed in YAML", fix="remove it")
    except RecursionError:
        findings.stop(SourceLocation(file), f"this nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
    except (ValueError, OverflowError):  # PyYAML raises these for an escape such as "\Uffffffff"
        found = "this is not YAML: an escape in quoted text does not encode a character"
        findings.stop(SourceLocation(file), found, fix="look for a wrong \\")
    root = None if composed is None else _Composed(file, findings).convert(composed, MAX_DEPTH)
    return None if isinstance(root, Scalar) and root.scalar_type == "null" else root


class _Composed(_Nodes):
    """Converts the nodes of PyYAML, which come without limits, tags or duplicates."""

    def __init__(self, file: str, findings: Findings) -> None:
        super().__init__(findings)
        self.file = file

    def convert(self, node: Any, depth_left: int) -> Node:
        location = _location(node.start_mark, self.file)
        self.count(location, depth_left)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!", 1)
        if tag not in ("!!str", "!!seq", "!!map"):
            fix = "remove it; a policy is plain words, numbers, lists and mappings"
            self.findings.stop(location, f"the tag {shown(tag)} is not allowed", fix=fix)
        if isinstance(node, yaml.ScalarNode):
            return Scalar(node.value, plain_type(node.value) if node.style is None else "text", location)
        if isinstance(node, yaml.SequenceNode):
            return ListNode(tuple(self.convert(item, depth_left - 1) for item in node.value), location)
        entries: dict[str, tuple[Scalar, Node]] = {}
        for key, value in node.value:
            self._add_entry(entries, self.convert(key, depth_left - 1), self.convert(value, depth_left - 1))
        return MapNode(tuple(entries.values()), location)

    def _add_entry(self, entries: dict[str, tuple[Scalar, Node]], key: Node, value: Node) -> None:
        if not isinstance(key, Scalar):
            self.findings.add(key.location, "a list or mapping is used as a key", fix="quote it if text is meant")
        elif key.text in entries:
            first = entries[key.text][0].location
            found = f'the key "{shown(key.text)}" is given twice; the first is at {first}'
            self.findings.add(key.location, found, fix="keep one of them")
        else:
            entries[key.text] = (key, value)


def _location(mark: Any, file: str) -> SourceLocation:
    return SourceLocation(file, mark.line + 1, mark.column + 1) if mark else SourceLocation(file)


def _syntax_fix(error: yaml.MarkedYAMLError, character: str) -> str:
    context, problem = error.context or "", error.problem or ""
    if "alias" in context or "alias" in problem:
        return _QUOTE_STAR
    if "another document" in problem:
        return "one policy per file"
    if character == "\t":
        return "indent with spaces, not with tabs"
    if "block scalar" in context or "cannot start any token" in problem:
        return 'quote text that starts with a sign, as in ">=4096"'
    return "close the quote" if "quoted scalar" in context else "check brackets, indentation and quotes"
