"""The content of a policy as plain values, independent of torch and models; as YAML and as a table.

Two policies are equal if they have the same meaning: source locations, origin, source and parents are not compared.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import yaml

from sac.errors import PolicyError, Problem
from sac.policy.patterns import PathPattern, fits_name
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
class SourceLocation:
    """The place of a value in a file; ``line`` and ``column`` count from 1, and are 0 for a value without a file."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


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
        if self.every is not None:
            return call >= self.offset and (call - self.offset) % self.every == 0
        return True


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a shape pattern: ``op`` is ``any``, ``==``, ``!=``, ``>=``, ``<=``, ``>`` or ``<``.

    The first of a shape may be ``...``: any number of leading dimensions, including zero (see ``Rule.fits_shape``).
    """

    op: str = "any"
    size: int = 0

    def matches(self, size: int) -> bool:
        """Return whether a dimension of ``size`` elements matches."""
        match self.op:
            case "any" | "...":
                return True
            case "==":
                return size == self.size
            case "!=":
                return size != self.size
            case ">=":
                return size >= self.size
            case "<=":
                return size <= self.size
            case ">":
                return size > self.size
            case _:
                return size < self.size


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
    def do_text(self) -> str:
        """What it does, in the words of a policy file."""
        return str.__str__(self.do)  # a Decision is a str too, but prints as its name

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
        return _is_meant(self.blocks, self.layers, path, layer, stack_size)

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


def _is_meant(blocks: tuple[PathPattern, ...], layers: Layers | None, path: str, layer: int, stack_size: int) -> bool:
    if blocks and not any(pattern.matches(path) for pattern in blocks):
        return False
    return layers is None or layer in layers.select(stack_size)


_RULE_COLUMNS = ("rule", "do", "ops", "only where", "of policy")


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
        rows = [
            (
                rule.id,
                rule.do_text,
                rule.what_text,
                "; ".join(limits_of(rule)),
                rule.origin,
            )
            for rule in self.rules
        ]
        return Table(_RULE_COLUMNS, tuple(rows), optional=("of policy",))

    def rest(self) -> str:
        """Return one line with the default, and how layers are counted."""
        return f"everything else: {self.default.value}; layers: {layers_text(self.layers)}"

    def __str__(self) -> str:
        return self.table()

    def __repr__(self) -> str:
        rules = count_text(len(self.rules), "rule")
        return f"<Policy {self.name}: {rules}, everything else: {self.default.value}; print() shows all>"

    def where(self, key: str = "") -> str:
        """Return the source location of the policy, or of one of its top-level keys, for a message."""
        return str(self.key_locations.get(key, SourceLocation(self.source)))


# -- Rules and layers as short texts, in the words of a policy file


def limits_of(rule: Rule) -> list[str]:
    """Return a rule's matchers other than its ops, each as a short text in the words of a policy file."""
    limits = []
    if rule.blocks:
        limits.append(f"blocks {' or '.join(pattern.text for pattern in rule.blocks)}")
    if rule.module is not None:
        limits.append(f"module {rule.module.text or '(the block)'}")
    if rule.layers is not None:
        limits.append(f"layers {layers_text(rule.layers)}")
    if rule.call is not None:
        limits.append(f"call {_call_text(rule.call)}")
    if rule.shape is not None:
        limits.append(f"shape [{', '.join(map(_dim_text, rule.shape))}]")
    if rule.dtype:
        limits.append(f"dtype {' or '.join(rule.dtype)}")
    if rule.optional:
        limits.append("optional")
    return limits


def layers_text(layers: Layers) -> str:
    """Return a choice of layers as a short text."""
    if layers.first is not None:
        return f"first {layers.first}"
    if layers.last is not None:
        return f"last {layers.last}"
    if layers.every is not None:
        return f"every {layers.every} from {layers.offset}"
    if layers.ranges is not None:
        return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in layers.ranges)
    if layers.fraction is not None:
        return f"fraction {layers.fraction}"
    return "all"


def _call_text(call: Calls) -> str:
    if call.index is not None:
        return ", ".join(map(str, sorted(call.index)))
    return f"every {call.every} from {call.offset}"


def _dim_text(dim: Dim) -> str:
    if dim.op in ("any", "..."):
        return "_" if dim.op == "any" else "..."
    return str(dim.size) if dim.op == "==" else f"{dim.op}{dim.size}"


# -- Kinds of unquoted scalars, by the rules of YAML 1.2: `on`, `no` and `1:8` are text, `1e-3` is a number

ScalarType: TypeAlias = Literal["text", "null", "bool", "int", "float", "other"]
_KINDS: tuple[tuple[ScalarType, str], ...] = (
    ("null", r"(~|null|Null|NULL)?"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"),
)


def plain_type(text: str) -> ScalarType:
    """Return the kind of an unquoted scalar."""
    return next((kind for kind, pattern in _KINDS if re.fullmatch(pattern, text)), "text")


# -- A policy as YAML


def dump_policy(policy: Policy) -> str:
    """Return ``policy`` as a YAML text that loads to an equal policy.

    The text is self-contained: rules inherited by ``extends`` are written out.
    """
    written: dict[str, object] = {"schema": SCHEMA, "name": policy.name}
    if policy.models:
        written["models"] = list(policy.models)
    if policy.sets:
        written["sets"] = {name: list(ops) for name, ops in policy.sets.items()}
    regions: dict[str, object] = {}
    if policy.blocks:
        regions["blocks"] = [pattern.text for pattern in policy.blocks]
    if not policy.layers.is_all:
        regions["layers"] = _layers(policy.layers)
    if regions:
        written["regions"] = regions
    written["default"] = policy.default.value
    written["rules"] = [_rule(rule) for rule in policy.rules]
    return yaml.dump(written, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 (handled by PyYAML) or YAML 1.2 (handled here) would not read as text."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def write_text(self, text: str) -> yaml.ScalarNode:
        style = "'" if plain_type(text) != "text" else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.write_text)


def _patterns(patterns: tuple[PathPattern, ...]) -> object:
    return patterns[0].text if len(patterns) == 1 else [pattern.text for pattern in patterns]


def _rule(rule: Rule) -> dict[str, object]:
    written: dict[str, object] = {"id": rule.id}
    for key, names in (("ops", rule.ops), ("function", rule.functions), ("unit", rule.units)):
        if names:
            written[key] = names[0] if len(names) == 1 else list(names)
    if rule.blocks:
        written["blocks"] = _patterns(rule.blocks)
    if rule.module is not None:
        written["module"] = rule.module.text
    if rule.layers is not None:
        written["layers"] = _layers(rule.layers)
    if rule.call is not None:
        written["call"] = _call(rule.call)
    if rule.shape is not None:
        written["shape"] = [_dim(dim) for dim in rule.shape]
    if rule.dtype:
        written["dtype"] = list(rule.dtype)
    if rule.optional:
        written["optional"] = True
    written["do"] = rule.do_text
    return written


def _layers(layers: Layers) -> object:
    if layers.is_all:
        return "all"
    if layers.ranges is not None:
        return [low if low == high else f"{low}-{high}" for low, high in layers.ranges]
    if layers.every is not None:
        return {"every": layers.every, "offset": layers.offset}
    if layers.fraction is not None:
        return {"fraction": layers.fraction}
    return {"first": layers.first} if layers.first is not None else {"last": layers.last}


def _call(call: Calls) -> object:
    if call.index is not None:
        return {"index": sorted(call.index)}
    return {"every": call.every or 1, "offset": call.offset if call.every else 0}


def _dim(dim: Dim) -> object:
    if dim.op in ("any", "..."):
        return "_" if dim.op == "any" else "..."
    return dim.size if dim.op == "==" else f"{dim.op}{dim.size}"
