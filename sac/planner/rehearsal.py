"""Steps of a copy of a model without data, which show what a real step would take."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import refuse_second
from sac.blocks.find import find_blocks
from sac.blocks.install import remove
from sac.blocks.kv_cache import turn_off_cache
from sac.blocks.other_checkpointing import refuse_existing_checkpointing
from sac.config import Config, family_policy
from sac.engine.settings import NEVER
from sac.errors import ModelError, PlanError, Problem, SacWarning
from sac.planner.budget import optimizer_bytes
from sac.planner.devices import Device
from sac.planner.explain import Explanation, Origins
from sac.planner.fakes import Inputs, call, fake_copy, fake_inputs, fake_mode, mode_of, run_backward
from sac.planner.ledger import Ledger
from sac.planner.meters import LedgerMeter
from sac.planner.observing import Observation, StepRecord
from sac.planner.predict import Choice, Prediction, rounded
from sac.planner.regions import BudgetRegions, planned_regions
from sac.planner.rules import saved_by
from sac.planner.sharding import QuickChunks, refuse_senders
from sac.planner.tracing import merged
from sac.policy.read import bytes_text
from sac.torch_private import tree_leaves

_CHECKS = 5  # steps with a choice, the first one included
_WORTH_A_STEP = 0.01  # of the room between the least peak and the budget


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


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice within a budget of ``allowed`` bytes, and the peak of a step that was run with it."""

    choice: Choice
    allowed: int
    peak: int


class Rehearsal:
    """A copy of ``model`` without data, on whose steps a plan for ``device`` is made; the model is not changed.

    ``parallelize`` shards the copy in place. For the other arguments see ``sac.plan``. ``unplanned``: why blocks, by
    path, are recomputed in full.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        device: Device,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        optimizer: Any = None,
        parallelize: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        refuse_unfit(model)
        if loss_fn is not None and not callable(loss_fn):
            raise PlanError(Problem("loss_fn", f"a {type(loss_fn).__name__} cannot be called", "a function"))
        if parallelize is not None:
            refuse_senders()
        mode = fake_mode()
        self.model = fake_copy(model, mode)
        self.inputs = fake_inputs(inputs, mode)
        self.device, self._loss_fn = device, loss_fn
        self._ledger = Ledger(device)  # of the last step
        if parallelize is not None:
            with QuickChunks():
                parallelize(self.model)
        self._gathers = mode_of(self.model) if parallelize is not None else None
        self.extra = optimizer_bytes(optimizer, self.model.parameters())
        turn_off_cache(self.model)
        policy = family_policy(self.model, (block.module for block in find_blocks(self.model)))
        self._regions = BudgetRegions(self.model, Config(mode="selective", verify=NEVER))
        with _quiet():
            self._regions.put_on()
            self._regions.profile()
            record = self._step()
        profiles = self._regions.profiles()
        if not profiles or not any(phase.position or phase.part != "between" for phase in record.phases):
            found = "no block of this model is called with gradients: there is nothing to plan"
            raise ModelError(Problem(type(model).__name__, found))
        self.unplanned = {one.paths[0]: one.reason for one in profiles if one.reason}
        self.prediction = Prediction(
            merged([rounded(one, self._ledger.block_bytes) for one in profiles]),
            record,
            device,
            extra=self.extra,
            by_hand=lambda profile: saved_by(policy, profile),
        )
        self.step_s = self._ledger.seconds - self._ops_s(self.prediction.full)  # without what is recomputed

    def _ops_s(self, choice: Choice) -> float:
        options = self.prediction.options
        return sum(options[kind][one].ops_s for kind, one in zip(self.prediction.kinds, choice, strict=True))

    def run(self, choice: Choice, explains: int | None = None) -> StepRecord:
        """Run a step with a choice. ``explains``: the level of live bytes at which to note what is alive."""
        with _quiet():
            self._planned = planned_regions(self.prediction, choice, "planned")
            self._regions.plan(self._planned)
            return self._step(explains)

    def _step(self, explains: int | None = None) -> StepRecord:
        model, inputs, regions = self.model, self.inputs, self._regions
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        ledger = Ledger(self.device, self._gathers)
        if explains is not None:
            ledger = Origins(self.device, self._gathers, model, inputs, explains, self._planned.rule_of)
        self._ledger = ledger
        state = torch.get_rng_state()
        with _collector_paused(), ledger:
            try:
                ledger.note(one for one in [*model.parameters(), *model.buffers(), *tree_leaves(inputs)]
                            if isinstance(one, Tensor))  # fmt: skip
                meter = LedgerMeter(ledger)
                gradients: Callable[[], int] = lambda: ledger.size_of(one.grad for one in trained)  # noqa: E731
                observation = regions.observation = Observation(meter, ledger.live, gradients, ())
                if isinstance(ledger, Origins):
                    ledger.place = observation.place
                with torch.enable_grad():
                    loss = scalar_loss(call(model, inputs), self._loss_fn)
                run_backward(model, loss)
                regions.observation = None
                observed = observation.end()
                del loss
            finally:
                regions.observation = None
                torch.set_rng_state(state)
                for tensor in tree_leaves(inputs):
                    if isinstance(tensor, Tensor):
                        tensor.grad = None
                model.zero_grad(set_to_none=True)
        if observed is None:
            found = "no backward runs through its blocks: there is nothing to plan"
            raise ModelError(Problem(type(model).__name__, found))
        return observed.record

    def choose(self, allowed: int) -> Chosen:
        """Return the fastest choice whose step was run within ``allowed`` bytes; raises ``TooSmallError``."""
        prediction = self.prediction
        if prediction.least() > allowed:
            raise prediction.refuse("budget", bytes_text(allowed), allowed)
        room = allowed - prediction.least()
        best, aim, tried = Chosen(prediction.full, allowed, prediction.least()), allowed, set[Choice]()
        for _ in range(_CHECKS):
            choice = prediction.search(aim)
            if choice in tried or choice == prediction.full:
                break
            tried.add(choice)
            record = self.run(choice)
            peak = record.peak + self.extra
            if peak <= allowed and prediction.time_of(choice) < prediction.time_of(best.choice):
                best = Chosen(choice, allowed, peak)
            if 0 <= allowed - peak <= _WORTH_A_STEP * room or choice == prediction.fastest:
                break
            prediction.learn(record, choice)
            aim = allowed if peak > allowed else aim + (prediction.peak_of(choice) - peak)
        return best

    def explain(self, chosen: Chosen) -> Explanation:
        """Return what is alive at the peak of a choice."""
        self.run(chosen.choice, explains=chosen.peak - self.extra)
        assert isinstance(self._ledger, Origins)
        return replace(self._ledger.explanation(), optimizer=self.extra)

    def close(self) -> None:
        """Take the regions off the copy, so that it can be freed."""
        remove(self.model)


def refuse_unfit(model: nn.Module) -> None:
    """Raise ``ModelError`` for a model that sac is already on, or whose own checkpointing is on."""
    if not isinstance(model, nn.Module):
        raise ModelError(Problem("model", f"a {type(model).__name__} is not a torch.nn.Module"))
    refuse_second(model)
    refuse_existing_checkpointing(model)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: they are about the policies that are tried, not about the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        yield


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Run without the garbage collector, which would repeatedly scan the many objects of a step's graph."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
