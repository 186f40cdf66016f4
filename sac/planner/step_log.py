"""A log of the storages of one step: when each is made, resized and freed, and the op and module that made it."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.paths import clean_path
from sac.engine.frame import Frame
from sac.engine.reentrant import _Node as ReentrantNode
from sac.engine.taped import TapedFrame
from sac.ops.names import op_name
from sac.planner.live_bytes import KernelWorkspace, Ledger
from sac.planner.step import BACKWARD
from sac.tensors import storage_addresses
from sac.torch_private import (
    MODULE_CALL,
    NO_TASK,
    current_graph_task_id,
    current_node,
    next_node_number,
    tree_leaves,
)

# Note [The walk of an explanation]
#
# 1. `run_step` runs a step, as it does to measure one, under a `StepLog` instead of a plain `Ledger`. The log gets an
#    event for each storage that is made, resized or freed, and for each op, whose kernel may need a workspace.
# 2. The op that makes a storage gives it its `Origin`. The module comes from Python's stack, which holds the running
#    modules and, in backward, the frame of a region that is being recomputed; so no hook is put on a module. The ops of
#    a backward belong to the module whose forward made their autograd node: the log remembers the numbers of the nodes.
# 3. `sac/planner/peak.py` replays the events, finds the highest level, and sorts the storages that are alive there
#    into categories. The decisions of the regions (their op trace) say which rule holds an activation.
# 4. The optimizer's state, which is not part of the step that was run, is added, as for the peak of a plan. So the rows
#    sum to that peak.
#
# Nothing of this runs unless an explanation is asked for.

STATIC, FORWARD, RECOMPUTED, IN_BACKWARD = "static", "forward", "recomputed", "backward"
PARAMETER, GRADIENT, BUFFER, INPUT, STATE = "parameter", "gradient", "buffer", "input", "state"

UNSEEN_OP = "random state or number"  # what an op does not make: see Note [What the ledger counts]

# The code of the functions that run while a region is recomputed; a region's path from their variables.
_RECOMPUTES: dict[CodeType, Callable[[dict[str, Any]], str]] = {
    Frame._recompute.__code__: lambda variables: variables["self"].where,
    TapedFrame._recompute.__code__: lambda variables: variables["self"].where,
    ReentrantNode.backward.__code__: lambda variables: variables["ctx"].call.where,
}


@dataclass(frozen=True, slots=True)
class Origin:
    """The op that made a storage.

    ``part``: the part of the step in which it ran (static: before the step). ``module`` is the path of the module from
    the model down, ``block`` the path of the block in it (empty outside of blocks), ``call`` the use of this op in this
    module and call of the block, from 0. ``blocks_before``: the calls of blocks that had begun when the op's forward
    ran; -1 if unknown. For static storages ``op`` is the kind of tensor and ``module`` its name.
    """

    part: str
    op: str = ""
    module: str = ""
    block: str = ""
    call: int = 0
    blocks_before: int = -1


@dataclass(frozen=True, slots=True)
class Made:
    """A storage was made."""

    storage: int
    bytes: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class Resized:
    """A storage has another size; freed storages have 0 bytes."""

    storage: int
    bytes: int
    is_freed: bool = False


@dataclass(frozen=True, slots=True)
class Ran:
    """An op ran, which began after event number ``begin``; ``key`` is that of its workspace."""

    begin: int
    key: Hashable
    origin: Origin


Event = Made | Resized | Ran


class _LoggedWorkspace(KernelWorkspace):
    """A workspace that also passes the key of each op to a function."""

    def __init__(self, like: KernelWorkspace, saw: Callable[[Hashable], None]) -> None:
        super().__init__(like=like)
        self._then = saw

    def saw(self, func: Any, args: Any, kwargs: Any, out: Any, before: int) -> Hashable:
        """See ``KernelWorkspace.saw``."""
        key = super().saw(func, args, kwargs, out, before)
        if key is not None:
            self._then(key)
        return key


class StepLog(Ledger):
    """A ledger that logs the storages of one step of ``model``; see Note [The walk of an explanation].

    ``blocks``: the blocks by path. ``static``: further tensors that exist before the step, with kind and name.
    """

    def __init__(
        self,
        like: Ledger,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        static: Sequence[tuple[str, str, Tensor]],
    ) -> None:
        # Written so that the logged step is counted exactly as one under the ledger ``like``.
        workspace = _LoggedWorkspace(like.workspace, self._saw) if like.workspace is not None else None
        super().__init__(like.block_bytes, workspace, like.fakes, on_host=like.on_host, gathers=like.gathers)
        self.events: list[Event] = []
        self.backward_begins = 0  # number of events before the backward
        self.ends = 0  # number of events before the end of the step, when gradients are dropped
        self.gradients: dict[int, str] = {}  # storages that are gradients at the end of the step, with their names
        self.block_inputs: set[int] = set()  # storages of the inputs of blocks
        self.calls = 0  # of blocks that have begun
        self._model = model
        self._paths = {id(module): clean_path(path, model) for path, module in model.named_modules()}
        self._blocks = {id(module): path for path, module in blocks}
        self._block_list = blocks
        self._static: dict[int, Origin] = {}
        for kind, name, tensor in (*_tensors_of(model), *static):
            for key in storage_addresses(tensor):
                self._static.setdefault(key, Origin(STATIC, kind, clean_path(name, model)))
        self._numbers_of: dict[int, int] = {}  # address of a storage -> its number in the log
        self._made = 0
        self._op: Any = None
        self._origin: Origin | None = None  # of the running op, once it is needed
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._nodes: dict[int, Origin] = {}  # number of an autograd node -> origin of its forward
        self._begin = 0
        self._runs = False

    @contextmanager
    def on_step(self) -> Iterator[None]:
        """Log one step, which runs inside of this context."""
        hooks = [
            module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            for _, module in self._block_list
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def reached(self, part: str) -> None:
        """See ``Ledger.reached``."""
        super().reached(part)
        if part == FORWARD:
            self._runs = True
        elif part == BACKWARD:
            self.backward_begins = len(self.events)
        else:
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    for key in storage_addresses(parameter.grad):
                        if key in self._numbers_of:
                            self.gradients[self._numbers_of[key]] = clean_path(name, self._model)
            self._runs, self.ends = False, len(self.events)

    def workspace_bytes(self, key: Hashable) -> int:
        """Return the peak of the op with this key while it runs, results included; known after the step."""
        return self.workspace.bytes_of(key) if self.workspace is not None else 0

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_graph_task_id() != NO_TASK:
            return  # the block runs again
        self.calls += 1
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.block_inputs.update(
                    self._numbers_of[key] for key in storage_addresses(tensor) if key in self._numbers_of
                )

    # Events

    def _note_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        super()._note_storage(storage)
        self._numbers_of[key] = self._made
        size = self._storages[key][1]
        origin = self._static.get(key) if not self._runs else None
        self.events.append(Made(self._made, size, origin or self._current()))
        self._made += 1

    def _freed(self, key: int) -> Callable[[Any], None]:
        freed, log = super()._freed(key), weakref.ref(self)

        def logged(reference: Any) -> None:
            mine = log()
            if mine is not None and key in mine._storages:
                mine.events.append(Resized(mine._numbers_of.pop(key), 0, is_freed=True))
            freed(reference)

        return logged

    def _has_resized(self, key: int, size: int) -> None:
        super()._has_resized(key, size)
        self.events.append(Resized(self._numbers_of[key], size))

    def _saw(self, key: Hashable) -> None:
        self.events.append(Ran(self._begin, key, self._current()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outer = self._op, self._origin, self._begin
        self._op, self._origin, self._begin = func, None, len(self.events)
        try:
            if self._runs and torch.is_grad_enabled() and current_graph_task_id() == NO_TASK:
                self._nodes[next_node_number() - 1] = self._current()
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._op, self._origin, self._begin = outer

    # Origins

    def _current(self) -> Origin:
        """Return the origin of what the running op makes."""
        if self._origin is None:
            self._origin = self._origin_of(op_name(self._op) if self._op is not None else UNSEEN_OP)
        return self._origin

    def _origin_of(self, op: str) -> Origin:
        if not self._runs:
            return Origin(STATIC, op)
        backward = current_graph_task_id() != NO_TASK
        module, block, again = self._running()
        if not backward:
            count = self.calls, module, op
            self._counts[count] += 1
            return Origin(FORWARD, op, module, block, self._counts[count] - 1, self.calls)
        if again:
            return Origin(RECOMPUTED, op, module, block)
        node = current_node()
        made_by = self._nodes.get(node._sequence_nr()) if node is not None else None
        if made_by is None:
            return Origin(IN_BACKWARD, op)
        return replace(made_by, part=IN_BACKWARD, op=op)

    def _running(self) -> tuple[str, str, bool]:
        """Return the paths of the innermost running module and of the block in it, and whether it runs in backward."""
        module = ""
        frame: Any = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is MODULE_CALL:
                running = id(frame.f_locals["self"])
                module = module or self._paths.get(running, "")
                if running in self._blocks:
                    return module, self._blocks[running], True
            elif code in _RECOMPUTES:
                path = _RECOMPUTES[code](frame.f_locals)
                return module or path, path, True
            frame = frame.f_back
        return module, "", bool(module)


def _tensors_of(model: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield PARAMETER, name, parameter
        if parameter.grad is not None:
            yield GRADIENT, name, parameter.grad
    for name, buffer in model.named_buffers():
        yield BUFFER, name, buffer


def inputs_among(inputs: Any) -> list[tuple[str, str, Tensor]]:
    """Return the tensors among the inputs of a model, with their kind and name, for ``StepLog``."""
    pairs = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    return [
        (INPUT, name if isinstance(name, str) else f"argument {name}", leaf)
        for name, value in pairs
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor)
    ]
