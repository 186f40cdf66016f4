"""One step of the model on fake tensors, recorded op by op."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sac.errors import PlanError, Problem
from sac.planner.fakes import Inputs, call, run_backward
from sac.planner.live_bytes import Ledger
from sac.tensors import is_wrapper
from sac.torch_private import tree_leaves

FORWARD, BACKWARD, BETWEEN = "forward", "backward", "between"


@dataclass(frozen=True, slots=True)
class StepPhase:
    """A phase of a step: the forward or backward of the region at ``position``, or the time between two regions.

    Positions count the calls of regions in forward order. Between regions, ``position`` is the number of regions whose
    forward is over and whose backward has not ended. ``before``, ``peak`` and ``after`` are live bytes.

    ``rises``: of a forward that was observed op by op, for each entry of its tape the peak since the entry before it,
    in bytes above ``before``; the last one, of entry -1, is that after all entries.
    ``ended``: of a step that was observed, the positions whose values backward needs no longer, from this phase on.
    """

    part: str
    position: int
    before: int
    peak: int
    after: int
    rises: tuple[tuple[int, int], ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The memory of one step in bytes. ``paths``: the region at each position. ``static``: parameters, buffers, inputs.

    ``kept`` is the live bytes at the end of the forward, ``peak`` the maximum over forward and backward; both include
    ``static``. ``gathered``: how many bytes of ``kept`` are parameters that FSDP2 has gathered.
    """

    paths: tuple[str, ...]
    phases: tuple[StepPhase, ...]
    static: int
    kept: int
    peak: int


def scalar_loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """Return ``loss_fn(output)``, else ``output.loss``, else a scalar output; raises ``PlanError`` if there is none."""
    if loss_fn is not None:
        loss: Any = loss_fn(output)
        found = "loss_fn returns"
    else:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        loss = output if loss is None else loss
        found = "the model returns"
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    what = f"a tensor of shape {[*loss.shape]}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
    if isinstance(loss, Tensor) and loss.numel() == 1:
        what = "a scalar that needs no gradient"
    fix = "pass loss_fn=, which takes what the model returns" if loss_fn is None else ""
    raise PlanError(Problem("loss", f"{found} {what}", "a scalar tensor that needs a gradient", fix=fix))


class _PhaseMarks:
    """Divides a step into phases; hooks report where regions begin and end."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.begin()

    def begin(self) -> None:
        """Start a step."""
        ledger = self.ledger
        if ledger.workspace is not None:
            ledger.workspace.cut()
        self.paths: list[str] = []
        self.phases: list[StepPhase] = []
        self.levels: list[dict[Hashable, int]] = []  # of each phase, for its workspace
        self._part, self._position = BETWEEN, 0
        self._before = ledger.live
        ledger.peak = ledger.live

    def cut(self, part: str, position: int) -> None:
        """End the current phase and start ``part``."""
        ledger = self.ledger
        self.phases.append(StepPhase(self._part, self._position, self._before, ledger.peak, ledger.live))
        if ledger.workspace is not None:
            self.levels.append(ledger.workspace.cut())
        self._part, self._position, self._before = part, position, ledger.live
        ledger.peak = ledger.live

    @contextmanager
    def on(self, regions: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        """Let hooks on ``regions``, by path, report where they begin and end."""
        hooks: list[Any] = []
        for path, module in regions:
            enter = partial(self.enter, path)
            # First of all hooks: before FSDP2 gathers the parameters.
            hooks.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(self.leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Record that the forward of a region begins."""
        position = len(self.paths)
        self.paths.append(path)
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._end_backward, position))
                break
        self.cut(FORWARD, position)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Record that the forward of a region ends."""
        position = self._position
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._begin_backward, position))
        self.cut(BETWEEN, position + 1)

    def with_workspace(self) -> tuple[StepPhase, ...]:
        """Return the phases, whose peaks include the workspace of kernels."""
        workspace = self.ledger.workspace
        if workspace is None:
            return tuple(self.phases)
        pairs = zip(self.phases, self.levels, strict=True)
        return tuple(replace(phase, peak=max(phase.peak, workspace.peak(levels))) for phase, levels in pairs)

    def _begin_backward(self, position: int, gradient: Tensor) -> None:
        if self._position > position and self._part in (BETWEEN, BACKWARD):
            self.cut(BACKWARD, position)

    def _end_backward(self, position: int, gradient: Tensor) -> None:
        if (self._part, self._position) == (BACKWARD, position):
            self.cut(BETWEEN, position)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Run without the garbage collector, which would repeatedly scan the many objects of a step's graph.

    The moments at which it frees memory depend on earlier code, so objects in cycles count until the end of a step.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Note [Steps before the step]
#
# The first call of a region is recorded, and frees what it no longer needs earlier than the next ones, which hold it
# until the region ends. That seldom matters, since a region's backward holds as much. It does where the peak is in the
# forward: where a tensor-parallel rank scatters or gathers.
# So for tensor parallelism a step runs before the step. With FSDP2, whose gathered parameters are higher, it does not.


def _is_split(model: nn.Module) -> bool:
    """Return whether ``model`` has DTensors as parameters, and not because of FSDP2."""
    is_sharded = any(hasattr(module, "set_reshard_after_forward") for module in model.modules())
    return not is_sharded and any(map(is_wrapper, model.parameters()))


def run_step(
    model: nn.Module,
    inputs: Inputs,
    regions: Sequence[tuple[str, nn.Module]],
    ledger: Ledger,
    loss_fn: Callable[[Any], Tensor] | None = None,
    *,
    accumulates: bool = False,
    at_end: Callable[[], None] = lambda: None,
) -> StepRecord:
    """Run one step and return its memory record; gradients are dropped at the end, after ``at_end`` is called.

    ``regions`` are the modules at whose borders the step is divided into phases. The model may be fake
    (Note [Fake tensors]). ``accumulates``: gradients of an earlier step exist and count as static. Under tensor
    parallelism two steps are run; see Note [Steps before the step].
    """
    with ExitStack() as stack:
        stack.enter_context(_collector_paused())
        stack.enter_context(ledger)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if accumulates:
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in trained]
        for tensor in [*model.parameters(), *gradients, *model.buffers(), *tree_leaves(inputs)]:
            if isinstance(tensor, Tensor):
                ledger.note(tensor)
        static = ledger.live
        marks = _PhaseMarks(ledger)
        state = torch.get_rng_state()
        stack.callback(torch.set_rng_state, state)
        stack.enter_context(marks.on(regions))
        for _ in range(2 if _is_split(model) else 1):
            marks.begin()
            ledger.reached(FORWARD)
            torch.set_rng_state(state)
            with torch.enable_grad():
                output = call(model, inputs)
                loss = scalar_loss(output, loss_fn)
            del output
            marks.cut(BETWEEN, len(marks.paths))
            kept = ledger.live
            ledger.reached(BACKWARD)
            run_backward(model, loss)
            marks.cut(BETWEEN, 0)
            ledger.reached(BETWEEN)
            del loss
            at_end()
            for tensor in tree_leaves(inputs):
                if isinstance(tensor, Tensor):
                    tensor.grad = None
            if not accumulates:
                model.zero_grad(set_to_none=True)
        model.zero_grad(set_to_none=True)
    phases = marks.with_workspace()
    return StepRecord(tuple(marks.paths), phases, static, kept, max(phase.peak for phase in phases))
