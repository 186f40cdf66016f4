"""What does not change while tests run is read once: the shipped policies' YAML, and which ops torch has registered.

A user reads them a few times, in a tenth of a second each; the tests would some ten thousand times. What is kept is
kept under all that it is made of (a file's name and its text; the names that are registered now), so that a test which
writes a file or registers an op gets what it would get without this. Policies that tests write are always read.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from sac.engine import table as bind
from sac.ops import names
from sac.ops.registry import NamePattern, Registry
from sac.policy import load as files
from sac.policy.load import shipped_directory, shipped_policies
from sac.policy.syntax import Node

_compose_yaml = files.compose_yaml
_read_registry = names.read_registry
_has = Registry.has

_shipped = frozenset(str(shipped_directory() / f"{name}.yaml") for name in shipped_policies())
_composed: dict[tuple[bytes, str], Node] = {}


def compose_yaml(data: bytes, file: str) -> Node:
    """Nodes cannot be changed, so that two readers can have the same ones."""
    if file not in _shipped:
        return _compose_yaml(data, file)
    if (data, file) not in _composed:
        _composed[data, file] = _compose_yaml(data, file)
    return _composed[data, file]


class _Registered:
    """The registry of when it was last read, by what, and what it has been asked."""

    by: Any = None
    registry: Registry
    answers: dict[NamePattern, bool]


def read_registry() -> Registry:
    # Ops come with a module of Python or C++ that is imported, or by torch.library: to list all takes milliseconds.
    libraries = (len(sys.modules), len(torch.ops.loaded_libraries), set(torch.library._defs))
    registered = (*libraries, list(torch._ops._higher_order_ops))
    if registered != _Registered.by:
        _Registered.by, _Registered.registry, _Registered.answers = registered, _read_registry(), {}
    return _Registered.registry


def has(self: Registry, pattern: NamePattern) -> bool:
    if _Registered.by is None or self is not _Registered.registry:
        return _has(self, pattern)
    if pattern not in _Registered.answers:
        _Registered.answers[pattern] = _has(self, pattern)
    return _Registered.answers[pattern]


def install() -> None:
    """Do so in this process."""
    files.compose_yaml = compose_yaml
    names.read_registry = bind.read_registry = read_registry
    Registry.has = has  # type: ignore[method-assign]
