"""Steps of a copy of a model without data, which show what a real step would take."""

from __future__ import annotations

import contextlib
import gc
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.find import find_blocks
from sac.blocks.kv_cache import turn_off_cache
from sac.config import Config, family_policy
from sac.config_keys import STATES
from sac.engine.settings import NEVER
from sac.errors import ModelError, PlanError, Problem, SacWarning, listing, nearest
from sac.planner.devices import Device
from sac.planner.explain import Explanation, Origins
from sac.planner.fakes import Inputs, call, fake_copy, fake_inputs, fake_mode, mode_of, without_data
from sac.planner.ledger import Ledger
from sac.planner.observing import Meter, Observation, StepRecord, bytes_of
from sac.planner.predict import Choice, Prediction
from sac.planner.regions import BudgetRegions
from sac.planner.rules import policy_of, saved_by
from sac.planner.sharding import refuse_senders
from sac.planner.tracing import merged
from sac.tables import bytes_text
from sac.tensors import tensor_parts
from sac.torch_private import DataDependentOutputException, tree_leaves

_CHECKS = 5  # steps with a choice, the first one included
_WORTH_A_STEP = 0.01  # of the room between the least peak and the budget


def scalar_loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """Return ``loss_fn(output)``, else ``output.loss``, else a scalar output; raises ``PlanError`` if there is none."""
    loss: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = loss_fn(output) if loss_fn is not None else output if loss is None else loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    what = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        what = "a scalar that needs no gradient" if loss.numel() == 1 else f"a tensor of shape {[*loss.shape]}"
    found = "the model returns" if loss_fn is None else "loss_fn returns"
    fix = "pass loss_fn=, which takes what the model returns" if loss_fn is None else ""
    raise PlanError(Problem("loss", f"{found} {what}", "a scalar tensor that needs a gradient", fix=fix))


def optimizer_bytes(optimizer: Any, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state on this rank for the trained ones of ``parameters``.

    ``optimizer``: None (no state), a name (sgd, momentum, adam, adamw: states with the shape of each parameter), or an
    optimizer, which is run on a parameter without data of each shape; if its groups differ, with the options of the
    group that holds the most. Counters, one number per parameter, are ignored. Raises ``PlanError`` otherwise.
    """
    parts = [part for one in parameters if one.requires_grad for part in tensor_parts(one.detach())]
    if optimizer is None:
        return 0
    if isinstance(optimizer, str) and (word := optimizer.strip().lower()) in STATES:
        return STATES[word] * sum(part.numel() * part.element_size() for part in parts)
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = f"'{optimizer}' is not known" if isinstance(optimizer, str) else f"{optimizer!r} is not an optimizer"
        legal = f"{listing([*STATES])}, or a torch.optim.Optimizer"
        raise PlanError(Problem("optimizer", found, legal, nearest(str(optimizer), STATES)))
    alike = Counter((tuple(part.shape), part.dtype) for part in parts)
    return sum(
        count * max(_state_bytes(optimizer, group, *part) for group in optimizer.param_groups)
        for part, count in alike.items()
    )


def _state_bytes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Return the bytes of state that such an optimizer holds for one parameter with the options of ``group``."""
    with fake_mode():
        parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
        parameter.grad = torch.empty_like(parameter)
    same: Any = type(optimizer)
    accepted = inspect.signature(same).parameters  # a group also holds options that the class has added itself
    options = {name: value for name, value in group.items() if name in accepted and name != "params"}
    options |= {name: False for name in ("foreach", "fused") if name in options}  # other kernels, same state
    try:
        tried = same([parameter], **options)
        with contextlib.suppress(DataDependentOutputException):  # for example of a norm; by then the state exists
            tried.step()
    except Exception as error:
        found = f"a step of {same.__name__} cannot be tried without data: {type(error).__name__}: {error}"
        fix = f"name one that has as many states ({listing([*STATES])}), or give none and leave room"
        raise PlanError(Problem("optimizer", found, fix=fix)) from error
    states = (one for one in tried.state[parameter].values() if isinstance(one, torch.Tensor) and one.dim())
    return sum(one.numel() * one.element_size() for one in states)


class Rehearsal:
    """A copy of ``model`` without data, on whose steps a plan for ``device`` is made; the model is not changed.

    ``parallelize`` shards the copy in place. For the other arguments see ``sac.plan``.
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
        if loss_fn is not None and not callable(loss_fn):
            raise PlanError(Problem("loss_fn", f"a {type(loss_fn).__name__} cannot be called", "a function"))
        if parallelize is not None:
            refuse_senders()
        mode = fake_mode()
        self.model = fake_copy(model, mode)
        self.inputs = fake_inputs(inputs, mode)
        self.device, self._loss_fn = device, loss_fn
        if parallelize is not None:
            parallelize(self.model)
        self._gathers = mode_of(self.model) if parallelize is not None else None
        self.extra = optimizer_bytes(optimizer, self.model.parameters())
        turn_off_cache(self.model)
        policy = family_policy(self.model, (block.module for block in find_blocks(self.model)))
        self._regions = BudgetRegions(self.model, Config(mode="selective", verify=NEVER))
        with _quiet():
            self._regions.put_on()
            self._regions.profile()
            record = self._step(ledger := Ledger(device, self._gathers))
        profiles = self._regions.profiles()
        if not profiles or not any(phase.position or phase.part != "between" for phase in record.phases):
            found = "no block of this model is called with gradients: there is nothing to plan"
            raise ModelError(Problem(type(model).__name__, found))
        self.prediction = Prediction(
            merged(profiles, ledger.block_bytes),
            record,
            device,
            extra=self.extra,
            by_hand=lambda profile: saved_by(policy, profile),
        )
        again_s = sum(self.prediction.options[kind][0].ops_s for kind in self.prediction.kinds)
        self.step_s = ledger.seconds - again_s  # without what is recomputed

    def run(self, choice: Choice, ledger: Ledger | None = None) -> StepRecord:
        """Run a step with a choice."""
        with _quiet():
            planned = self.prediction.regions(choice)
            self._regions.plan(planned, policy_of(planned, "planned"))
            return self._step(ledger or Ledger(self.device, self._gathers))

    def _step(self, ledger: Ledger) -> StepRecord:
        model, inputs, regions = self.model, self.inputs, self._regions
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        state, collects = torch.get_rng_state(), gc.isenabled()
        gc.disable()  # it would repeatedly scan the many objects of a step's graph
        with ledger:
            try:
                ledger.note([*model.parameters(), *model.buffers(), *leaves])
                meter, device = Meter(ledger.read, ledger.block_bytes), next(model.parameters()).device
                gradients = lambda: bytes_of((one.grad for one in trained), device, ledger.block_bytes)  # noqa: E731
                observation = regions.observation = Observation(meter, ledger.live, gradients, ())
                with torch.enable_grad():
                    loss = scalar_loss(call(model, inputs), self._loss_fn)
                with without_data(model):
                    loss.backward()
                record = observation.end()
                del loss
            finally:
                regions.observation = None
                torch.set_rng_state(state)
                if collects:
                    gc.enable()
                for leaf in leaves:
                    leaf.grad = None
                model.zero_grad(set_to_none=True)
        if record is None:
            found = "no backward runs through its blocks: there is nothing to plan"
            raise ModelError(Problem(type(model).__name__, found))
        return record

    def choose(self, allowed: int) -> tuple[Choice, int]:
        """Return the fastest choice whose step was run within ``allowed`` bytes, and the peak of that step.

        Raises ``TooSmallError`` for less than the least peak.
        """
        prediction = self.prediction
        if prediction.least() > allowed:
            raise prediction.refuse("budget", bytes_text(allowed), allowed)
        room = allowed - prediction.least()
        best, aim, tried = (prediction.full, prediction.least()), allowed, set[Choice]()
        for _ in range(_CHECKS):
            choice = prediction.search(aim)
            if choice in tried or choice == prediction.full:
                break
            tried.add(choice)
            record = self.run(choice)
            peak = record.peak + self.extra
            if peak <= allowed and prediction.time_of(choice) < prediction.time_of(best[0]):
                best = choice, peak
            if 0 <= allowed - peak <= _WORTH_A_STEP * room or choice == prediction.fastest:
                break
            prediction.learn(record, choice)
            aim = allowed if peak > allowed else aim + (prediction.peak_of(choice) - peak)
        return best

    def explain(self, choice: Choice, peak: int) -> Explanation:
        """Return what is alive at the peak of a choice."""
        regions = self._regions
        ledger = Origins(self.device, self._gathers, self.model, self.inputs, peak - self.extra, regions.place)
        self.run(choice, ledger)
        return ledger.explanation(self.prediction.regions(choice), self.extra)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings: they are about the policies that are tried, not about the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        yield
