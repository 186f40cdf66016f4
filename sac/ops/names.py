"""Names of ops: which ops a pattern in a policy matches, and problems of names that match nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sac.errors import listing, nearest
from sac.ops.facts import traits_of
from sac.ops.registry import NamePattern, Registry, dotted, find_op, find_ops, is_glob, op_name, read_registry
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.policy.patterns import fits_name
from sac.torch_private import OpOverload, has_effects

# -- Problems of op names

_FORMS = "an op (aten.mm, aten::mm), one overload (aten.mm.default), a glob (aten.*mm*)"


@dataclass(frozen=True, slots=True)
class NameProblem:
    """One wrong name: its index in the list, what was found, what is legal, the nearest spelling and the fix.

    The last three may be empty. The fields are those of ``errors.Problem`` except for the location, since only the
    caller knows file:line:column.
    """

    index: int
    text: str
    found: str
    legal: str = ""
    nearest: str = ""
    fix: str = ""


def unknown_name(index: int, text: str, registry: Registry, set_names: Sequence[str]) -> NameProblem | None:
    """Return why no registered op is called ``text``; None for a glob over a library that may be imported later."""
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
        fix="correct the name, or put it into a save-set under `sets:`, where a missing op is skipped",
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
        "`sets:`, where a missing op is skipped",
    )


def _empty_glob(index: int, text: str) -> NameProblem:
    return NameProblem(
        index,
        text,
        f"the glob {text} matches no registered op",
        fix="a glob is compared with whole names such as aten.mm and aten.mm.default; * stands for any characters",
    )


def unsavable_name(index: int, text: str, registry: Registry) -> NameProblem | None:
    """Return why no op that ``text`` names can be saved; None if some op can be saved, and for a glob."""
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


# -- Matchers of op objects, built from the op names of a policy

__all__ = [
    "NameProblem",
    "OpMatcher",
    "check_sets",
    "is_must_save",
    "op_name",
    "resolve_ops",
    "set_names",
]

_NO_SETS: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True, slots=True)
class MatcherEntry:
    """One name of a matcher: written in the policy itself, or part of the save-set ``from_set``."""

    pattern: NamePattern
    condition: str = ""
    from_set: str = ""

    @property
    def names(self) -> bool:
        """Whether this entry names an op explicitly: by its own name or by a save-set, not by a policy's glob."""
        return bool(self.from_set) or not is_glob(self.pattern.text)

    def matches(self, name: str) -> bool:
        """Return whether the op called ``name`` matches; a glob of a save-set never matches a backward op."""
        if self.from_set and is_glob(self.pattern.text) and any(mark in name for mark in BACKWARD_MARKS):
            return False
        return self.pattern.matches(name)


@dataclass(frozen=True, slots=True)
class OpMatcher:
    """Matches op objects against a list of names at run time, including ops that are registered later.

    Matching compares strings, so callers cache the answer per op. With ``for_saving``, an op that can never be saved
    never matches. ``missing`` holds the names and set entries without a registered op; ``problems`` the names that are
    errors; ``functions`` the autograd Functions of its save-sets.
    """

    entries: tuple[MatcherEntry, ...]
    for_saving: bool
    missing: tuple[str, ...] = ()
    problems: tuple[NameProblem, ...] = ()
    functions: tuple[str, ...] = ()

    def matches_unit(self, function: str, unit: str = "") -> bool:
        """Return whether ``*`` is named, or a save-set with the Function whose class has this qualified name."""
        everything = any(entry.pattern.text == "*" for entry in self.entries)
        return everything or (not unit and any(fits_name(pattern, function) for pattern in self.functions))

    def matches(self, op: Any) -> bool:
        """Return whether ``op`` matches, at least for the calls that meet the condition of ``conditional``."""
        if self.for_saving and traits_of(op).unsavable_reason and not traits_of(op).savable_if:
            return False
        return next(self._meaning(op), None) is not None

    def conditional(self, op: Any) -> str:
        """Return the condition, see ``condition_of``, on calls of ``op``; ``""`` if every call matches."""
        conditions = [entry.condition for entry in self._meaning(op)]
        condition = "" if not conditions or "" in conditions else conditions[0]
        own = traits_of(op).savable_if if self.for_saving else ""
        return " & ".join(filter(None, (condition, own)))

    def names(self, op: Any) -> bool:
        """Return whether ``op`` matches by its own name or by a save-set, not only by a glob."""
        return any(entry.names for entry in self._meaning(op))

    def _meaning(self, op: Any) -> Iterator[MatcherEntry]:
        name = op_name(op)
        return (entry for entry in self.entries if entry.matches(name))


def resolve_ops(
    names: Sequence[str],
    extra_sets: Mapping[str, Sequence[str]] = _NO_SETS,
    *,
    for_saving: bool = True,
    registry: Registry | None = None,
) -> OpMatcher:
    """Return a matcher for ``names``: save-sets, packets, overloads, higher-order ops and globs.

    ``extra_sets`` are a policy's own ``sets``: they extend a save-set or define one, and may name other sets. With
    ``for_saving=False`` (the names of a rule that recomputes), ops that cannot be saved are allowed. Raises nothing:
    see ``OpMatcher.problems``, whose ``index`` refers to ``names``. ``registry``: pass one to share it between calls.
    """
    registry = registry or read_registry()
    entries: list[MatcherEntry] = []
    missing: list[str] = []
    problems: list[NameProblem] = []
    for index, text in enumerate(names):
        if text in set_names(extra_sets):
            of_set = tuple(dict.fromkeys(_entries_of(text, extra_sets, ())))
            entries += of_set
            missing += [entry.pattern.text for entry in of_set if not registry.has(entry.pattern)]
            continue
        pattern = NamePattern(dotted(text))
        entries.append(MatcherEntry(pattern))
        if not registry.has(pattern):
            missing.append(text)
            problems += _when(unknown_name(index, text, registry, set_names(extra_sets)))
        elif for_saving:
            problems += _when(unsavable_name(index, text, registry))
    sets = dict.fromkeys(entry.from_set for entry in entries if entry.from_set in SAVE_SETS)
    functions = tuple(pattern for name in sets for pattern in SAVE_SETS[name].functions)
    unique = tuple(dict.fromkeys(entries)), for_saving, tuple(dict.fromkeys(missing))
    return OpMatcher(*unique, tuple(problems), functions)


def set_names(extra_sets: Mapping[str, Sequence[str]] = _NO_SETS) -> tuple[str, ...]:
    """Return the names of all save-sets, including those that a policy defines."""
    return tuple(dict.fromkeys([*SAVE_SETS, *extra_sets]))


def check_sets(extra_sets: Mapping[str, Sequence[str]]) -> dict[str, tuple[NameProblem, ...]]:
    """Return the problems of each set of a policy that has any; ``index`` refers to the list of that set.

    An op of a library that is not imported is not a problem here: it is skipped and listed as missing.
    """
    registry = read_registry()
    found = {name: tuple(_set_problems(texts, extra_sets, registry)) for name, texts in extra_sets.items()}
    return {name: problems for name, problems in found.items() if problems}


def _set_problems(
    texts: Sequence[str], extra_sets: Mapping[str, Sequence[str]], registry: Registry
) -> Iterator[NameProblem]:
    for index, text in enumerate(texts):
        if text in set_names(extra_sets):
            continue
        if registry.has(NamePattern(dotted(text))):
            yield from _when(unsavable_name(index, text, registry))
        elif "." not in dotted(text) or dotted(text).partition(".")[0] in registry.namespaces:
            yield from _when(unknown_name(index, text, registry, set_names(extra_sets)))


def _entries_of(name: str, extra_sets: Mapping[str, Sequence[str]], within: tuple[str, ...]) -> Iterator[MatcherEntry]:
    if name in SAVE_SETS:
        for entry in SAVE_SETS[name].entries:
            yield MatcherEntry(NamePattern(entry.name), entry.condition, name)
    for text in extra_sets.get(name, ()):
        if text == name or text in within:
            continue
        if text in set_names(extra_sets):
            yield from _entries_of(text, extra_sets, (*within, name))
        else:
            yield MatcherEntry(NamePattern(dotted(text)), from_set=name)


def _when(problem: NameProblem | None) -> tuple[NameProblem, ...]:
    return () if problem is None else (problem,)


@cache
def _must_save_matcher() -> OpMatcher:
    return resolve_ops(("nondeterministic",))


@cache  # called for each op in each module of each table
def is_must_save(op: Any) -> tuple[bool, str]:
    """Return whether ``op`` is saved in every mode (promise 10), and the condition on its calls."""
    matcher = _must_save_matcher()
    if matcher.matches(op):
        return True, matcher.conditional(op)
    return isinstance(op, OpOverload) and op.namespace != "c10d" and bool(has_effects(op)), ""
