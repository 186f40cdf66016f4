"""The predicted time of a step without checkpointing, and of each region's forward and backward in it."""

from __future__ import annotations

from typing import Any

from sac.planner.cost import MEMORY, PRIORS, entry_of_call
from sac.planner.live_bytes import Ledger
from sac.planner.planner import Planner
from sac.planner.pricing import Pricing
from sac.planner.step import BACKWARD, BETWEEN, FORWARD
from sac.planner.transfer_clock import StepTimes
from sac.tensors import tensor_parts


class _PricedOps(Ledger):
    """A ledger that adds up the seconds of the ops of a step."""

    def __init__(self, like: Ledger, pricing: Pricing) -> None:
        super().__init__(like.block_bytes, None, like.fakes, on_host=like.on_host, gathers=like.gathers)
        self.seconds = 0.0
        self.phases: dict[tuple[str, int, bool], float] = {}  # part, position, in the backward -> seconds
        self._phase = BETWEEN, 0
        self._in_backward = False
        self._pricing = pricing
        self._runs = False

    def reached(self, part: str) -> None:
        """See ``Ledger.reached``; of several steps, the last counts."""
        if part == FORWARD:
            self._runs, self.seconds, self.phases = True, 0.0, {}
        self._in_backward = part != FORWARD
        if part == FORWARD:
            self._phase = BETWEEN, 0
        elif part == BETWEEN:
            self._runs = False

    def entered(self, part: str, position: int) -> None:
        """See ``Ledger.entered``."""
        self._phase = part, position

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._run(func, args, kwargs)
        if self._runs:
            taken = self._pricing.seconds(entry_of_call(func, args, kwargs, out))
            self.seconds += taken
            phase = (*self._phase, self._in_backward)
            self.phases[phase] = self.phases.get(phase, 0.0) + taken
        return out


def region_times(planner: Planner) -> StepTimes:
    """Return the predicted seconds of each region's passes in a step without checkpointing; runs one."""
    ops = _PricedOps(planner.ledger(), planner.pricing)
    planner.step_without_checkpointing(ops)
    count = len(planner.groups)
    forward, backward = (
        tuple(ops.phases.get((part, at, late), 0.0) for at in range(count))
        for part, late in ((FORWARD, False), (BACKWARD, True))
    )
    pause = sum(ops.phases.get((BETWEEN, count, late), 0.0) for late in (False, True))
    return StepTimes(forward, backward, pause, max(0.0, ops.seconds - sum(forward) - sum(backward) - pause))


def plain_step_seconds(planner: Planner) -> float:
    """Return the predicted seconds of a step without checkpointing; runs one.

    The optimizer reads the parameters, their gradients and its state, and writes all but the gradients.
    """
    ops = _PricedOps(planner.ledger(), planner.pricing)
    planner.step_without_checkpointing(ops)
    trained = (one for one in planner.model.parameters() if one.requires_grad)
    parameters = sum(part.numel() * part.element_size() for one in trained for part in tensor_parts(one))
    moved = 3 * parameters + 2 * planner.step.extra
    return ops.seconds + moved / (planner.pricing.device.bytes_per_s * PRIORS[MEMORY])
