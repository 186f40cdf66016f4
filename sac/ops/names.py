"""From the op names that a policy writes to a matcher over op objects, with all that is wrong in those names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sac.ops.name_problems import NameProblem, unknown_name, unsavable_name
from sac.ops.registry import NamePattern, Registry, dotted, is_glob, op_name, read_registry
from sac.ops.sets import BACKWARD_MARKS, SAVE_SETS
from sac.ops.traits import traits_of

__all__ = ["NameProblem", "OpMatcher", "check_sets", "is_must_save", "op_name", "resolve_ops", "set_names"]

_NO_SETS: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True, slots=True)
class MatcherEntry:
    """One name of a matcher: written by the policy itself, or brought in by the save-set ``from_set``."""

    pattern: NamePattern
    condition: str = ""
    from_set: str = ""

    @property
    def names(self) -> bool:
        """Whether a policy that matches by this entry can be said to name the op."""
        return bool(self.from_set) or not is_glob(self.pattern.text)

    def matches(self, name: str) -> bool:
        """Return whether the op called ``name`` is meant; a glob of a save-set never means a backward op."""
        if self.from_set and is_glob(self.pattern.text) and any(mark in name for mark in BACKWARD_MARKS):
            return False
        return self.pattern.matches(name)


@dataclass(frozen=True, slots=True)
class OpMatcher:
    """Which ops a list of names means, asked of op objects at run time; ops registered later are found too.

    It compares strings: callers keep the answer per op. With ``for_saving``, an op that can never be saved is never
    meant. ``missing`` are the names and set entries of which no op is registered; ``problems`` are the names that are
    errors.
    """

    entries: tuple[MatcherEntry, ...]
    for_saving: bool
    missing: tuple[str, ...] = ()
    problems: tuple[NameProblem, ...] = ()

    def matches(self, op: Any) -> bool:
        """Return whether ``op`` is meant, at least in the calls for which ``conditional`` holds."""
        if self.for_saving and traits_of(op).unsavable_reason and not traits_of(op).savable_if:
            return False
        return next(self._meaning(op), None) is not None

    def conditional(self, op: Any) -> str:
        """Return the name in ``CONDITIONS`` of what a call has to meet, ``""`` when every call of ``op`` is meant."""
        conditions = [entry.condition for entry in self._meaning(op)]
        condition = "" if not conditions or "" in conditions else conditions[0]
        own = traits_of(op).savable_if if self.for_saving else ""
        return " & ".join(filter(None, (condition, own)))

    def certain(self, op: Any) -> bool:
        """Return whether every call of ``op`` is meant."""
        return self.matches(op) and not self.conditional(op)

    def names(self, op: Any) -> bool:
        """Return whether ``op`` is meant by its own name or by a save-set, and not merely by a glob."""
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
    """Return what ``names`` mean: save-sets, packets, overloads, higher-order ops and globs.

    ``extra_sets`` are a policy's own ``sets``: they add to a save-set or define one, and may name other sets. With
    ``for_saving=False`` (the names of a rule that recomputes) an op that cannot be saved may be named. Raises nothing:
    see ``OpMatcher.problems``, whose ``index`` counts in ``names``. ``registry``: read just now, for several lists.
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
    return OpMatcher(tuple(dict.fromkeys(entries)), for_saving, tuple(dict.fromkeys(missing)), tuple(problems))


def set_names(extra_sets: Mapping[str, Sequence[str]] = _NO_SETS) -> tuple[str, ...]:
    """Return the names of all save-sets, those that a policy defines included."""
    return tuple(dict.fromkeys([*SAVE_SETS, *extra_sets]))


def check_sets(extra_sets: Mapping[str, Sequence[str]]) -> dict[str, tuple[NameProblem, ...]]:
    """Return, per set of a policy that has any, the problems of its entries; ``index`` counts in that set's list.

    An op of a library that is not imported is no problem here: it is skipped, and listed as missing.
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


@cache  # it is asked of each op in each module of each table
def is_must_save(op: Any) -> tuple[bool, str]:
    """Return whether ``op`` is saved in every mode (promise 10), and the condition that a call has to meet for it."""
    matcher = _must_save_matcher()
    return (True, matcher.conditional(op)) if matcher.matches(op) else (False, "")
