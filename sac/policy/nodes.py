"""What was written, before it means anything: scalars, lists and mappings, each with its mark."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NoReturn, TypeAlias

from sac.errors import PolicyError, Problem
from sac.policy.model import Mark

MAX_NODES = 10_000  # with every alias written out; the longest shipped policy has a few hundred
MAX_DEPTH = 20

ScalarKind: TypeAlias = Literal["text", "null", "bool", "int", "float", "other"]
_NULL = re.compile(r"(~|null|Null|NULL)?")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class Scalar:
    """One word, number or text; ``text`` is what stood in the file, letter by letter."""

    text: str
    kind: ScalarKind
    mark: Mark


@dataclass(frozen=True, slots=True)
class ListNode:
    """A list."""

    items: tuple[Node, ...]
    mark: Mark


@dataclass(frozen=True, slots=True)
class MapNode:
    """A mapping, in the order written; keys are unique."""

    entries: tuple[tuple[Scalar, Node], ...]
    mark: Mark


Node: TypeAlias = Scalar | ListNode | MapNode


class Findings:
    """Gathers the problems of one file, so that all of them are told at once."""

    def __init__(self) -> None:
        self._found: list[tuple[Mark, Problem]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, mark: Mark, found: str, *, expected: str = "", nearest: str = "", fix: str = "") -> None:
        """Note one problem at ``mark``."""
        self._found.append((mark, Problem(str(mark), found, expected, nearest, fix)))

    def stop(self, mark: Mark, found: str, *, expected: str = "", nearest: str = "", fix: str = "") -> NoReturn:
        """Note a problem behind which nothing can be read, and raise all that was found."""
        self.add(mark, found, expected=expected, nearest=nearest, fix=fix)
        raise PolicyError(self.problems())

    def problems(self) -> tuple[Problem, ...]:
        """Return what was found, in order of place (in order of finding where there are no lines)."""
        return tuple(problem for _, problem in sorted(self._found, key=lambda found: (found[0].line, found[0].column)))


def plain_kind(text: str) -> ScalarKind:
    """Return what an unquoted scalar is.

    These are the rules of YAML 1.2: ``on``, ``no`` and ``1:8`` are text, ``1e-3`` is a number. YAML 1.1, which PyYAML
    resolves by, has it the other way round in each case.
    """
    if _NULL.fullmatch(text):
        return "null"
    if _BOOL.fullmatch(text):
        return "bool"
    if _INT.fullmatch(text):
        return "int"
    return "float" if _FLOAT.fullmatch(text) else "text"


def describe(node: Node) -> str:
    """Return what stands there, for a message."""
    if isinstance(node, ListNode):
        return "a list" if node.items else "an empty list"
    if isinstance(node, MapNode):
        return "a mapping" if node.entries else "an empty mapping"
    if node.kind == "null":
        return "empty"
    if node.kind == "other":
        return f"a {node.text}"
    return f'"{shown(node.text)}"' if node.kind == "text" else shown(node.text)


def shown(text: str) -> str:
    """Return ``text`` as a message can hold it: cut, and what cannot be printed escaped."""
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def node_from_value(value: object, path: str, findings: Findings) -> Node:
    """Return the node of a Python value (a policy given as a mapping); marks are paths: ``policy.rules[0]``."""
    return _Values(findings).convert(value, path, MAX_DEPTH)


class _Values:
    """Converts one Python value, with the same bounds on size and depth as a file has."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.nodes_left = MAX_NODES

    def convert(self, value: object, path: str, depth_left: int) -> Node:
        mark = Mark(path)
        self.nodes_left -= 1
        if self.nodes_left < 0:
            self.findings.stop(mark, f"the mapping holds more than {MAX_NODES} values", fix="split the policy")
        if depth_left < 0:
            self.findings.stop(mark, f"the mapping nests more than {MAX_DEPTH} deep", fix="a policy needs 5 levels")
        if isinstance(value, Mapping):
            return MapNode(self._entries(value, path, depth_left - 1), mark)
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
            items = enumerate(value)
            return ListNode(tuple(self.convert(v, f"{path}[{i}]", depth_left - 1) for i, v in items), mark)
        return _scalar_from_value(value, mark)

    def _entries(self, value: Mapping[object, object], path: str, depth_left: int) -> tuple[tuple[Scalar, Node], ...]:
        entries = []
        for key, item in value.items():
            below = f"{path}.{shown(str(key))}"
            entries.append((_scalar_from_value(key, Mark(below)), self.convert(item, below, depth_left)))
        return tuple(entries)


def _scalar_from_value(value: object, mark: Mark) -> Scalar:
    if isinstance(value, Enum):
        value = value.value
    if value is None:
        return Scalar("null", "null", mark)
    if isinstance(value, bool):
        return Scalar(str(value).lower(), "bool", mark)
    if isinstance(value, str):
        return Scalar(str(value), "text", mark)
    if isinstance(value, int) and value.bit_length() <= 128:  # far longer ones cannot even be printed
        return Scalar(str(int(value)), "int", mark)
    if isinstance(value, float):
        return Scalar(repr(float(value)), "float", mark)
    return Scalar(f"value of type {type(value).__name__}", "other", mark)
