"""The content of a policy as plain values, independent of torch and models; as YAML and as a table.

Two policies are equal if they have the same meaning: source locations, origin, source and parents are not compared.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sac.errors import PolicyError, Problem
from sac.policy.patterns import PathPattern, fits_name
from sac.policy.syntax import yaml_text
from sac.tables import count_text, screen_width, wrapped_text

SCHEMA = "sac/v1"


class Decision(str, Enum):
    """What happens to the output of one op between forward and backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"

    keeps: bool  # whether the output is there in backward without running the op again

    def __init__(self, value: str) -> None:
        self.keeps = value != "recompute"


ALTERNATE = "alternate"  # a rule's fourth `do`: the 1st, 3rd, 5th … match in a region is saved


@dataclass(frozen=True, slots=True)
class Layers:
    """A choice of the layers of a stack, or of the calls of an op in one module of a region, numbered from 0.

    ``form`` is the written form, and ``value`` what it says: ``all``; ``first`` and ``last`` so many; ``every`` k-th
    from ``offset`` on; ``index``: these numbers; ``numbers``: pairs of numbers, inclusive on both sides; ``fraction``,
    above 0 and at most 1: ``round(fraction * count)`` layers, spread evenly from the first on, so that each stage of a
    pipeline has about the same number; ``uniform``: all layers, with so many consecutive layers as one region (a chunk;
    the last may be shorter). Chunks of ``uniform`` None have the square root of the number of layers, rounded up.
    """

    form: str = "all"
    value: Any = None
    offset: int = 0

    def matches(self, number: int, count: int | None = None) -> bool:
        """Return whether ``number`` out of ``range(count)`` is chosen; ``last`` and ``fraction`` need ``count``."""
        numbers = range(number + 1 if count is None else count)
        match self.form:
            case "first":
                return number in numbers[: self.value]
            case "last":
                return number in numbers[-self.value :]
            case "every":
                return number in numbers[self.offset :: self.value]
            case "numbers":
                return any(low <= number <= high for low, high in self.value)
            case "index":
                return number in self.value
            case "fraction":
                chosen = round(self.value * len(numbers))
                return any(index * len(numbers) // chosen == number for index in range(chosen))
        return True

    def spans(self, count: int) -> tuple[range, ...]:
        """Return the layers of each chunk as ranges within ``range(count)``."""
        size = self.value or math.isqrt(max(count - 1, 0)) + 1
        return tuple(range(first, min(first + size, count)) for first in range(0, count, size))

    @property
    def written(self) -> Any:
        """The form that was written, as plain values."""
        if self.form == "numbers":
            return [low if low == high else f"{low}-{high}" for low, high in self.value]
        if self.form == "all":
            return "all"
        return {self.form: self.value} | ({"offset": self.offset} if self.form == "every" else {})


ALL = Layers()
_COMPARISONS = {
    "": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt
}  # fmt: skip


def _dim_fits(dim: str | int, size: int) -> bool:
    sign = str(dim).rstrip("0123456789")
    return sign == "_" or bool(_COMPARISONS[sign](size, int(str(dim).removeprefix(sign))))


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: matchers of calls, and the decision for matched calls. A matcher that is None or empty matches all.

    At most one of ``ops``, ``function`` and ``unit`` is set; without them, the rule matches modules as a whole.
    """

    id: str
    do: str  # a Decision's value, or ALTERNATE
    ops: tuple[str, ...] = ()  # as written: save-sets, packets, overloads, globs
    module: PathPattern | None = None  # relative to the region
    layers: Layers | None = None
    call: Layers | None = None
    shape: tuple[str | int, ...] | None = None  # as written: `_`, 128, `>=4096`; first `...`: any dimensions
    dtype: tuple[str, ...] = ()  # torch dtype names without "torch."
    optional: bool = False
    blocks: tuple[PathPattern, ...] = ()  # paths of regions, from the model down
    function: tuple[str, ...] = field(default=(), kw_only=True)  # names or globs of autograd Functions' classes
    unit: tuple[str, ...] = field(default=(), kw_only=True)  # names or globs of pieces named by ``sac.unit``
    location: str = field(default="<policy>", compare=False)
    key_locations: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    origin: str = field(default="", compare=False)  # the policy that contains it, possibly a parent by `extends`

    @property
    def matches_module(self) -> bool:
        """Whether this is a whole-module rule: `module` without `ops`, `function` and `unit`."""
        return not (self.ops or self.function or self.unit)

    def matches_unit(self, function: str, unit: str = "") -> bool:
        """Return whether `function` or `unit` names this unit.

        ``function`` is the qualified name of its class, ``unit`` its name under ``sac.unit``, empty where it has none.
        """
        if unit:
            return any(fnmatchcase(unit, pattern) for pattern in self.unit)
        return any(fits_name(pattern, function) for pattern in self.function)

    @property
    def what_text(self) -> str:
        """What the rule matches, in the words of a policy file."""
        kinds = (("", self.ops), ("function ", self.function), ("unit ", self.unit))
        return next((kind + ", ".join(names) for kind, names in kinds if names), "(the module as a whole)")

    @property
    def matches_each_call(self) -> bool:
        """Whether it matches every call of the ops that it names, whatever their number, shape and dtype."""
        return self.call is None and self.shape is None and not self.dtype

    def matches_region(self, path: str, layer: int, stack_size: int) -> bool:
        """Return whether the region at ``path``, which is ``layer`` of ``stack_size``, is meant."""
        if self.blocks and not any(pattern.matches(path) for pattern in self.blocks):
            return False
        return self.layers is None or self.layers.matches(layer, stack_size)

    def takes_all_of(self, later: Rule) -> bool:
        """Return whether this rule matches all that ``later`` matches, as far as their texts tell."""
        for key in NAMING:
            names, others = getattr(self, key), getattr(later, key)
            if bool(names) != bool(others) or not ("*" in names or set(names) >= set(others)):
                return False
        return all(getattr(self, key) in (None, (), ALL, getattr(later, key)) for key in LIMITS)

    def fits_shape(self, sizes: Sequence[int]) -> bool:
        """Return whether a tensor of ``sizes`` matches the rule's ``shape``."""
        dims, sizes = self.shape or (), tuple(sizes)
        if dims[:1] == ("...",):
            dims = dims[1:]
            sizes = sizes[max(0, len(sizes) - len(dims)) :]
        return not self.shape or (len(dims) == len(sizes) and all(map(_dim_fits, dims, sizes)))

    def where(self, key: str = "") -> str:
        """Return the source location of the rule, or of one of its keys (``ops``, ``ops[0]``), for a message."""
        return self.key_locations.get(key, self.location)


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """An ordered list of rules plus a default. The first match wins; a child's rules come before its parent's.

    ``figures``: the planner's ``Plan``, for a policy that ``sac.plan`` has just computed.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    default: Decision = Decision.RECOMPUTE
    models: tuple[str, ...] = ()  # model_type or class-name globs
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    blocks: tuple[PathPattern, ...] = ()  # empty: the blocks are found
    layers: Layers = ALL
    extends: tuple[str, ...] = field(default=(), compare=False)  # parents, nearest first; `rules` includes theirs
    source: str = field(default="<policy>", compare=False)
    key_locations: Mapping[str, str] = field(default_factory=dict, compare=False, hash=False)
    figures: Any = field(default=None, compare=False)

    def to_yaml(self) -> str:
        """Return the policy as YAML that loads to an equal policy; a plan has its figures in comments.

        The text is self-contained: rules inherited by ``extends`` are written out.
        """
        if self.figures is not None:
            return str(self.figures.text())
        regions = {"blocks": self.blocks, "layers": None if self.layers == ALL else self.layers}
        written: dict[str, Any] = {"schema": SCHEMA, "name": self.name, "models": self.models}
        written |= {"sets": _plain_values(self.sets), "regions": _plain_values(regions)}
        rules = [{"id": rule.id, **_matchers(rule), "do": rule.do} for rule in self.rules]
        return yaml_text(_plain_values(written) | {"default": self.default.value, "rules": rules})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a YAML file, which ``sac.load_policy`` and configs read; replaces a file that exists.

        Raises ``PolicyError`` if the file cannot be written.
        """
        try:
            Path(path).expanduser().write_text(self.to_yaml(), encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a lone surrogate, or a NUL in the name
            found = f"the file cannot be written: {getattr(error, 'strerror', None) or error}"
            raise PolicyError(Problem(os.fspath(path), found)) from error

    def table(self) -> str:
        """Return a plan's cost next to the usual choices as a table; another policy as YAML."""
        if self.figures is None:
            return self.to_yaml()
        width, plan = screen_width(), self.figures
        parts = wrapped_text(plan.heading(), width), plan.table().text(width), wrapped_text(plan.notes, width)
        return "\n".join(parts)

    __str__ = table

    def __repr__(self) -> str:
        rules = count_text(len(self.rules), "rule")
        return f"<Policy {self.name}: {rules}, everything else: {self.default.value}; print() shows all>"

    def where(self, key: str = "") -> str:
        """Return the source location of the policy, of a key, or of ``sets.name``, for a message."""
        return self.key_locations.get(key, self.source)


# -- Rules as plain values


def limits_of(rule: Rule) -> list[str]:
    """Return a rule's matchers other than its ops, each as in a policy file: ``layers: {first: 2}``."""
    limits = [{key: value} for key, value in _matchers(rule).items() if key not in NAMING]
    return [yaml_text(limit, flow=True, width=math.inf).strip()[1:-1] for limit in limits]


NAMING = ("ops", "function", "unit")  # at most one of them in a rule
LIMITS = ("blocks", "module", "layers", "call", "shape", "dtype")


def _matchers(rule: Rule) -> dict[str, Any]:
    return _plain_values({key: getattr(rule, key) for key in (*NAMING, *LIMITS, "optional")})


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is set of the values of a mapping, as plain values."""
    return {key: _plain(value) for key, value in values.items() if value not in (None, (), False, {})}


def _plain(value: Any) -> Any:
    """Return a value of a policy as plain values; a list of one text is the text."""
    if isinstance(value, tuple):
        values = [_plain(one) for one in value]
        return values[0] if len(values) == 1 and isinstance(value[0], str | PathPattern) else values
    return value.written if isinstance(value, Layers) else getattr(value, "text", value)  # of a pattern
