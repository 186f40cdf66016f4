"""The predicted time of a step without checkpointing."""

from __future__ import annotations

from typing import Any

from sac.planner.cost import MEMORY, PRIORS, entry_of_call, seconds
from sac.planner.devices import Device
from sac.planner.live_bytes import Ledger
from sac.planner.planner import Planner
from sac.planner.step import BETWEEN, FORWARD
from sac.tensors import tensor_parts


class _PricedOps(Ledger):
    """A ledger that adds up the seconds of the ops of a step."""

    def __init__(self, like: Ledger, device: Device) -> None:
        super().__init__(like.block_bytes, None, like.fakes, on_host=like.on_host, gathers=like.gathers)
        self.seconds = 0.0
        self._device = device
        self._runs = False

    def reached(self, part: str) -> None:
        """See ``Ledger.reached``; of several steps, the last counts."""
        if part == FORWARD:
            self._runs, self.seconds = True, 0.0
        elif part == BETWEEN:
            self._runs = False

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = super()._run(func, args, kwargs)
        if self._runs:
            self.seconds += seconds(entry_of_call(func, args, kwargs, out), self._device)
        return out


def plain_step_seconds(planner: Planner) -> float:
    """Return the predicted seconds of a step without checkpointing; runs one.

    The optimizer reads the parameters, their gradients and its state, and writes all but the gradients.
    """
    ops = _PricedOps(planner.ledger(), planner.pricing.device)
    planner.step_without_checkpointing(ops)
    trained = (one for one in planner.model.parameters() if one.requires_grad)
    parameters = sum(part.numel() * part.element_size() for one in trained for part in tensor_parts(one))
    moved = 3 * parameters + 2 * planner.step.extra
    return ops.seconds + moved / (planner.pricing.device.bytes_per_s * PRIORS[MEMORY])
