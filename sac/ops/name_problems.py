"""What is wrong with an op name, told so that its author can put it right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sac.errors import listing, nearest
from sac.ops.registry import Registry, dotted, find_op, find_ops, is_glob
from sac.ops.traits import traits_of

_FORMS = "an op (aten.mm, aten::mm), one overload (aten.mm.default), a glob (aten.*mm*)"


@dataclass(frozen=True, slots=True)
class NameProblem:
    """One wrong name: its place in the list, what was found, what is legal, the nearest spelling and the fix.

    The last three may be empty. The fields are those of ``errors.Problem`` but for the place, which only the caller
    knows as file:line:column.
    """

    index: int
    text: str
    found: str
    legal: str = ""
    nearest: str = ""
    fix: str = ""


def unknown_name(index: int, text: str, registry: Registry, set_names: Sequence[str]) -> NameProblem | None:
    """Tell why no registered op is called ``text``; None for a glob over a library that may be imported later."""
    name = dotted(text)
    if is_glob(name):
        return _empty_glob(index, text) if name.startswith("aten.") else None
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) > 3:
        sets = listing(set_names)
        return NameProblem(index, text, f'"{text}" is not the name of an op', f"a save-set ({sets}), {_FORMS}")
    if len(parts) == 1:
        return _unknown_word(index, text, registry, set_names)
    packet = ".".join(parts[:2])
    if packet in registry.packets:
        return _unknown_overload(index, text, packet, registry.packets[packet])
    if parts[0] not in registry.namespaces:
        return _unknown_namespace(index, text, packet, registry)
    return NameProblem(
        index,
        text,
        f"no op {packet} is registered",
        nearest=nearest(packet, [known for known in registry.packets if known.startswith(f"{parts[0]}.")]),
        fix="correct the name, or put it into a save-set under `sets:`, where an op that is not there is passed over",
    )


def _unknown_word(index: int, text: str, registry: Registry, set_names: Sequence[str]) -> NameProblem:
    qualified = [f"{namespace}.{text}" for namespace in ("aten", "higher_order", "prims")]
    guess = next((name for name in qualified if name in registry.packets), "")
    return NameProblem(
        index,
        text,
        f'unknown save-set "{text}"',
        f"{listing(set_names)}; or {_FORMS}",
        guess or nearest(text, set_names),
        "write an op with its namespace, or define the set under `sets:`",
    )


def _unknown_overload(index: int, text: str, packet: str, overloads: Sequence[str]) -> NameProblem:
    legal = [f"{packet}.{overload}" for overload in overloads] or [packet]
    return NameProblem(
        index,
        text,
        f"{packet} has no overload {dotted(text).rpartition('.')[2]}",
        listing(legal),
        nearest(dotted(text), legal),
        f"write {packet} to mean all its overloads",
    )


def _unknown_namespace(index: int, text: str, packet: str, registry: Registry) -> NameProblem:
    namespace, _, name = packet.partition(".")
    close = nearest(namespace, registry.namespaces)
    return NameProblem(
        index,
        text,
        f"no op of a namespace {namespace} is registered",
        nearest=f"{close}.{name}" if f"{close}.{name}" in registry.packets else "",
        fix="import the library that registers it before sac reads the policy, or put the name into a save-set under "
        "`sets:`, where an op that is not there is passed over",
    )


def _empty_glob(index: int, text: str) -> NameProblem:
    return NameProblem(
        index,
        text,
        f"the glob {text} matches no registered op",
        fix="a glob is compared with whole names such as aten.mm and aten.mm.default; * stands for any characters",
    )


def unsavable_name(index: int, text: str, registry: Registry) -> NameProblem | None:
    """Tell why nothing that ``text`` names can be saved; None when something can, and for a glob."""
    name = dotted(text)
    if is_glob(name):
        return None
    if name in registry.packets:
        ops = find_ops(name, registry.packets[name])
    else:
        ops = tuple(op for op in (find_op(name),) if op is not None)
    traits = [traits_of(op) for op in ops]
    if not traits or any(known.savable or known.savable_if for known in traits):
        return None
    reason = traits[0].unsavable_reason
    return NameProblem(index, text, f"{name} cannot be saved: {reason}", fix=_instead(name, reason, registry))


def _instead(name: str, reason: str, registry: Registry) -> str:
    packet = ".".join(name.split(".")[:2])
    functional = packet.rstrip("_")
    if functional != packet and functional in registry.packets:
        return f"name the form that does not write, {functional}, or leave it out: it is run again in backward"
    if reason == "it is a view":
        return "name the op that makes the tensor it looks at; the view costs nothing to make again"
    return "leave it out: it is run again in backward"
