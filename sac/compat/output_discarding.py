"""Discarding a region's output until backward although its consumers have saved it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from sac.checkpointing import run_with
from sac.engine.settings import Settings
from sac.errors import Problem, RegionError, warn
from sac.outer_hooks import (
    OuterPacked,
    PackHooks,
    active_hooks,
    nodes_since,
    pack_with_outer_hooks,
    saved_without_hooks,
)
from sac.tensors import place_of, plain_address, version_of
from sac.torch_private import SHOWS_SAVED_TENSORS, tree_leaves

# Note [Discarded outputs]
#
# The ops after a region usually save the region's output for their own backward, although the region can recompute it.
# Releasing it takes three steps:
#
# Forward. After the function, inside the region, the outputs are saved in a node on which nothing else depends (the
# anchor). So the region's recomputation has to produce them last, as long as somebody may ask for them.
#
# Discard. The graph between the region and a later tensor is walked. Each saved tensor in the storage of an output gets
# hooks (autograd's own, as in `saved_tensors_hooks`, but added afterwards): its data is released, and its position in
# the storage is kept. No storage is resized. What the walk does not see (a consumer that does not lead to that tensor,
# a saved tensor with hooks, an attribute) holds the output as before; gradients are right either way.
#
# Backward. The first consumer that unpacks its tensor reads what the anchor saved. This reruns the region, once for all
# consumers and for the region's own backward, and the consumer's tensor is built on the recomputed storage.
#
# Regions that take such an output as their input hold it themselves, not through autograd. `lent_inputs` puts hooks
# around them, to which they pass their inputs: a chain of regions then holds none of the outputs between them.

WRITTEN_LATER = "do not write to the region's result, nor to what it is a view of, before backward"

_open: weakref.WeakValueDictionary[int | None, Discardable] = weakref.WeakValueDictionary()  # by storage address


@dataclass
class OutputAnchor:
    """The outputs of one forward that can be discarded (they own their memory), and the node that saved them.

    A plain dataclass, empty when the region begins, so that all calls of one function look the same.
    """

    chosen: tuple[int, ...] | None = None
    tensors: tuple[torch.Tensor, ...] = ()
    node: torch.Tensor | None = None


def _call_and_save(function: Callable[..., Any], *args: Any, anchor: OutputAnchor) -> Any:
    """Call ``function`` and save the tensors that it returns; in recomputation save the same ones again."""
    output = function(*args)
    leaves, is_first = tree_leaves(output), anchor.chosen is None
    if anchor.chosen is None:
        taken = {None, *map(plain_address, tree_leaves(args))}
        anchor.chosen = tuple(index for index, leaf in enumerate(leaves) if plain_address(leaf) not in taken)
    if anchor.chosen and torch.is_grad_enabled():
        tensors = tuple(leaves[index] for index in anchor.chosen if isinstance(leaves[index], torch.Tensor))
        saved = (tensor.detach() for tensor in tensors)
        node = _Anchor.apply(torch.empty(0, requires_grad=True), *saved)  # type: ignore[no-untyped-call]
        if is_first:
            anchor.tensors, anchor.node = tensors, node
    return output


class _Anchor(torch.autograd.Function):
    """Saves tensors; is not part of any other graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on this node")


class Discardable:
    """The tensors that one region call returned: the forward's until ``discard``, recomputed ones after it.

    See Note [Discarded outputs]. These are not saved tensors: until ``discard`` their user holds them; after it nothing
    does. ``nodes``: the graph nodes that produced them.
    """

    def __init__(self, anchor: OutputAnchor) -> None:
        self._anchor: Any = anchor.node
        self._tensors = dict(enumerate(anchor.tensors))
        self._forward = [
            (_layout_of(one), StorageWeakRef(one.untyped_storage()), version_of(one)) for one in anchor.tensors
        ]
        self.nodes: set[Any] = {tensor.grad_fn for tensor in anchor.tensors} - {None}
        for tensor in anchor.tensors:
            _open.setdefault(plain_address(tensor), self)

    def unchanged(self) -> dict[int | None, int]:
        """Return the addresses and indices of outputs that are still held and were not written to since."""
        held = reversed(self._tensors.items())
        return {plain_address(one): at for at, one in held if version_of(one) == self._forward[at][2]}

    def release(self) -> bool:
        """Release every output that can be recomputed; return whether one has to stay held."""
        released = self.unchanged()
        for address in released:
            if _open.get(address) is self:
                del _open[address]
        self._tensors = {at: one for at, one in self._tensors.items() if plain_address(one) not in released}
        self.nodes = set()
        return bool(self._tensors)

    def starts(self) -> set[Any]:
        """Return the graph nodes from which consumers depend on the outputs."""
        return self.nodes or {self._anchor.grad_fn}

    def tensor(self, index: int) -> torch.Tensor:
        """Return an output without its graph.

        Raises ``RegionError`` if the recomputed output has another memory layout, or if it is in the same memory, which
        is then not the region's own, and was written to.
        """
        layout, memory, version = self._forward[index]
        if index in self._tensors:
            if version_of(self._tensors[index]) != version:
                raise _error(index, "was written to after a region had taken it as its input", WRITTEN_LATER)
            return self._tensors[index].detach()
        tensor: torch.Tensor = self._anchor.grad_fn.saved_tensors[index]
        if layout != _layout_of(tensor):
            found = f"was {_layout_text(layout)} in forward and is {_layout_text(_layout_of(tensor))} in recomputation"
            fix = "let the region make its results in the same way in both passes: look for a branch that decides how"
            raise _error(index, found, fix)
        # The weak reference prevents the reuse of a storage's address.
        if plain_address(tensor) == memory.cdata and version_of(tensor) != version:
            found = "lies in memory that is not the region's own and was written to after the forward"
            raise _error(index, found, WRITTEN_LATER)
        return tensor


class Lent:
    """A tensor in the memory of a discardable output, held by its position there."""

    __slots__ = ("_dtype", "_index", "_lender", "_place")

    def __init__(self, lender: Discardable, index: int, tensor: torch.Tensor) -> None:
        self._lender, self._index = lender, index
        self._dtype, self._place = tensor.dtype, place_of(tensor)

    def fetch(self) -> torch.Tensor:
        """Return the tensor, in memory that it shares with other fetches."""
        with torch.no_grad():
            output = self._lender.tensor(self._index)
            return output.new_empty(0, dtype=self._dtype).set_(output.untyped_storage(), *self._place)


def run_discardable(
    settings: Settings, function: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Any, Discardable | None]:
    """Run ``function(*args)`` as a region; return its result, and the object that discards the tensors in it.

    That object is None if there is nothing to discard: without grad mode, or if the function returns no tensor with its
    own memory. ``settings`` must be those of a non-reentrant region.
    """
    anchor = OutputAnchor()
    region = partial(_call_and_save, function)  # not a closure: calls of the same function are recognized by its parts
    region.__qualname__ = getattr(function, "__qualname__", type(function).__name__)  # type: ignore[attr-defined]
    with lent_inputs(args):
        output = run_with(settings, region, args, {"anchor": anchor})
    discardable = Discardable(anchor) if anchor.node is not None else None
    anchor.tensors, anchor.node = (), None  # the region holds the anchor, which must not hold the region
    return output, discardable


def discard(outputs: Sequence[Discardable], *further_on: torch.Tensor) -> None:
    """Release the outputs of regions, and what was saved of them between the regions and ``further_on``.

    The memory is freed with its last other holder. Warns, and keeps what backward needs, if an output was written to
    since its region returned it, or if no ``further_on`` depends on it. What was already discarded is skipped.
    """
    lenders = {address: (one, index) for one in reversed(outputs) for address, index in one.unchanged().items()}
    held = [one for one in outputs if one.unchanged()]
    missed = [one.nodes for one in held if one.nodes]
    starts = set().union(*(one.starts() for one in held))
    for node in nodes_since(further_on, min((node._sequence_nr() for node in starts), default=0)):
        missed = [nodes for nodes in missed if node not in nodes]
        for saved in saved_without_hooks(node):
            lender = lenders.get(plain_address(saved.data))
            if lender is not None:
                saved.register_hooks(partial(Lent, *lender), Lent.fetch)
    if lenders and not SHOWS_SAVED_TENSORS:
        warn("this version of torch does not show what its graph has saved: the output is kept until backward")
    if missed:
        warn("the tensor given does not depend on the region's output, which is therefore kept until backward")
    if [one for one in outputs if one.release()]:
        warn("the region's output was changed in place after the region: it is kept until backward")


def lent_inputs(inputs: Any) -> AbstractContextManager[Any]:
    """Return a context in which a region with these inputs does not itself hold those that are discardable outputs."""
    if not _open or not any(plain_address(leaf) in _open for leaf in tree_leaves(inputs)):
        return nullcontext()
    return saved_tensors_hooks(partial(_lend, active_hooks()), _take_back)


def _lend(outer: PackHooks | None, tensor: torch.Tensor) -> Any:
    lender = _open.get(plain_address(tensor))
    index = None if lender is None else lender.unchanged().get(plain_address(tensor))
    return pack_with_outer_hooks(tensor, outer) if lender is None or index is None else Lent(lender, index, tensor)


def _take_back(held: torch.Tensor | OuterPacked | Lent) -> torch.Tensor:
    return held if isinstance(held, torch.Tensor) else held.fetch()


def _layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), storage.nbytes()


def _layout_text(layout: tuple[Any, ...]) -> str:
    dtype, shape, stride, offset, size = layout
    name = str(dtype).removeprefix("torch.")
    return f"{name}{list(shape)} with strides {stride}, {offset} elements into {size} bytes"


def _error(index: int, found: str, fix: str) -> RegionError:
    return RegionError(Problem("region", f"output {index} {found}", fix=fix))
