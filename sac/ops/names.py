"""Names of ops: which ops a pattern in a policy matches, and problems of names that match nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sac.errors import Problem, listing, nearest
from sac.ops.facts import traits_of
from sac.ops.registry import NamePattern, Registry, dotted, find_ops, is_glob, op_name, read_registry
from sac.ops.save_sets import BACKWARD_MARKS, SAVE_SETS
from sac.policy.patterns import fits_name
from sac.torch_private import OpOverload, has_effects

# -- Problems of op names

_FORMS = "an op (aten.mm, aten::mm), one overload (aten.mm.default), a glob (aten.*mm*)"


def unknown_name(text: str, registry: Registry, set_names: Sequence[str]) -> Problem | None:
    """Return why no registered op is called ``text``; None for a glob over a library that may be imported later.

    The location is empty: only the caller knows it.
    """
    name = dotted(text)
    if is_glob(name):
        fix = "a glob is compared with whole names such as aten.mm and aten.mm.default; * stands for any characters"
        found = f"the glob {text} matches no registered op"
        return Problem("", found, fix=fix) if name.startswith("aten.") else None
    namespace, *rest = parts = name.split(".")
    if not all(part.isidentifier() for part in parts) or len(parts) > 3:
        return Problem("", f'"{text}" is not the name of an op', f"a save-set ({listing(set_names)}), {_FORMS}")
    if not rest:
        guesses = (f"{one}.{text}" for one in ("aten", "higher_order", "prims"))
        near = next((guess for guess in guesses if guess in registry.packets), "") or nearest(text, set_names)
        fix = "write an op with its namespace, or define the set under `sets:`"
        return Problem("", f'unknown save-set "{text}"', f"{listing(set_names)}; or {_FORMS}", near, fix)
    packet = f"{namespace}.{rest[0]}"
    if packet in registry.packets:
        legal = [f"{packet}.{overload}" for overload in registry.packets[packet]] or [packet]
        fix = f"write {packet} to mean all its overloads"
        return Problem("", f"{packet} has no overload {rest[-1]}", listing(legal), nearest(name, legal), fix)
    namespaces = dict.fromkeys(known.partition(".")[0] for known in registry.packets)
    near = nearest(f"{nearest(namespace, namespaces)}.{rest[0]}", registry.packets)
    if namespace in namespaces:
        fix = "correct the name: `sac trace` without --policy lists the ops that a model runs, by their names"
        return Problem("", f"no op {packet} is registered", nearest=near, fix=fix)
    fix = "import the library that registers it before sac reads the policy, or put the name into a save-set under "
    fix += "`sets:`, where a missing op is skipped"
    return Problem("", f"no op of a namespace {namespace} is registered", nearest=near, fix=fix)


def unsavable_name(text: str, registry: Registry) -> Problem | None:
    """Return why no op that ``text`` names can be saved; None if some op can be saved, and for a glob."""
    name = dotted(text)
    if is_glob(name):
        return None
    traits = [traits_of(op) for op in find_ops(name, registry.packets.get(name, ()))]
    if not traits or any(known.savable or known.savable_if for known in traits):
        return None
    fix = "leave it out: it is run again in backward"
    packet = ".".join(name.split(".")[:2])
    functional = packet.rstrip("_")
    if functional != packet and functional in registry.packets:
        fix = f"name the form that does not write, {functional}, or {fix}"
    elif traits[0].is_view:
        fix = "name the op that makes the tensor it looks at; the view costs nothing to make again"
    return Problem("", f"{name} cannot be saved: {traits[0].unsavable_reason}", fix=fix)


# -- Matchers of op objects, built from the op names of a policy

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
    never matches. ``missing`` holds the names and set entries without a registered op; ``problems`` the problems of
    names, by index; ``functions`` the autograd Functions of its save-sets.
    """

    entries: tuple[MatcherEntry, ...]
    for_saving: bool
    missing: tuple[str, ...] = ()
    problems: Mapping[int, Problem] = field(default_factory=dict, hash=False)
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
        return condition or (traits_of(op).savable_if if self.for_saving else "")

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
    see ``OpMatcher.problems``. ``registry``: pass one to share it between calls.
    """
    registry = registry or read_registry()
    entries: list[MatcherEntry] = []
    missing: list[str] = []
    problems: dict[int, Problem | None] = {}
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
            problems[index] = unknown_name(text, registry, set_names(extra_sets))
        elif for_saving:
            problems[index] = unsavable_name(text, registry)
    sets = dict.fromkeys(entry.from_set for entry in entries if entry.from_set in SAVE_SETS)
    functions = tuple(pattern for name in sets for pattern in SAVE_SETS[name].functions)
    found = {index: problem for index, problem in problems.items() if problem is not None}
    return OpMatcher(tuple(dict.fromkeys(entries)), for_saving, tuple(dict.fromkeys(missing)), found, functions)


def set_names(extra_sets: Mapping[str, Sequence[str]] = _NO_SETS) -> tuple[str, ...]:
    """Return the names of all save-sets, including those that a policy defines."""
    return tuple(dict.fromkeys([*SAVE_SETS, *extra_sets]))


def check_sets(extra_sets: Mapping[str, Sequence[str]]) -> dict[str, list[Problem]]:
    """Return the problems of each set of a policy that has any.

    An op of a library that is not imported is not a problem here: it is skipped and listed as missing.
    """
    registry = read_registry()
    problems: dict[str, list[Problem]] = {}
    for set_name, texts in extra_sets.items():
        for index, problem in resolve_ops(texts, extra_sets, registry=registry).problems.items():
            namespace, _, rest = dotted(texts[index]).partition(".")
            if not rest or any(packet.startswith(f"{namespace}.") for packet in registry.packets):
                problems.setdefault(set_name, []).append(problem)
    return problems


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
