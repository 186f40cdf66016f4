"""Layers that are alike: a step runs some of them, and the record of the whole step is composed from these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from sac.blocks.find import Block
from sac.engine.tracker import BareMode
from sac.planner.step import BACKWARD, FORWARD, StepPhase, StepRecord
from sac.tensors import storage_addresses
from sac.torch_private import MODULE_STAND_IN, tree_flatten, tree_leaves, tree_unflatten

# Note [Layers that are alike]
#
# A model of 126 layers runs each of the same few layers many times. Where the layers of a step repeat (the same
# profile, parameters and choice, possibly as a pattern of several layers), the step runs three periods of the pattern
# at its beginning and three at its end, and leaves out those between: such a layer returns the tensor that it is given.
# The phases of the layers that were left out are then inserted into the record: copies of those of the third period.
#
# This gives the bytes of the whole step if a layer in the middle does the same as its neighbour. It is used only where
# all of this holds; otherwise all layers run:
#
#  1. Each layer's forward runs the same ops on the same sizes: one region group (tracing.py), modules of the same
#     classes, and parameters of the same sizes, dtypes and `requires_grad` (`_kind`). All layers run for this, once.
#  2. A layer takes one tensor that needs a gradient, and returns one of the same layout. It shares no parameter with
#     other modules. Nothing else that is made in it is read outside of it, and it reads nothing else that needs a
#     gradient and is not its own (`ChainWatch`). So a layer affects others only through the chain.
#  3. In the step that was run, the period before the gap and the one after it have the same phases: the same changes of
#     live bytes, and the same peaks above them (`expanded`).
#  4. What their forward leaves behind is what their backward frees, except their gradients.
#
# FSDP2 gathers the parameters of the next layer ahead and frees buffers of the previous one late, which reaches two
# layers far. A layer next to the gap has neighbours of the same kind, as it would have without the gap.

_LONGEST_PERIOD = 12  # layers
_PERIODS = 3  # that run at the beginning and at the end of a repetition
_OUTSIDE = ""


@dataclass(frozen=True, slots=True)
class Link:
    """How a layer is part of the chain: the place of its input among the leaves of its arguments, and its result."""

    place: int
    leaves: tuple[Any, ...]  # of the result; None in place of the tensor
    at: int  # the place of the tensor among them
    tree: Any

    def pass_on(self, *args: Any, **kwargs: Any) -> Any:
        """Return the chain's tensor in the form of the layer's result."""
        leaves = list(self.leaves)
        leaves[self.at] = tree_leaves((args, kwargs))[self.place]
        return tree_unflatten(leaves, self.tree)


@dataclass(frozen=True, slots=True)
class Gap:
    """Positions ``start`` to ``start + count`` of a step, which repeat the ``period`` positions before them."""

    start: int
    period: int
    count: int


class ChainWatch(BareMode):
    """Observes one forward, and finds the layers that affect each other only through the chain."""

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._modules = {block.path: block.module for block in blocks}
        self._links: dict[str, Link] = {}
        self._entangled = _sharing(model, self._modules)
        self._owners: dict[int, str] = {}  # of storages: the layer, or outside
        self._results: dict[int, str] = {}  # storages of the results of layers
        self._inside, self._last = _OUTSIDE, _OUTSIDE
        self._taken: list[Tensor] = []  # the chain's tensor in the running layer
        self._chain: frozenset[int] = frozenset()
        self._place = -1

    @property
    def alike(self) -> AlikeLayers:
        """What was found."""
        links = {path: link for path, link in self._links.items() if path not in self._entangled}
        return AlikeLayers(links, {path: _kind(self._modules[path]) for path in links}, self._modules)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Observe what runs inside."""
        with ExitStack() as stack:
            for path, module in self._modules.items():
                entered = module.register_forward_pre_hook(partial(self._enter, path), with_kwargs=True, prepend=True)
                stack.callback(entered.remove)
                stack.callback(module.register_forward_hook(partial(self._leave, path)).remove)
            stack.enter_context(self)
            yield

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        leaves = tree_leaves((args, kwargs))
        trained = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._inside = path
        self._place = trained[0] if len(trained) == 1 else -1
        self._taken = [leaves[place] for place in trained]
        self._chain = frozenset(address for tensor in self._taken for address in storage_addresses(tensor))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        leaves, tree = tree_flatten(output)
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if self._place >= 0 and len(tensors) == 1 and _layout(leaves[tensors[0]]) == _layout(self._taken[0]):
            at = tensors[0]
            rest = tuple(None if place == at else leaf for place, leaf in enumerate(leaves))
            self._links.setdefault(path, Link(self._place, rest, at, tree))
        for place in tensors:
            self._results.update(dict.fromkeys(storage_addresses(leaves[place]), path))
        self._inside, self._last, self._taken, self._chain = _OUTSIDE, path, [], frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[int, bool] = {}  # by storage: whether a tensor in it needs a gradient
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                for address in storage_addresses(tensor):
                    given[address] = tensor.requires_grad or given.get(address, False)
        for address, is_trained in given.items():
            self._read(address, is_trained=is_trained)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                for address in storage_addresses(tensor):
                    if address not in given:
                        self._owners[address] = self._inside
                        self._results.pop(address, None)
        return out

    def _read(self, address: int, *, is_trained: bool) -> None:
        owner = self._owners.get(address)
        if owner is None or owner == self._inside or address in self._chain:
            return
        if owner != _OUTSIDE and self._inside == _OUTSIDE and self._results.get(address) == self._last == owner:
            return  # between two layers, or after the last one
        if owner != _OUTSIDE or is_trained:
            self._entangled |= {owner, self._inside}


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """The layers of a model that may be left out, by path; see Note [Layers that are alike]."""

    links: Mapping[str, Link]
    kinds: Mapping[str, Hashable]
    modules: Mapping[str, nn.Module]

    def gaps(self, paths: Sequence[str], groups: Sequence[int], choice: Sequence[int]) -> tuple[Gap, ...]:
        """Return the positions that a step with ``choice`` may leave out, for each position's path and group."""
        symbols: list[Hashable] = [
            (group, one, self.kinds[path]) if path in self.links else position
            for position, (path, group, one) in enumerate(zip(paths, groups, choice, strict=True))
        ]
        return gaps_in(symbols)

    @contextmanager
    def leaving_out(self, paths: Sequence[str]) -> Iterator[None]:
        """Let the layers at ``paths`` return what they are given."""
        assert MODULE_STAND_IN is not None
        try:
            for path in paths:
                setattr(self.modules[path], MODULE_STAND_IN, self.links[path].pass_on)
            yield
        finally:
            for path in paths:
                delattr(self.modules[path], MODULE_STAND_IN)


def gaps_in(symbols: Sequence[Hashable]) -> tuple[Gap, ...]:
    """Return the gaps in a sequence of layers: where it repeats, all but two periods at the beginning and the end."""
    found: list[Gap] = []
    at = 0
    while at < len(symbols):
        gaps = [_gap(symbols, at, period) for period in range(1, _LONGEST_PERIOD + 1)]
        best = max(gaps, key=lambda gap: gap.count)
        if best.count > 0:
            found.append(best)
        at = best.start + best.count + _PERIODS * best.period if best.count > 0 else at + 1
    return tuple(found)


def _gap(symbols: Sequence[Hashable], at: int, period: int) -> Gap:
    end = at + period
    while end < len(symbols) and symbols[end] == symbols[end - period]:
        end += 1
    return Gap(at + _PERIODS * period, period, ((end - at) // period - 2 * _PERIODS) * period)


_Change = tuple[str, int, int, int]  # part and position of a phase, peak and end above its beginning


def expanded(
    record: StepRecord, gaps: Sequence[Gap], paths: Sequence[str], gradients: Callable[[str], int]
) -> StepRecord | None:
    """Return the record of the whole step, given that of a step without the positions in ``gaps``.

    ``paths``: of all positions. ``gradients``: the bytes that the gradients of the layer at a path hold after the step.
    None if the layers around a gap do not show that those in it do the same.
    """
    parts = _parts_of(record)
    if parts is None:
        return None
    before, forwards, backwards = parts
    left_out = 0
    for gap in gaps:
        first = gap.start - left_out  # the position after the gap in the step that was run
        for position in range(first - gap.period, first):
            if any(of[position] != of[position + gap.period] for of in (forwards, backwards)):
                return None
        period = range(first - gap.period, first)
        rest = sum(change[3] for position in period for change in (*forwards[position], *backwards[position]))
        if rest != sum(gradients(record.paths[position]) for position in period):
            return None
        left_out += gap.count
    source: list[int] = []  # of each position: that in the step that was run
    left = {position: gap for gap in gaps for position in range(gap.start, gap.start + gap.count)}
    for position in range(len(paths)):
        gap_here = left.get(position)
        source.append(
            source[position - gap_here.period] if gap_here else position - sum(one < position for one in left)
        )
    order = [(0, before)]
    order += [(position, forwards[one]) for position, one in enumerate(source)]
    order += [(position, backwards[one]) for position, one in reversed([*enumerate(source)])]
    phases: list[StepPhase] = []
    level = record.phases[0].before
    for position, changes in order:
        for part, shift, high, after in changes:
            phases.append(StepPhase(part, position + shift, level, level + high, level + after))
            level += after
    kept = record.kept + sum(change[3] for position in left for change in forwards[source[position]])
    peak = max(phase.peak for phase in phases)
    return StepRecord(tuple(paths), tuple(phases), record.static, kept, peak)


def _parts_of(record: StepRecord) -> tuple[list[_Change], list[list[_Change]], list[list[_Change]]] | None:
    """Return the changes before the first layer, and those from each layer's forward and backward to the next one's.

    None if a layer has no backward, or layers do not run in order.
    """
    before: list[_Change] = []
    found: dict[str, dict[int, list[_Change]]] = {FORWARD: {}, BACKWARD: {}}
    begun: list[tuple[str, int]] = []
    changes, at = before, 0
    for phase in record.phases:
        if phase.part in found:
            begun.append((phase.part, phase.position))
            changes, at = found[phase.part].setdefault(phase.position, []), phase.position
        changes.append((phase.part, phase.position - at, phase.peak - phase.before, phase.after - phase.before))
    positions = range(len(record.paths))
    if begun != [*((FORWARD, one) for one in positions), *((BACKWARD, one) for one in reversed(positions))]:
        return None
    return before, [found[FORWARD][one] for one in positions], [found[BACKWARD][one] for one in positions]


def _layout(tensor: Tensor) -> Hashable:
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


def _kind(module: nn.Module) -> Hashable:
    """Return the classes of a layer's modules, and the sizes and flags of its parameters and buffers."""
    return (
        tuple((path, type(one), one.training) for path, one in module.named_modules()),
        tuple((path, _layout(one)) for path, one in (*module.named_parameters(), *module.named_buffers())),
    )


def _sharing(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """Return the paths of layers that share a parameter or a buffer with another module."""
    everything = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    counts = Counter(id(one) for _, one in everything)
    return {
        path
        for path, module in layers.items()
        if any(counts[id(one)] > 1 for one in (*module.parameters(), *module.buffers()))
    }
