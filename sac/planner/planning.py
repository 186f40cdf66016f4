"""`sac.plan`: a policy for a budget, from steps of a copy of the model without data."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import refuse_second
from sac.blocks.find import find_blocks
from sac.blocks.install import remove
from sac.blocks.kv_cache import turn_off_cache
from sac.blocks.other_checkpointing import refuse_existing_checkpointing
from sac.config import Config, family_policy
from sac.config_keys import CONFIG_KEYS, STATES, StepBudget, read_budget
from sac.engine.settings import NEVER
from sac.errors import ModelError, PlanError, Problem, SacWarning, TooSmallError, listing, nearest
from sac.memory_timeline import Meter
from sac.planner import fakes
from sac.planner.cost import MEMORY, PRIORS, Device, figures_of
from sac.planner.explain import Explanation, Origins
from sac.planner.gpu_ops import lowered_to
from sac.planner.ledger import Ledger
from sac.planner.observing import Observation, StepRecord
from sac.planner.predict import Choice, Plan, Prediction
from sac.planner.regions import PLANNED, PROFILED, BudgetRegions
from sac.policy.model import Policy
from sac.policy.syntax import all_problems, node_of
from sac.tables import LEGAL_BYTES, bytes_text
from sac.tensors import tensor_parts
from sac.torch_private import FakeTensorMode, tree_leaves

_CHECKS = 5  # steps with a choice, the first one included

# -- What a step needs besides the model


def scalar_loss(output: Any, loss_fn: Callable[[Any], Tensor] | None) -> Tensor:
    """Return ``loss_fn(output)``, else ``output.loss``, else a scalar output; raises ``PlanError`` if there is none."""
    loss: Any = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    loss = loss_fn(output) if loss_fn is not None else output if loss is None else loss
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    found = f"it is a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        found += f" of shape {[*loss.shape]}" + ("" if loss.requires_grad else " that needs no gradient")
    fix = "pass loss_fn=, which takes what the model returns, and returns the loss"
    raise PlanError(Problem("loss", found, "a scalar tensor that needs a gradient", fix=fix))


def optimizer_bytes(optimizer: Any, parameters: Iterable[nn.Parameter]) -> int:
    """Return the bytes of the optimizer's state on this rank for the trained ones of ``parameters``.

    ``optimizer``: None (no state), a name (sgd, momentum, adam, adamw: states with the shape of each parameter), or an
    optimizer whose class is called so. Counters, one number per parameter, are ignored. Raises ``PlanError`` otherwise.
    """
    if optimizer is None:
        return 0
    word = optimizer.strip().lower() if isinstance(optimizer, str) else type(optimizer).__name__.lower()
    if word not in STATES:
        found, fix = f"'{word}' is not known", "name one that has as many states, or give none and leave room"
        raise PlanError(Problem("optimizer", found, listing([*STATES]), nearest(word, STATES), fix))
    groups = getattr(optimizer, "param_groups", ())
    states = STATES[word] + any(group.get("momentum") or group.get("amsgrad") for group in groups)
    parts = (part for one in parameters if one.requires_grad for part in tensor_parts(one.detach()))
    return states * sum(part.numel() * part.element_size() for part in parts)


# -- Steps without data


class Rehearsal(BudgetRegions):
    """Regions on a copy of ``model`` without data, on whose steps a plan for ``device`` is made.

    ``parallelize`` shards the copy in place. For the other arguments see ``sac.plan``.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: fakes.Inputs,
        device: Device,
        *,
        loss_fn: Callable[[Any], Tensor] | None = None,
        optimizer: Any = None,
        parallelize: Callable[[nn.Module], Any] | None = None,
    ) -> None:
        if loss_fn is not None and not callable(loss_fn):
            raise PlanError(Problem("loss_fn", f"a {type(loss_fn).__name__} cannot be called", "a function"))
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        super().__init__(fakes.fake_copy(model, mode), Config(mode="selective", verify=NEVER))
        self.inputs = fakes.fake_inputs(inputs, mode)
        self.device, self._loss_fn = device, loss_fn
        if parallelize is not None:
            fakes.refuse_senders()
            with fakes.QuickChunks():
                parallelize(self.model)
        self.gathers = mode if parallelize is not None else None
        self.extra = optimizer_bytes(optimizer, self.model.parameters())
        turn_off_cache(self.model)
        shipped = family_policy(self.model, (block.module for block in find_blocks(self.model)))
        self.put_on()
        record = self._step(ledger := Ledger(device, self.gathers), PROFILED)
        profiles = self.profiles(ledger.block_bytes)
        self.prediction = Prediction(profiles, record, device, extra=self.extra, shipped=shipped)
        again_s = sum(self.prediction.options[kind][0].ops_s for kind in self.prediction.kinds)
        self.step_s = ledger.seconds - again_s  # without what is recomputed

    def run(self, choice: Choice, ledger: Ledger | None = None) -> StepRecord:
        """Run a step with a choice."""
        self.plan(self.prediction.regions(choice))
        return self._step(ledger or Ledger(self.device, self.gathers), PLANNED)

    def _step(self, ledger: Ledger, which: str) -> StepRecord:
        model, inputs = self.model, self.inputs
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        state, collects = torch.get_rng_state(), gc.isenabled()
        gc.disable()  # it would repeatedly scan the many objects of a step's graph
        with ledger:
            try:
                ledger.note([*model.parameters(), *model.buffers(), *leaves])
                meter = Meter(next(model.parameters()).device, ledger.read, ledger.block_bytes)
                self.observation = Observation(meter, ledger.live, lambda: 0, lambda: None)  # it begins as all steps do
                self.use(which)
                with torch.enable_grad(), fakes.without_data(model):
                    out_of = partial(model, **inputs) if isinstance(inputs, Mapping) else partial(model, *inputs)
                    loss = scalar_loss(out_of(), self._loss_fn)
                    loss.backward()
                record = self.observation.end()
                del loss
            finally:
                self.observation = None
                torch.set_rng_state(state)
                if collects:
                    gc.enable()
                for one in (*leaves, *model.parameters()):
                    one.grad = None
        if record is None:
            found = "no backward runs through its blocks: there is nothing to plan"
            raise ModelError(Problem(type(model).__name__, found))
        return record

    def choose(self, allowed: int, host: int) -> tuple[Prediction, Choice, int]:
        """Return the fastest choice within ``allowed`` bytes of which a step was run, with its prediction and peak.

        Values may wait in ``host`` bytes of host memory: all stay on the device in the step, and the peak is predicted;
        see Note [Values on the host]. Raises ``TooSmallError`` for less than the least peak.
        """
        plain = self.prediction
        best, room = (plain, plain.full, plain.peak_of(plain.full)), allowed - plain.peak_of(plain.full)
        if room < 0:
            raise plain.refuse("budget", bytes_text(allowed), allowed)
        for memory in dict.fromkeys((0, host)):
            tried = set[Choice]()
            while len(tried) < _CHECKS:
                choice = plain.sending(memory).search(allowed)
                if choice in tried or choice == plain.full:
                    break
                tried.add(choice)
                record = self.run(choice)
                plain.learn(record, choice)
                way = plain.sending(memory)
                peak = way.peak_of(choice) if memory else record.peak + self.extra
                if peak <= allowed and plain.time_of(choice) < plain.time_of(best[1]):
                    best = way, choice, peak
                if not memory and 0 <= allowed - peak <= 0.01 * room:  # the rest is not worth a step
                    break
        return best

    def explain(self, choice: Choice, peak: int) -> Explanation:
        """Return what is alive at the peak of a choice."""
        ledger = Origins(self, peak - self.extra)
        self.run(choice, ledger)
        return ledger.explanation(self.prediction.regions(choice), self.extra)


# -- `sac.plan`


def budget_of(value: Any, device: Device) -> StepBudget:
    """Return the parsed budget; raises ``PlanError`` if ``value`` is not a budget for ``device``."""
    with all_problems(PlanError) as attempt:
        budget: StepBudget = attempt(read_budget, node_of(value, "", "budget"))
    if budget.of_device is not None and device.name == "cpu":
        found = "a share of the device's memory, but the memory of a CPU is not known"
        raise PlanError(Problem("budget", found, LEGAL_BYTES, fix="give bytes, or name a GPU"))
    return budget


def host_memory_of(value: Any, device: Device) -> int:
    """Return the bytes of host memory, 0 for None; raises ``PlanError`` for others, and for a device without a link."""
    with all_problems(PlanError) as attempt:
        size: int | None = attempt(CONFIG_KEYS["host_memory"].read, node_of(value, "", "host_memory"))
    if size and not device.host_bytes_per_s:
        raise PlanError(Problem("host_memory", f"nothing is copied to the host from {device.title}", fix="name a GPU"))
    return size or 0


def make_plan(
    model: nn.Module,
    inputs: Any,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    optimizer: Any = None,
    parallelize: Callable[[nn.Module], Any] | None = None,
    host_memory: Any = None,
    fsdp: int | None = None,
    explains: bool = False,
) -> Plan:
    """Return the plan of ``sac.plan`` with its figures. ``fsdp``: the number of ranks that shard the model by FSDP2."""
    if not isinstance(model, nn.Module):
        raise ModelError(Problem("model", f"a {type(model).__name__} is not a torch.nn.Module"))
    refuse_second(model)
    refuse_existing_checkpointing(model)
    arguments = fakes.arguments_of(inputs, PlanError)
    figures = figures_of(next((one.device for one in model.parameters()), "cpu") if device is None else device)
    wanted, host = budget_of(budget, figures), host_memory_of(host_memory, figures)
    types = {parameter.device.type for parameter in model.parameters()}
    if others := sorted(types - {"cpu", "cuda", "meta"}):
        fix = 'plan it on the CPU or on the meta device and name the GPU: device="h100"'
        found = f"its parameters are on {listing(others)}"
        raise PlanError(Problem(type(model).__name__, found, "cpu, cuda, meta", fix=fix))
    shards = parallelize if fsdp is None else fakes.fsdp_over(fsdp)
    with ExitStack() as scopes:
        scopes.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", SacWarning)  # about the policies that are tried, not about the user's
        scopes.enter_context(torch.random.fork_rng(devices=()))
        scopes.enter_context(lowered_to("cpu" if "cuda" in types else figures.name))
        scopes.enter_context(fakes.fake_ranks(fsdp) if fsdp is not None else nullcontext())
        steps = Rehearsal(model, arguments, figures, loss_fn=loss_fn, optimizer=optimizer, parallelize=shards)
        scopes.callback(remove, steps.model)  # so that the copy can be freed
        return _planned(steps, wanted, host, explains=explains)


def _planned(steps: Rehearsal, budget: StepBudget, host: int, *, explains: bool) -> Plan:
    prediction, device = steps.prediction, steps.device
    least, most = map(prediction.peak_of, (prediction.full, prediction.fastest))
    allowed = budget.within(least, most, device.memory_bytes)
    sending, chosen, peak = steps.choose(allowed, host)
    unplanned = ((one.block.path, one.profile.reason) for one in prediction.regions(chosen) if one.profile.reason)
    notes = [f"{path} is recomputed in full: {reason}" for path, reason in unplanned]
    if chosen == prediction.fastest:
        notes.append("no checkpointing is needed")
    plan = prediction.plan(chosen, allowed, sending)
    if plan.host:
        rate = f"{device.host_bytes_per_s / 1e9:.0f} GB/s"
        notes.append(f"{bytes_text(plan.host)} wait on the host, which forwards of blocks hide if copies reach {rate}")
    moved = 3 * optimizer_bytes("momentum", steps.model.parameters()) + 2 * steps.extra  # by the optimizer
    return replace(
        plan,
        rows=(replace(plan.rows[0], peak=peak, checked=not plan.host), *plan.rows[1:]),
        step_s=steps.step_s + prediction.time_of(chosen) + moved / (device.bytes_per_s * PRIORS[MEMORY]),
        notes=tuple(notes),
        explanation=steps.explain(chosen, prediction.peak_of(chosen) if plan.host else peak) if explains else None,
    )


def plan(
    model: nn.Module,
    inputs: fakes.Inputs,
    budget: Any,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    optimizer: Any = None,
    parallelize: Callable[[nn.Module], Any] | None = None,
    host_memory: int | str | None = None,
) -> Policy:
    """Return the policy that fits one training step of ``model`` into ``budget`` with little recomputation.

    ``inputs``: the arguments of the model, as a tuple or a dict.
    ``budget``: the peak of allocated bytes over forward and backward of one step, including parameters, gradients, and
    the state of ``optimizer`` if one is given (sgd, momentum, adam, adamw, or an optimizer of a class called so). It is
    an int (bytes), a text such as ``"40GiB"``, a share of the way from the least peak to the predicted peak without
    checkpointing, such as ``"50%"``, or one of the device's memory: ``"auto"`` or ``{"device": "90%"}``.
    ``loss_fn``: the loss is ``loss_fn(output)``, else ``output.loss``, else a scalar output.
    ``device``: the device whose figures price the ops (``"h100"``, …; default: the device of the parameters). For a
    model on the CPU or on the meta device, the ops that this device would run are planned; until then, no other thread
    may run a model on the CPU.
    ``parallelize``: a function that shards the copy in place (``fully_shard``, ``parallelize_module``), over a process
    group that sends nothing; the budget is then that of one rank.
    ``host_memory``: bytes of pinned host memory in which saved values may wait, as far as blocks hide their copies.
    No data is read, and the model and torch's random state are not changed. The policy's ``table()`` shows the plan
    next to the usual choices, and ``save(path)`` writes it with its figures in comments.

    Raises ``PlanError`` for a budget below the least peak, an unknown loss or device, inputs that are neither a tuple
    nor a dict, or a forward that needs data; ``ModelError`` for a model that sac is already on or that has no blocks.
    """
    options: Any = {"loss_fn": loss_fn, "device": device, "optimizer": optimizer, "parallelize": parallelize}
    made = make_plan(model, inputs, budget, host_memory=host_memory, **options)
    return replace(made.policy, figures=made)


# -- The best of several sizes


def best_size(
    sizes: Sequence[int], plan_of: Callable[[int], Plan]
) -> tuple[int | None, dict[int, tuple[Plan | None, int]]]:
    """Return the size with the most throughput, and for each one that was tried its plan (or None) and its peak.

    The powers of two and both ends are tried, up to the first that does not fit.
    """
    tried: dict[int, tuple[Plan | None, int]] = {}
    for size in (size for size in sizes if size in (sizes[0], sizes[-1]) or not size & (size - 1)):
        try:
            made = plan_of(size)
        except TooSmallError as error:
            tried[size] = None, error.least
            break
        tried[size] = made, made.peak
    speeds = {size: size / made.step_s for size, (made, _) in tried.items() if made is not None}
    return max(speeds, key=speeds.__getitem__, default=None), tried
