"""Frames: one call of a region, from the forward to the recomputation in backward."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sac.checksums import checksum
from sac.engine.flags import under_function_modes
from sac.engine.handles import KEPT, MISSING, Handle
from sac.engine.inputs import Inputs
from sac.engine.op_trace import NO_RULE, OpTraceRecorder, SavedFigures
from sac.engine.rng import advanced
from sac.engine.serve import Served, rerun
from sac.engine.settings import REPLAY, Settings
from sac.engine.state import ForwardState, bound_in, put_back
from sac.engine.tape import Tape
from sac.engine.untraced import never_compiled
from sac.errors import Problem, RegionError, warn
from sac.outer_hooks import PackHooks, active_hooks, pack_with_outer_hooks
from sac.stores.backward_order import CallNode
from sac.stores.offload import OffloadUse
from sac.tensors import copy_of, describe, is_wrapper, landed, storage_address, storage_bytes, version_of
from sac.torch_private import forward_ad_level, graph_is_retained, tree_leaves, without_transforms

_DTYPES = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
_NUMBERS = frozenset(one for one in _DTYPES if one.is_floating_point or one.is_complex)
_SMALL = 1 << 16  # of buffers up to so many bytes a recorded call keeps a copy without a warning
_KEPT_WHOLE = (
    "none is needed: the activations of this call are kept until its backward instead of being recomputed, and later "
    "calls of the region keep a copy of what they write to"
)

# Autograd holds the handles and this frame (by its `_unpack`); the frame holds handles weakly and nothing that has the
# graph of the region. So all of it is freed with the graph, without the garbage collector.


class Frame:
    """A call whose Python runs again in backward, without a dispatch mode in either pass."""

    tape: Tape | None = None
    trace: OpTraceRecorder | None = None
    engine = ""  # for the report
    figures: SavedFigures | None = None
    compiled_graphs = 0
    records = True  # what is written to is noticed, by versions or a recorder; else all that may be is copied

    def __init__(
        self, function: Callable[..., Any], owners: Sequence[nn.Module], settings: Settings, where: str, group: Any
    ) -> None:
        self.function, self.owners, self.settings, self.where = function, owners, settings, where
        self.group = group
        self.early_stop = settings.early_stop
        self.is_open = True  # the forward has not ended
        self.offloads: Mapping[int, OffloadUse] = {}
        self.input_bytes = 0, 0  # of inputs that this call keeps, and those of them in host memory
        self._handles: list[weakref.ref[Handle]] = []
        self._thread = threading.get_ident()
        self.call: CallNode | None = None  # if something of it may wait in host memory
        # If activations are kept although other ranks may recompute: what was written to, with contents and version.
        self._owes: list[tuple[Tensor, Any, int]] | None = None
        self._packed: list[tuple[Tensor, int]] = []  # what autograd saves, with its version; until the forward ends
        self._drawn: list[Any] | None = None  # if it has drawn, the checksums of the random states at its end

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward and return its result."""
        self.begin(args, kwargs, active_hooks())
        with self.recording():
            output = self.function(*args, **kwargs)
        self.end()
        if self.call is not None:
            self.call.mark(tree_leaves(output))
        return output

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], outer: PackHooks | None) -> None:
        """Begin the forward; ``outer``: the hooks around the region."""
        self._outer = outer
        self.inputs = inputs = Inputs(args, kwargs)
        arguments = (*args, *kwargs.values(), *bound_in(self.function))
        is_careful = bool(self.group.careful) or not self.records
        self.state = ForwardState(self.owners, arguments, self.settings, is_careful=is_careful, copies=not self.records)
        if self.settings.input_storing is not None:
            self.call = CallNode()
            inputs.store(self.settings.input_storing, self.where, self.call)
        duals = map(unpack_dual, (tensor for _, tensor in inputs.tensors)) if forward_ad_level() >= 0 else ()
        self._tangents = [dual.tangent for dual in duals if dual.tangent is not None]
        if self._tangents and self.engine != REPLAY:
            self._refuse_tangents()
        self._begin(inputs)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the function in the body."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def end(self) -> None:
        """End the forward."""
        is_missing = self._end(self.state.end())
        self.is_open = False
        if self._owes is not None or is_missing:
            on_device, on_host = self.inputs.bytes
            before = self.tape.before if self.tape is not None else {}  # of inputs and buffers, before a write
            self.input_bytes = on_device + sum(copy.nbytes() for _, copy in before.values()), on_host
        else:
            self._drop()

    def _begin(self, inputs: Inputs) -> None:
        pass

    def _new_handle(self, tensor: Tensor) -> Handle:
        if threading.get_ident() != self._thread:
            found = "another thread runs ops of this region, as `torch.jit.fork` does: their order is not known"
            fix = "do not fork inside of the block, or leave the block out of checkpointing"
            raise RegionError(Problem(self.where, found, fix=fix))
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        return handle

    def _pack(self, tensor: Tensor) -> Handle:
        handle = self._new_handle(tensor)
        self._packed.append((tensor, tensor._version))
        return handle

    def _end(self, written: list[Tensor]) -> bool:
        """End the forward, which has ``written`` to tensors of the modules; return whether handles are missing."""
        handles = alive(self._handles)
        for handle in handles:
            tensor, version = self._packed[handle.index]
            handle.is_written_later = tensor._version != version
        is_new = self._is_new(written)
        if is_new:
            self._keep_whole()
        if is_new and self.group.communicates:
            plain = (tensor for tensor in written if not is_wrapper(tensor))
            self._owes = [(one, copy_of(one.untyped_storage()), version_of(one)) for one in plain]
        if is_new and self._owes is None:
            self._drop()
        else:
            self.inputs.end(self._packer())
        self._packed = []
        return bool(handles) and not is_new

    def _is_new(self, written: list[Tensor]) -> bool:
        """Return whether this call does what only a recorded one may; tell the group."""
        written += self.inputs.written()
        if written:
            self.group.careful = True
            self._warn_of(written[0])
            return True
        drawn = bool(advanced(self.state.random))
        self._drawn = self._random_sums() if drawn and self.early_stop else None
        return bool(self.group.doubts(self._seen(alive(self._handles), draws=drawn)))

    def _random_sums(self) -> list[Any]:
        return [checksum(generator.get_state()) for generator, _ in self.state.random]

    def _seen(self, handles: Sequence[Handle], *, draws: bool) -> Counter[Any]:
        """Return what may be a choice or a draw: integer and bool tensors that autograd saves, by dtype, and draws.

        Arguments, parameters and buffers do not count.
        """
        seen: Counter[Any] = Counter(draws=draws)
        choices = [one for one in handles if one.metadata[1] not in _NUMBERS] if not self.group.careful else ()
        if choices:
            tensors = [tensor for _, tensor in self.inputs.tensors] + self.state.tensors
            outside = {storage_address(tensor) for tensor in tensors}
            for handle in choices:
                tensor = self._packed[handle.index][0] if self._packed else handle.value
                if tensor is None or storage_address(tensor) not in outside:
                    seen[handle.metadata[1]] += 1
        return seen

    def _warn_of(self, tensor: Tensor) -> None:
        """Warn that this call has written to ``tensor``, unless that is a small buffer."""
        if tensor.nbytes <= _SMALL and not tensor.requires_grad and any(tensor is one for one in self.state.tensors):
            return
        named = [pair for owner in self.owners for pair in (*owner.named_parameters(), *owner.named_buffers())]
        name = next((f"'{name}' " for name, other in named if other is tensor), "an input ")
        kind = "parameter " if tensor.requires_grad and tensor.is_leaf and name != "an input " else ""
        found = f"this call changed {kind}{name}({describe(tensor)}) in place, which no earlier call did"
        warn(Problem(self.where, found, fix=_KEPT_WHOLE))

    def _keep_whole(self) -> None:
        """Hold the tensors that autograd saved, as autograd itself would: this call is not recomputed."""
        held: dict[int, int] = {}
        outside = {storage_address(tensor) for tensor in self.state.tensors}
        for handle in alive(self._handles):
            tensor, version = self._packed[handle.index]
            handle.hold(tensor, KEPT)
            handle.version = version
            if storage_address(tensor) not in outside:
                held[storage_address(tensor)] = storage_bytes(tensor)
            if self._outer is not None and version_of(tensor) == version:  # else the hooks would get another value
                handle.value = pack_with_outer_hooks(handle.value, self._outer)
        kept = sum(held.values())
        self.figures = SavedFigures(kept, 0, {NO_RULE: kept})

    def _packer(self) -> Callable[[Tensor], Any]:
        """Return what passes a tensor to the hooks around the region, each tensor once; parameters stay."""
        hooks = self._outer
        packed: dict[int, Any] = {}
        if hooks is None:
            return lambda tensor: tensor

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is Parameter:
                return tensor
            if id(tensor) not in packed:
                packed[id(tensor)] = tensor, pack_with_outer_hooks(tensor, hooks)
            return packed[id(tensor)][1]

        return pack

    @never_compiled
    def _unpack(self, handle: Handle) -> Tensor:
        if handle.state != MISSING:
            if self._owes is not None:
                self._take_part(self._owes)
            return handle.held(self.where)
        if self._packed:  # a gradient that the region's own forward takes
            return self._packed[handle.index][0]
        if handle.value is None:
            try:
                with without_transforms():  # it runs once for all gradients of a batch
                    self._recompute(self._waiting())
            except torch.OutOfMemoryError as error:
                self.settings.add_note(error)
                raise
            if handle.value is None:
                raise RegionError(Problem(self.where, f"recomputation does not reach saved tensor {handle.index}"))
            if not (self.is_open or graph_is_retained()):
                self._drop()  # all handles that are left have been filled
        value: Tensor = handle.value
        if graph_is_retained():
            handle.value = None  # the next backward recomputes it; otherwise autograd drops the handle soon
        return value

    def _take_part(self, written: list[tuple[Tensor, Any, int]]) -> None:
        """Run again for nothing but the collectives, which other ranks send in their recomputation."""
        last = max(alive(self._handles), key=lambda handle: handle.index)
        stand_in = Handle(last.index, torch.empty(0))
        stand_in.metadata = last.metadata
        self._owes = None
        self._rerun({last.index: stand_in}, None)
        for tensor, contents, version in written:
            put_back(tensor, contents, version)
        if graph_is_retained():
            self._owes = written
        else:
            self._drop()

    def _fills(self) -> bool:
        """Return whether the rerun has still to draw: an op may fill with that what autograd has just saved of it."""
        return self._drawn is not None and self._random_sums() != self._drawn

    def _drop(self) -> None:
        """Release what recomputations start from."""
        self.inputs.drop()
        self.state.drop()

    def _waiting(self) -> dict[int, Handle]:
        handles = alive(self._handles)
        return {handle.index: handle for handle in handles if handle.state == MISSING and handle.value is None}

    def _recompute(self, waiting: dict[int, Handle]) -> None:
        self._rerun(waiting, None)

    def _refuse_tangents(self) -> None:
        """Raise: a rerun computes no tangents."""
        found = "it is called with dual tensors (forward-mode differentiation), and its Python runs again in backward"
        fix = "set `engine: replay`, or compute the Jacobian-vector product under torch.no_grad()"
        raise RegionError(Problem(self.where, found, fix=fix))

    def _rerun(self, waiting: dict[int, Handle], mode: Served | None) -> None:
        if self._tangents:
            self._refuse_tangents()
        self.state.check(self.tape, self.where)
        with self.state.restored(self.tape):
            written = self.tape is not None and bool(self.tape.before)
            args, kwargs = self.inputs.again(self.where, self.function, written=written)
            stops, total = self.early_stop or self.is_open, len(self._handles)
            again = partial(rerun, self.function, args, kwargs, stops=stops, total=total, fills=self._fills)
            with under_function_modes(self.state.modes):
                again(waiting, self.where, self.settings, mode)
            if self.group.communicates:
                for handle in waiting.values():
                    landed(handle.value)


def alive(handles: Sequence[weakref.ref[Handle]]) -> list[Handle]:
    """Return the handles that autograd still holds."""
    return [handle for reference in handles if (handle := reference()) is not None]
