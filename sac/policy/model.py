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
from sac.policy.syntax import SourceLocation, yaml_text
from sac.tables import Table, count_text, screen_width, wrapped_text

SCHEMA = "sac/v1"


class Decision(str, Enum):
    """What happens to the output of one op between forward and backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"

    @property
    def keeps(self) -> bool:
        """Whether the output is there in backward without running the op again."""
        return self is not Decision.RECOMPUTE


ALTERNATE = "alternate"  # a rule's fourth `do`: the 1st, 3rd, 5th … match in a region is saved


@dataclass(frozen=True, slots=True)
class Layers:
    """A choice of layers of a stack, in the form that was written; see ``select``.

    At most one of the fields is set (``offset`` belongs to ``every``); if none is set, all layers are chosen.
    ``fraction``, above 0 and at most 1, is a share of the layers: ``round(fraction * count)`` of them, spread evenly
    from the first on, so that each stage of a pipeline has about the same number; 0.5 is every second layer.
    """

    first: int | None = None
    last: int | None = None
    every: int | None = None
    offset: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None  # inclusive on both sides
    fraction: float | None = None

    def select(self, count: int) -> frozenset[int]:
        """Return the chosen indices out of ``range(count)``."""
        if self.first is not None:
            return frozenset(range(min(self.first, count)))
        if self.last is not None:
            return frozenset(range(max(0, count - self.last), count))
        if self.every is not None:
            return frozenset(range(self.offset, count, self.every))
        if self.ranges is not None:
            return frozenset(i for low, high in self.ranges for i in range(low, min(high, count - 1) + 1))
        if self.fraction is not None:
            chosen = round(self.fraction * count)
            return frozenset(index * count // chosen for index in range(chosen))
        return frozenset(range(count))

    @property
    def written(self) -> Any:
        """The form that was written, as plain values."""
        if self.ranges is not None:
            return [low if low == high else f"{low}-{high}" for low, high in self.ranges]
        forms = {"first": self.first, "last": self.last, "every": self.every, "fraction": self.fraction}
        chosen = {form: value for form, value in forms.items() if value is not None}
        return (chosen | {"offset": self.offset} if self.every else chosen) or "all"

    @property
    def is_all(self) -> bool:
        """Whether every layer is chosen, whatever their number."""
        return self == Layers()

    @property
    def needs_count(self) -> bool:
        """Whether the choice depends on the number of layers."""
        return self.last is not None or self.fraction is not None


@dataclass(frozen=True, slots=True)
class Chunks:
    """All layers of a stack, with ``size`` consecutive layers as one region; the last chunk may be shorter.

    ``size`` None means the square root of the number of layers, rounded up. Memory then holds the inputs of ``sqrt(n)``
    chunks, plus, in backward, the activations of ``sqrt(n)`` layers. (Single layers hold ``n`` inputs and the
    activations of one layer, which is less as long as these are many times the size of an input.)
    """

    size: int | None = None

    def select(self, count: int) -> frozenset[int]:
        """Return the chosen indices out of ``range(count)``: all of them."""
        return frozenset(range(count))

    def spans(self, count: int) -> tuple[range, ...]:
        """Return the layers of each chunk as ranges within ``range(count)``."""
        size = self.size or math.isqrt(max(count - 1, 0)) + 1
        return tuple(range(first, min(first + size, count)) for first in range(0, count, size))


@dataclass(frozen=True, slots=True)
class Calls:
    """A choice of calls of one op inside one module of a region: by index, or every k-th from an offset (from 0 on)."""

    index: frozenset[int] | None = None
    every: int | None = None
    offset: int = 0

    def matches(self, call: int) -> bool:
        """Return whether call number ``call`` (from 0) is chosen."""
        if self.index is not None:
            return call in self.index
        return call >= self.offset and (call - self.offset) % (self.every or 1) == 0

    @property
    def written(self) -> Any:
        """The form that was written, as plain values."""
        return {"every": self.every, "offset": self.offset} if self.index is None else {"index": sorted(self.index)}


_COMPARISONS = {
    "==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a shape pattern: ``op`` is ``_`` (any size), ``==``, ``!=``, ``>=``, ``<=``, ``>`` or ``<``.

    The first of a shape may be ``...``: any number of leading dimensions, including zero (see ``Rule.fits_shape``).
    """

    op: str = "_"
    size: int = 0

    def matches(self, size: int) -> bool:
        """Return whether a dimension of ``size`` elements matches."""
        return self.op not in _COMPARISONS or bool(_COMPARISONS[self.op](size, self.size))

    @property
    def written(self) -> Any:
        """The form that was written, as plain values."""
        if self.op == "==":
            return self.size
        return f"{self.op}{self.size}" if self.op in _COMPARISONS else self.op


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: matchers of calls, and the decision for matched calls. A matcher that is None or empty matches all.

    At most one of ``ops``, ``functions`` and ``units`` is set; without them, the rule matches modules as a whole.
    """

    id: str
    do: str  # a Decision's value, or ALTERNATE
    ops: tuple[str, ...] = ()  # as written: save-sets, packets, overloads, globs
    module: PathPattern | None = None  # relative to the region
    layers: Layers | None = None
    call: Calls | None = None
    shape: tuple[Dim, ...] | None = None
    dtype: tuple[str, ...] = ()  # torch dtype names without "torch."
    optional: bool = False
    blocks: tuple[PathPattern, ...] = ()  # paths of regions, from the model down
    functions: tuple[str, ...] = field(default=(), kw_only=True)  # names or globs of autograd Functions' classes
    units: tuple[str, ...] = field(default=(), kw_only=True)  # names or globs of pieces named by ``sac.unit``
    location: SourceLocation = field(default=SourceLocation("<policy>"), compare=False)
    key_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)
    op_locations: tuple[SourceLocation, ...] = field(default=(), compare=False, hash=False)  # one per entry of ops
    origin: str = field(default="", compare=False)  # the policy that contains it, possibly a parent by `extends`

    @property
    def matches_module(self) -> bool:
        """Whether this is a whole-module rule: `module` without `ops`, `function` and `unit`."""
        return not (self.ops or self.functions or self.units)

    def matches_unit(self, function: str, unit: str = "") -> bool:
        """Return whether `function` or `unit` names this unit.

        ``function`` is the qualified name of its class, ``unit`` its name under ``sac.unit``, empty where it has none.
        """
        if unit:
            return any(fnmatchcase(unit, pattern) for pattern in self.units)
        return any(fits_name(pattern, function) for pattern in self.functions)

    @property
    def what_text(self) -> str:
        """What the rule matches, in the words of a policy file."""
        kinds = (("", self.ops), ("function ", self.functions), ("unit ", self.units))
        return next((kind + ", ".join(names) for kind, names in kinds if names), "(the module as a whole)")

    @property
    def kept_as(self) -> Decision:
        """The decision on a match; of an alternating rule, on those that it keeps."""
        return Decision.SAVE if self.do == ALTERNATE else Decision(self.do)

    def keeps_turn(self, turn: int) -> bool:
        """Return whether an alternating rule keeps its match number ``turn`` (from 0) in a region."""
        return turn % 2 == 0

    @property
    def matches_each_call(self) -> bool:
        """Whether it matches every call of the ops that it names, whatever their number, shape and dtype."""
        return self.call is None and self.shape is None and not self.dtype

    @property
    def is_for_some_regions(self) -> bool:
        """Whether `blocks` or `layers` may exclude regions."""
        return bool(self.blocks) or self.layers is not None

    def matches_region(self, path: str, layer: int, stack_size: int) -> bool:
        """Return whether the region at ``path``, which is ``layer`` of ``stack_size``, is meant."""
        if self.blocks and not any(pattern.matches(path) for pattern in self.blocks):
            return False
        return self.layers is None or layer in self.layers.select(stack_size)

    def fits_shape(self, sizes: Sequence[int]) -> bool:
        """Return whether a tensor of ``sizes`` matches the rule's ``shape``."""
        dims, sizes = self.shape or (), tuple(sizes)
        if dims and dims[0].op == "...":
            dims = dims[1:]
            sizes = sizes[max(0, len(sizes) - len(dims)) :]
        elif self.shape is None:
            return True
        return len(dims) == len(sizes) and all(dim.matches(size) for dim, size in zip(dims, sizes, strict=True))

    def where(self, key: str = "") -> str:
        """Return the source location of the rule, or of one of its keys, for a message."""
        return str(self.key_locations.get(key, self.location))


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """What a plan costs next to the usual choices, as it is shown.

    ``heading``: lines on the budget and the peaks; ``notes``: lines after the table; ``yaml``: the policy as YAML with
    the figures in comments; ``size``: the batch or length that was chosen, if several were tried.
    """

    heading: tuple[str, ...]
    table: Table
    notes: tuple[str, ...]
    yaml: str
    size: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Policy:
    """An ordered list of rules plus a default. The first match wins; a child's rules come before its parent's.

    ``figures`` are those of the plan, for a policy that ``sac.plan`` has just computed.
    """

    name: str
    rules: tuple[Rule, ...] = ()
    default: Decision = Decision.RECOMPUTE
    models: tuple[str, ...] = ()  # model_type or class-name globs
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    set_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)
    blocks: tuple[PathPattern, ...] = ()  # empty: the blocks are found
    layers: Layers = Layers()
    extends: tuple[str, ...] = field(default=(), compare=False)  # parents, nearest first; `rules` includes theirs
    source: str = field(default="<policy>", compare=False)
    key_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)
    figures: PlanFigures | None = field(default=None, compare=False)

    def to_yaml(self) -> str:
        """Return the policy as YAML that loads to an equal policy; a plan has its figures in comments."""
        return dump_policy(self) if self.figures is None else self.figures.yaml

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a YAML file, which ``sac.load_policy`` and configs read; replaces a file that exists.

        Rules inherited by ``extends`` are written out. Raises ``PolicyError`` if the file cannot be written.
        """
        file = Path(path).expanduser()
        try:
            file.write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            found = f"the file cannot be written: {error.strerror}"
            raise PolicyError(Problem(os.fspath(path), found)) from error

    def table(self) -> str:
        """Return a table as text: of a plan its cost next to the usual choices, otherwise a row per rule."""
        made, width = self.figures, screen_width()
        above = (self.title(),) if made is None else made.heading
        table = self._rules() if made is None else made.table
        below = (self.rest(),) if made is None else made.notes
        return "\n".join([wrapped_text(above, width), table.text(width), wrapped_text(below, width)])

    def title(self) -> str:
        """Return one line with source, name, parents and families of models."""
        family = f", for {', '.join(self.models)}" if self.models else ""
        parents = f", extends {', '.join(self.extends)}" if self.extends else ""
        return f"{self.source}: policy {self.name}{parents}{family}"

    def _rules(self) -> Table:
        rows = [(rule.id, rule.do, rule.what_text, "; ".join(limits_of(rule)), rule.origin) for rule in self.rules]
        return Table(("rule", "do", "ops", "only where", "of policy"), tuple(rows), optional=("of policy",))

    def rest(self) -> str:
        """Return one line with the default, and how layers are counted."""
        return f"everything else: {self.default.value}; {_in_a_line(layers=self.layers.written)}"

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        rules = count_text(len(self.rules), "rule")
        return f"<Policy {self.name}: {rules}, everything else: {self.default.value}; print() shows all>"

    def where(self, key: str = "") -> str:
        """Return the source location of the policy, or of one of its top-level keys, for a message."""
        return str(self.key_locations.get(key, SourceLocation(self.source)))


# -- Policies and rules as YAML


def dump_policy(policy: Policy) -> str:
    """Return ``policy`` as a YAML text that loads to an equal policy.

    The text is self-contained: rules inherited by ``extends`` are written out.
    """
    written: dict[str, Any] = {"schema": SCHEMA, "name": policy.name}
    if policy.models:
        written["models"] = _plain(policy.models)
    if policy.sets:
        written["sets"] = {name: _plain(ops) for name, ops in policy.sets.items()}
    regions = {"blocks": _plain(policy.blocks)} if policy.blocks else {}
    regions |= {} if policy.layers.is_all else {"layers": policy.layers.written}
    if regions:
        written["regions"] = regions
    rules = [{"id": rule.id, **_matchers(rule), "do": rule.do} for rule in policy.rules]
    return yaml_text(written | {"default": policy.default.value, "rules": rules})


def limits_of(rule: Rule) -> list[str]:
    """Return a rule's matchers other than its ops, each as in a policy file: ``layers: {first: 2}``."""
    what = ("ops", "function", "unit")
    return [_in_a_line(**{key: value}) for key, value in _matchers(rule).items() if key not in what]


def _in_a_line(**entry: Any) -> str:
    return yaml_text(entry, flow=True, width=math.inf).strip()[1:-1]


FIELDS = {"ops": "ops", "function": "functions", "unit": "units"}  # of ``Rule``, by key of a policy file
FIELDS |= {key: key for key in ("blocks", "module", "layers", "call", "shape", "dtype", "optional")}


def _matchers(rule: Rule) -> dict[str, Any]:
    matchers = {key: getattr(rule, name) for key, name in FIELDS.items()}
    return {key: _plain(value) for key, value in matchers.items() if value not in (None, (), False)}


def _plain(value: Any) -> Any:
    """Return a value of a policy as plain values; a list of one text is the text."""
    if isinstance(value, tuple):
        values = [_plain(one) for one in value]
        return values[0] if len(values) == 1 and isinstance(value[0], str | PathPattern) else values
    if isinstance(value, PathPattern):
        return value.text
    return value.written if isinstance(value, Layers | Calls | Dim) else value
