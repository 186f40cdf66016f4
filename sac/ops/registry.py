"""How torch names its ops and which of them this process has: the one place that reads torch's registries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

HIGHER_ORDER = "higher_order"
_GLOB_CHARACTERS = frozenset("*?[")


def op_name(op: Any) -> str:
    """Return how sac writes an op: ``aten.mm.default``, ``higher_order.flex_attention``, or a function's own name."""
    if isinstance(op, (OpOverload, OpOverloadPacket)):
        return str(op)
    if isinstance(op, HigherOrderOperator):
        return f"{HIGHER_ORDER}.{op._name}"
    return f"{getattr(op, '__module__', '')}.{getattr(op, '__qualname__', type(op).__qualname__)}"


def dotted(text: str) -> str:
    """Return a written name in the spelling that sac compares: ``aten::mm``, ``torch.ops.aten.mm`` as ``aten.mm``."""
    return text.strip().removeprefix("torch.ops.").replace("::", ".")


def is_glob(text: str) -> bool:
    """Return whether a written name is a pattern over names."""
    return not _GLOB_CHARACTERS.isdisjoint(text)


@dataclass(frozen=True, slots=True)
class NamePattern:
    """A written name, in its dotted spelling: an overload, a packet (all its overloads), a higher-order op or a glob.

    A pattern is compared with names only, so it also means ops that a library registers later.
    """

    text: str

    def matches(self, name: str) -> bool:
        """Return whether the op called ``name`` (see ``op_name``) is meant."""
        packet = name.rpartition(".")[0] if name.count(".") > 1 else name
        if is_glob(self.text):
            return fnmatchcase(name, self.text) or fnmatchcase(packet, self.text)
        return self.text in (name, packet)


@dataclass(frozen=True, slots=True)
class Registry:
    """The ops that were registered when it was read: each packet (``aten.mm``) with the names of its overloads."""

    packets: Mapping[str, tuple[str, ...]]

    @property
    def namespaces(self) -> frozenset[str]:
        """The namespaces that hold at least one op."""
        return frozenset(packet.partition(".")[0] for packet in self.packets)

    def has(self, pattern: NamePattern) -> bool:
        """Return whether any registered op is meant by ``pattern``."""
        if not is_glob(pattern.text):
            packet, _, overload = pattern.text.rpartition(".")
            return pattern.text in self.packets or overload in self.packets.get(packet, ())
        everything = "\n".join(self.packets)
        if "[" not in pattern.text and any(part not in everything for part in re.split(r"[*?.]", pattern.text)):
            # A part that no packet has may still be an overload's name.
            everything += "\n".join(overload for overloads in self.packets.values() for overload in overloads)
            if any(part not in everything for part in re.split(r"[*?.]", pattern.text)):
                return False
        return any(
            pattern.matches(f"{packet}.{overload}" if overload else packet)
            for packet, overloads in self.packets.items()
            for overload in overloads or ("",)
        )


def read_registry() -> Registry:
    """Read which ops are registered now; a library imported later may add to them."""
    packets: dict[str, list[str]] = {}
    # Private, in torch 2.11 and 2.13; tests/unit/ops/test_registry.py holds that it names what torch.ops has.
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        packets.setdefault(f"{namespace}.{packet}", []).append(overload or "default")
    # Private as well: there is no public list of the higher-order ops.
    for name in getattr(torch._ops, "_higher_order_ops", {}):
        packets[f"{HIGHER_ORDER}.{name}"] = []
    return Registry({packet: tuple(sorted(overloads)) for packet, overloads in packets.items()})


def find_op(name: str) -> Any | None:
    """Return the op that ``name`` writes (an overload, or a higher-order op), or None where this torch has none."""
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace, None), packet_name, None)
    if isinstance(packet, HigherOrderOperator):
        return packet
    if not isinstance(packet, OpOverloadPacket):
        return None
    return getattr(packet, overload or "default", None)


def find_ops(packet: str, overloads: Iterable[str]) -> tuple[Any, ...]:
    """Return the ops of one packet of a ``Registry``."""
    names = [f"{packet}.{overload}" for overload in overloads] or [packet]
    return tuple(op for op in map(find_op, names) if op is not None)
