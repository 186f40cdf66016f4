"""Frames: one call of a region, from the forward to the recomputation in backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sac.engine.handles import MISSING, Handle
from sac.engine.inputs import Inputs
from sac.engine.serve import Served, rerun
from sac.engine.state import ForwardState
from sac.engine.tape import Tape
from sac.errors import Problem, RegionError
from sac.outer_hooks import active_hooks, pack_with_outer_hooks
from sac.region.settings import Settings
from sac.torch_private import graph_is_retained

# Autograd holds the handles and this frame (by its `_unpack`); the frame holds handles weakly and nothing that has the
# graph of the region. So all of it is freed with the graph, without the garbage collector.


class Frame:
    """A call whose Python runs again in backward, without a dispatch mode in either pass."""

    tape: Tape | None = None

    def __init__(
        self, function: Callable[..., Any], owners: Sequence[nn.Module], settings: Settings, where: str
    ) -> None:
        self.function, self.owners, self.settings, self.where = function, owners, settings, where
        self.early_stop = settings.early_stop
        self.is_open = True  # the forward has not ended
        self._handles: list[weakref.ref[Handle]] = []
        self._last: tuple[Tensor, int] | None = None  # the tensor saved last, and its version

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_careful: bool) -> Any:
        """Run the forward and return its result."""
        self._outer = active_hooks()
        self.inputs = inputs = Inputs(args, kwargs)
        self.state = ForwardState(self.owners, (*args, *kwargs.values()), self.settings, is_careful=is_careful)
        if self.settings.input_storing is not None:
            inputs.store(self.settings.input_storing, self.where)
        self._begin(inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            output = self._forward(args, kwargs)
        self.state.end()
        self._end()
        self.is_open = False
        return output

    def _begin(self, inputs: Inputs) -> None:
        pass

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def _pack(self, tensor: Tensor) -> Handle:
        handle = Handle(len(self._handles), tensor)
        self._handles.append(weakref.ref(handle))
        self._last = tensor, tensor._version
        return handle

    def _end(self) -> None:
        if self._last is not None:
            # An op that fills a tensor which autograd has saved before must run to its end.
            self.early_stop = self.early_stop and self._last[0]._version == self._last[1]
            self._last = None
        self.inputs.end(self._packer())

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

    def _unpack(self, handle: Handle) -> Tensor:
        if handle.state != MISSING:
            return handle.held(self.where)
        if handle.value is None:
            self._recompute(self._waiting())
            if handle.value is None:
                raise RegionError(Problem(self.where, f"recomputation does not reach saved tensor {handle.index}"))
            if not (self.is_open or graph_is_retained()):
                self._drop()  # all handles that are left have been filled
        value: Tensor = handle.value
        if graph_is_retained():
            handle.value = None  # the next backward recomputes it; otherwise autograd drops the handle soon
        return value

    def _drop(self) -> None:
        """Release what recomputations start from."""
        self.inputs.leaves = []

    def _waiting(self) -> dict[int, Handle]:
        handles = (handle for reference in self._handles if (handle := reference()) is not None)
        return {handle.index: handle for handle in handles if handle.state == MISSING and handle.value is None}

    def _recompute(self, waiting: dict[int, Handle]) -> None:
        self._rerun(waiting, None)

    def _rerun(self, waiting: dict[int, Handle], mode: Served | None) -> None:
        self.state.check(self.tape, self.where)
        with self.state.restored(self.tape):
            args, kwargs = self.inputs.again(self.where, written=self.tape is not None and bool(self.tape.before))
            with self.state.modes.entered():
                rerun(self.function, args, kwargs, waiting, self.where, self.settings, mode, stops=self.early_stop)
