"""The kinds of unquoted scalars in YAML 1.2."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

ScalarType: TypeAlias = Literal["text", "null", "bool", "int", "float", "other"]
_NULL = re.compile(r"(~|null|Null|NULL)?")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def plain_type(text: str) -> ScalarType:
    """Return the kind of an unquoted scalar.

    These are the rules of YAML 1.2: ``on``, ``no`` and ``1:8`` are text, ``1e-3`` is a number. YAML 1.1, which PyYAML
    implements, resolves each of these the other way round.
    """
    if _NULL.fullmatch(text):
        return "null"
    if _BOOL.fullmatch(text):
        return "bool"
    if _INT.fullmatch(text):
        return "int"
    return "float" if _FLOAT.fullmatch(text) else "text"
