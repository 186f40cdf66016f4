"""Names of torch's ops and the ops registered in this process: the only module that reads torch's registries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch

from sac.torch_private import HIGHER_ORDER_OPS, HigherOrderOperator, OpOverload, OpOverloadPacket, registered_ops

HIGHER_ORDER = "higher_order"
_GLOB_CHARACTERS = frozenset("*?[")


def op_name(op: Any) -> str:
    """Return sac's name of an op: ``aten.mm.default``, ``higher_order.flex_attention``, or a qualified name."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op)
    if isinstance(op, HigherOrderOperator):
        return f"{HIGHER_ORDER}.{op._name}"
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__qualname__', type(op).__qualname__)}"


def short_name(name: str) -> str:
    """Return the name of an op without ``.default``, as tables and reports write it."""
    return name.removesuffix(".default")


def dotted(text: str) -> str:
    """Return a written name in the spelling that sac compares: ``aten.mm`` for ``aten::mm``, ``torch.ops.aten.mm``."""
    return text.strip().removeprefix("torch.ops.").replace("::", ".")


def is_glob(text: str) -> bool:
    """Return whether a written name is a glob."""
    return not _GLOB_CHARACTERS.isdisjoint(text)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A written name, in its dotted spelling: an overload, a packet (all its overloads), a higher-order op or a glob.

    A pattern is compared with names only, so it also matches ops that a library registers later.
    """

    text: str

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the op called ``name`` (see ``op_name``)."""
        packet = name.rpartition(".")[0] if name.count(".") > 1 else name
        if is_glob(self.text):
            return fnmatchcase(name, self.text) or fnmatchcase(packet, self.text)
        return self.text in (name, packet)


@dataclass(frozen=True, slots=True)
class Registry:
    """The ops registered at the time of reading: each packet (``aten.mm``) with the names of its overloads."""

    packets: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]  # of all ops
    text: str  # the names in one, to search in

    def has(self, pattern: NamePattern) -> bool:
        """Return whether ``pattern`` matches any registered op."""
        if is_glob(pattern.text):  # most globs are over libraries that are not there, which is seen quickly
            could_match = all(part in self.text for part in re.split(r"[*?]|\[.*?\]", pattern.text))
            return could_match and any(map(pattern.matches, self.names))
        packet, _, overload = pattern.text.rpartition(".")
        return pattern.text in self.packets or overload in self.packets.get(packet, ())


def read_registry() -> Registry:
    """Return the ops that are registered now; a library imported later may add more."""
    return _registry_of(tuple(registered_ops()), tuple(HIGHER_ORDER_OPS))


@lru_cache(maxsize=1)  # a policy that is applied reads the registry twice, and names seldom change between two readings
def _registry_of(names: tuple[str, ...], higher_order: tuple[str, ...]) -> Registry:
    packets: dict[str, list[str]] = {}
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        packets.setdefault(f"{namespace}.{packet}", []).append(overload or "default")
    for name in higher_order:
        packets[f"{HIGHER_ORDER}.{name}"] = []
    names = tuple(f"{packet}.{one}" if one else packet for packet, found in packets.items() for one in found or [""])
    return Registry({packet: tuple(sorted(found)) for packet, found in packets.items()}, names, "\n".join(names))


def find_op(name: str) -> Any | None:
    """Return the op called ``name`` (an overload or a higher-order op), or None if this torch does not have it."""
    namespace, packet_name, overload = (*name.split(".", 2), "", "")[:3]
    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
    if isinstance(packet, OpOverloadPacket):
        return getattr(packet, overload or "default", None)
    return packet if isinstance(packet, HigherOrderOperator) else None


def find_ops(packet: str, overloads: Iterable[str]) -> tuple[Any, ...]:
    """Return the ops of one packet of a ``Registry``."""
    names = [f"{packet}.{overload}" for overload in overloads] or [packet]
    return tuple(op for op in map(find_op, names) if op is not None)
