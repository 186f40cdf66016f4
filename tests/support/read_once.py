"""What does not change while tests run is read once: the shipped policies' YAML, and which ops torch has registered.

A user reads them a few times, in a tenth of a second each; the tests would some ten thousand times. What is kept is
kept under all that it is made of (a file's name and its text; the names that are registered now), so that a test which
writes a file or registers an op gets what it would get without this. Policies that tests write are always read.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from sac.engine import table as bind
from sac.ops import names
from sac.ops.registry import NamePattern, Registry
from sac.policy import load as files
from sac.policy.load import shipped_directory, shipped_policies
from sac.policy.model import Policy
from sac.policy.syntax import Node

_compose_yaml = files.compose_yaml
_line_of = files._line_of
_read_registry = names.read_registry
_has = Registry.has

_shipped = frozenset(str(shipped_directory() / f"{name}.yaml") for name in shipped_policies())
_composed: dict[tuple[bytes, str], Node] = {}
_lines: dict[int, list[Policy]] = {}  # by the id of a node that is kept


def compose_yaml(data: bytes, file: str) -> Node:
    """Nodes cannot be changed, so that two readers can have the same ones."""
    if file not in _shipped:
        return _compose_yaml(data, file)
    if (data, file) not in _composed:
        _composed[data, file] = _compose_yaml(data, file)
    return _composed[data, file]


def line_of(node: Node, name: str, source: str, base: Path, trail: tuple[Path, ...] = ()) -> list[Policy]:
    """The policies of a shipped file: neither they nor their rules can be changed."""
    if not any(node is one for one in _composed.values()):
        return _line_of(node, name, source, base, trail)
    if id(node) not in _lines:
        _lines[id(node)] = _line_of(node, name, source, base, trail)
    return [*_lines[id(node)]]


class _Registered:
    """The registry of when it was last read, by what, and what it has been asked."""

    by: Any = None
    registry: Any = None
    answers: dict[NamePattern, bool]


def read_registry() -> Registry:
    # Ops come with a module of Python or C++ that is imported, or by torch.library: to list all takes milliseconds.
    libraries = (len(sys.modules), len(torch.ops.loaded_libraries), set(torch.library._defs))
    registered = (*libraries, list(torch._ops._higher_order_ops))
    if registered != _Registered.by:
        before, found = _Registered.registry, _read_registry()
        _Registered.by, _Registered.registry = registered, found
        _Registered.answers = _Registered.answers if found is before else {}
    return _Registered.registry


def has(self: Registry, pattern: NamePattern) -> bool:
    if _Registered.by is None or self is not _Registered.registry:
        return _has(self, pattern)
    if pattern not in _Registered.answers:
        _Registered.answers[pattern] = _has(self, pattern)
    return _Registered.answers[pattern]


def install() -> None:
    """Do so in this process."""
    files.compose_yaml, files._line_of = compose_yaml, line_of
    names.read_registry = bind.read_registry = read_registry
    Registry.has = has  # type: ignore[method-assign]
