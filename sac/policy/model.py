"""The content of a policy as plain values, independent of torch, files and models.

Two policies are equal if they have the same meaning: source locations, origin, source and parents are not compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from sac.policy.patterns import PathPattern


class Decision(str, Enum):
    """What happens to the output of one op between forward and backward."""

    SAVE = "save"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


ALTERNATE = "alternate"  # a rule's fourth `do`: save its 1st, 3rd, 5th … match in a region, recompute the others


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
    """A rule: matchers of calls, and the decision for matched calls. A matcher that is None or empty matches all."""

    id: str
    do: str  # a Decision's value, or ALTERNATE
    ops: tuple[str, ...] = ()  # as written: save-sets, packets, overloads, globs; empty: the module as a whole
    module: PathPattern | None = None  # relative to the region
    layers: Layers | None = None
    call: Calls | None = None
    shape: tuple[Dim, ...] | None = None
    dtype: tuple[str, ...] = ()  # torch dtype names without "torch."
    min_bytes: int = 0
    optional: bool = False
    blocks: tuple[PathPattern, ...] = ()  # paths of regions, from the model down
    location: SourceLocation = field(default=SourceLocation("<policy>"), compare=False)
    key_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)
    op_locations: tuple[SourceLocation, ...] = field(default=(), compare=False, hash=False)  # one per entry of ops
    origin: str = field(default="", compare=False)  # the policy that contains it, possibly a parent by `extends`

    @property
    def matches_module(self) -> bool:
        """Whether this is a whole-module rule: `module` without `ops`."""
        return not self.ops

    @property
    def matches_each_call(self) -> bool:
        """Whether it matches every call of the ops that it names, whatever their number, shape, dtype and size."""
        return self.call is None and self.shape is None and not self.dtype and not self.min_bytes

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
class PlannedRegion:
    """Regions of a plan; ``signature`` identifies the ops they ran when planned, see ``sac.recompute.op_trace``."""

    blocks: tuple[PathPattern, ...]
    layers: Layers | None
    signature: str  # sixteen hex digits
    location: SourceLocation = field(default=SourceLocation("<policy>"), compare=False)

    def matches_region(self, path: str, layer: int, stack_size: int) -> bool:
        """Return whether the region at ``path``, which is ``layer`` of ``stack_size``, is meant."""
        return _is_meant(self.blocks, self.layers, path, layer, stack_size)


@dataclass(frozen=True, slots=True)
class PlanSection:
    """The model and regions that a computed policy was computed for."""

    made_for: str  # model, inputs, device and budget, as readable text
    regions: tuple[PlannedRegion, ...] = ()

    def region_at(self, path: str, layer: int, stack_size: int) -> PlannedRegion | None:
        """Return the first entry that matches the region at ``path``, which is ``layer`` of ``stack_size``."""
        return next((one for one in self.regions if one.matches_region(path, layer, stack_size)), None)


def _is_meant(blocks: tuple[PathPattern, ...], layers: Layers | None, path: str, layer: int, stack_size: int) -> bool:
    if blocks and not any(pattern.matches(path) for pattern in blocks):
        return False
    return layers is None or layer in layers.select(stack_size)


@dataclass(frozen=True, slots=True)
class Policy:
    """An ordered list of rules plus a default. The first match wins; a child's rules come before its parent's."""

    name: str
    rules: tuple[Rule, ...] = ()
    default: Decision = Decision.RECOMPUTE
    models: tuple[str, ...] = ()  # model_type or class-name globs
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    set_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)
    blocks: tuple[PathPattern, ...] = ()  # empty: the blocks are found
    layers: Layers = Layers()
    plan: PlanSection | None = None
    extends: tuple[str, ...] = field(default=(), compare=False)  # parents, nearest first; `rules` includes theirs
    source: str = field(default="<policy>", compare=False)
    key_locations: Mapping[str, SourceLocation] = field(default_factory=dict, compare=False, hash=False)

    def where(self, key: str = "") -> str:
        """Return the source location of the policy, or of one of its top-level keys, for a message."""
        return str(self.key_locations.get(key, SourceLocation(self.source)))
