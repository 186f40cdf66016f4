"""`budget:` in the config: in which step regions are observed, when the plan is made, and what a step runs with."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sac.blocks.install import Applied
from sac.config import Config
from sac.config_keys import STATES, StepBudget
from sac.errors import ConfigError, ModelError, PlanError, Problem, SacError, warn
from sac.planner.agreeing import Grounds, agreed, meshes_of
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.meters import CpuMeter, Meter, meter_of
from sac.planner.observing import Observation, Observed, Shapes
from sac.planner.predict import Choice, Prediction, rounded
from sac.planner.profile import RegionProfile
from sac.planner.regions import FULL, PLANNED, BudgetRegions, PlannedRegions, planned_regions
from sac.planner.tracing import merged
from sac.policy.model import Policy
from sac.policy.read import bytes_text
from sac.tables import seconds_text
from sac.tensors import storage_bytes, tensor_parts
from sac.torch_private import NO_TASK, current_graph_task_id, tree_leaves

# Note [A budget]
#
# A controller is shared by the regions of one `sac.apply` with a budget. In its first step, all regions are recomputed
# in full, and record their tapes; the allocator is asked at their borders. When the second step begins, the plan is
# made, and every region gets one that carries it out. Calls of earlier steps are not touched by that: each holds the
# table and the settings that it began with until its graph is gone.
#
# A *pass* is a forward of the model and its backward. The first step is over when a pass begins after parameters have
# changed, or gradients have gone. Until then, passes accumulate gradients, and are observed too, since later ones find
# memory in use that the first one did not. Several forwards may also come before their backwards, in any order: those
# of two losses, or the micro-batches of a pipeline schedule.
#
# What a later step begins with is asked when it begins, so the optimizer's state is counted when it is there. If no
# parameter has changed by then (a scaled loss has overflowed), the state is reserved for.
#
# A pass on larger inputs than were observed runs under full recomputation. If it begins a step, that step is observed
# for a new plan, else the next one; a plan is used if it covers all that the last one was made for. Nothing of this
# needs other ranks, except the plan itself (`agreeing.py`): ranks that share parameters keep their first one.
#
# The first steps of the plan are measured too, and show by how much the bounds of its options were too high. If a
# faster choice fits by what is then known, it is used from the next step on. Ranks that share parameters would have to
# agree on that again, and keep their plan.

# Note [A profiler in steps]
#
# On a CPU, a step is measured by torch's profiler. A `record_function` that begins while a profiler runs must not end
# while another one does: torch then writes to memory that is free. Pipeline schedules and loops of users have one
# around each forward. So when a step ends at the begin of a pass, none is measured from there on, but from the next
# pass; and passes that turn out not to be of the step are measured, too, and left out.

_UNSEEN_STATES = 2  # per trained parameter
_MOST_FORWARDS = 64  # of a step that accumulates gradients; further ones are like them
_MOST_CHECKS = 3  # steps of plans that are measured
_MOST_PLANS = 8  # of one training
_WORTH_CHANGING = 1e-6  # of the recomputed time: more than rounding


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """The plan of a budget: what the regions do, and its figures in bytes and seconds."""

    policy: Policy
    allowed: int
    peak: int
    least: int
    most: int
    seconds: float
    forward_seconds: float
    in_flight: int = 1
    next_faster: tuple[int, str] | None = None  # the least peak with a faster option in one region, and the region
    is_limited: bool = False  # a policy says what may be saved: ``most`` is with all of that

    def __str__(self) -> str:
        again = self.seconds / self.forward_seconds if self.forward_seconds else 0.0
        size, path = self.next_faster or (0, "")
        most = "with all that the policy saves" if self.is_limited else "without checkpointing"
        needs_none = self.most <= self.allowed and not self.is_limited
        return (
            f"planned for a budget of {bytes_text(self.allowed)}: predicted peak {bytes_text(self.peak)} (least "
            f"{bytes_text(self.least)}, {most} {bytes_text(self.most)}), "
            f"{seconds_text(self.seconds)} of recomputing and recording, {again:.0%} of the blocks' forward"
            + (f", {self.in_flight} forwards in flight" if self.in_flight > 1 else "")
            + (": no checkpointing is needed" if needs_none else "")
            + (f"; a faster option of {path} would take {bytes_text(size)}" if path else "")
        )


class _ForwardHooks:
    """Hooks of the model around its forward."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        model = controller.model
        # In front of the hook that gathers parameters.
        self.handles = [model.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)]
        self.handles.append(model.register_forward_hook(self.after, always_call=True))

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.controller.begin((args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of a pass; ``output`` is None if it has raised."""
        if not torch.compiler.is_compiling():
            self.controller.is_in_forward = False
            if output is None and torch.is_grad_enabled():
                self.controller.stop()

    def undo(self) -> None:
        """Take the hooks off the model, and stop observing."""
        self.controller.stop()
        for handle in self.handles:
            handle.remove()


class Controller(BudgetRegions):
    """See Note [A budget]."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        assert config.budget is not None
        self.budget: StepBudget = config.budget
        self.fitted: BudgetPlan | None = None
        self.told = ""
        self.shapes: tuple[Shapes, ...] = ()  # of the inputs that the plan was made for
        self.new: PlannedRegions | None = None  # a plan that begins with the next pass
        self.device = torch.device("meta")  # known when the first pass begins: trainers move models after sac.apply
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")} | {"observation": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()
        self.used = ""  # whatever the copied regions are, the next pass exchanges them

    def _forget(self) -> None:
        """Have observed nothing."""
        self.observation = None
        self.is_in_forward = False
        self._meter: Meter = CpuMeter()
        self._observed: Observed | None = None
        self._profiles: tuple[RegionProfile, ...] = ()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._versions: tuple[int, ...] = ()
        self._first = ""  # the path of the region that begins a pass, if the model's own forward is not called
        self._has_forward = False
        self.used = PLANNED if self.fitted is not None else FULL
        self._is_check = False  # the observed step is one of the plan
        self._checks = 0  # that are still to come
        self._prediction: Prediction | None = None
        self._choice: Choice = ()
        self._last: tuple[int, ...] = ()  # versions when the last pass began
        self._wants = False  # larger inputs came within a step: the next one is observed, from its begin
        self._plans = 0

    def attach(self, applied: Applied) -> None:
        """Take charge of the regions of ``applied``."""
        applied.restores = (*applied.restores, _ForwardHooks(self))
        self._tell(f"budget {self.budget}: no step has been observed yet")

    def stop(self) -> None:
        """Observe nothing more; also when the model is gone."""
        self._is_check = False
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        super().stop()

    def __del__(self) -> None:
        if vars(self).get("observation") is not None:
            self.stop()

    # -- The begin of a pass

    def begin(self, inputs: Any, path: str | None = None) -> None:
        """See ``BudgetRegions.begin``."""
        if path is None:
            self._has_forward = self.is_in_forward = True
        elif self._has_forward or self._first not in ("", path):
            return
        else:
            self._first = path
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        observation, ends = self.observation, False
        if observation is not None and observation.has_failed and current_graph_task_id() == NO_TASK:
            self.stop()
            ends = True
        elif observation is not None and not observation.waits:
            if not (self._is_check or self._has_trained()):
                observation.begin_again(self._live(inputs), shapes)
                return
            ends = len(observation.shapes) >= _MOST_FORWARDS or self._step_is_over()
            if ends:
                self._end_pass()
        if self._is_check and not self._is_known(shapes):
            self.stop()
            ends = True
        now = self._versions_now() if self.fitted is not None and self._may_plan() else ()
        starts, self._last = now != self._last, now
        if self.observation is not None:
            self.observation.shapes.append(shapes)
        elif self._observed is not None and self._step_is_over():
            self._make_plan(inputs, shapes)
        elif self.fitted is not None and self._is_known(shapes) and not (self._wants and starts and not ends):
            self.use(PLANNED)
        else:
            self.use(FULL)
            if self.fitted is not None and not self.told.endswith(_LARGER):
                self._tell(f"{self.told}; {_LARGER}")
            if self.fitted is not None and not starts:
                self._wants = True
            elif not ends and self._observed is None and self._may_plan() and (self._wants or self._covers([shapes])):
                self._observe(inputs, shapes)
        if self.observation is None and not ends:  # see Note [A profiler in steps]
            if self._checks and self.used == PLANNED and self._observed is None and self._meter.is_free():
                self._is_check, self._checks = True, self._checks - 1
                self._start(inputs, shapes)
            elif self._hooks and self._observed is None:
                self.stop()

    def use(self, which: str) -> None:
        """See ``BudgetRegions.use``; a new plan begins here, so that the report is of the last one until then."""
        if which == PLANNED and self.new is not None:
            planned, self.new = self.new, None
            self.plan(planned)
        else:
            super().use(which)

    def _may_plan(self) -> bool:
        if self.fitted is not None:
            return self._plans < _MOST_PLANS and not meshes_of(self.model)
        return not any(map(is_lazy, self.model.parameters()))  # this pass makes them

    def _has_trained(self) -> bool:
        """Return whether the pass that is over was one of a training, not one to learn the shapes of results."""
        assert self.observation is not None
        has_changed = self.observation.has_gradients or self._versions_now() != self._versions
        return self.observation.is_whole and has_changed

    def _is_known(self, shapes: Shapes) -> bool:
        """Return whether the plan was made for inputs that are at least as large in each dimension."""
        return any(_is_within(shapes, known) for known in self.shapes)

    def _covers(self, shapes: Sequence[Shapes]) -> bool:
        """Return whether a plan for inputs of these shapes is right for all that the last one was made for."""
        return all(any(_is_within(known, one) for one in shapes) for known in self.shapes)

    def _find_device(self) -> None:
        devices = {part.device for parameter in self.model.parameters() for part in tensor_parts(parameter)}
        device = next(iter(devices)) if len(devices) == 1 else torch.device("meta")
        meter = meter_of(device)
        if meter is None:
            places = ", ".join(sorted(map(str, devices))) or "no device"
            found = f"a budget applies to one device, but the parameters are on {places}"
            fix = "move the model to one device, a GPU or the CPU; or plan with `sac plan`"
            raise ModelError(Problem(type(self.model).__name__, found, fix=fix))
        self.device, self._meter = device, meter

    def _observe(self, inputs: Any, shapes: Shapes) -> None:
        self._find_device()
        if self._meter.is_free():
            self.profile()
            self._start(inputs, shapes)

    def _start(self, inputs: Any, shapes: Shapes) -> None:
        self._versions = self._versions_now()
        if not self._hooks:  # some trainers run forward and backward inside of the optimizer's step
            mine = weakref.ref(self)

            def steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
                controller = mine()
                if controller is not None:
                    controller._optimizer_steps(optimizer)

            self._hooks = [
                register(steps) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            ]
        self.observation = Observation(self._meter, self._live(inputs), self._gradients, shapes, self._lost)

    def _lost(self) -> None:
        """The graph of the observed step was freed before its backward was over: its loss or backward has raised."""
        if self._has_forward and not self.is_in_forward and self._meter.is_here():
            self.stop()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(one) in mine for group in optimizer.param_groups for one in group["params"]):
            return
        self._optimizers.add(optimizer)
        is_over = self.observation is not None and not self.observation.waits and current_graph_task_id() == NO_TASK
        if is_over and self._meter.is_here():  # in another thread, the begin of the next pass ends this one
            self._end_pass()

    def _end_pass(self) -> None:
        assert self.observation is not None
        observation, self.observation = self.observation, None
        observed = observation.end()
        if self._is_check:
            self._is_check = False
            if observed is not None:
                self._compare(observed)
            return
        self._wants = False
        if observed is not None and self._covers(observed.shapes) and not all(map(self._is_known, observed.shapes)):
            self._observed, self._profiles = observed, self.profiles()
        self.use(FULL)

    def _step_is_over(self) -> bool:
        """Return whether the pass that begins is not one more of the step that was observed."""
        return self._versions_now() != self._versions or not self._gradients()

    # -- What is there

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(part._version for parameter in self._trained() for part in tensor_parts(parameter))

    def _gradients(self) -> int:
        return self._bytes_of([parameter.grad for parameter in self._trained() if parameter.grad is not None])

    def _bytes_of(self, tensors: Sequence[Tensor]) -> int:
        block = self._meter.block_bytes
        sizes = {
            part.untyped_storage()._cdata: storage_bytes(part)
            for tensor in tensors
            for part in tensor_parts(tensor)
            if part.device == self.device
        }
        return sum(-(-size // block) * block for size in sizes.values())

    def _states(self) -> list[Any]:
        return tree_leaves([[*optimizer.state.values()] for optimizer in self._optimizers])

    def _live(self, inputs: Any) -> int:
        parameters = [*self.model.parameters()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        known = [*parameters, *gradients, *self.model.buffers(), *tree_leaves(inputs), *self._states()]
        return self._meter.live([one for one in known if isinstance(one, Tensor)])

    def _unseen_state(self) -> int:
        """Return the bytes of optimizer state to reserve: none if a step of an optimizer has been seen."""
        if self._versions_now() != self._versions:
            return 0
        states = _UNSEEN_STATES if self.config.optimizer is None else STATES[self.config.optimizer]
        there = [state for state in self._states() if isinstance(state, Tensor)]
        return max(0, states * self._bytes_of(self._trained()) - self._bytes_of(there))

    # -- The plan

    def _make_plan(self, inputs: Any, shapes: Shapes) -> None:
        """Make the plan at the begin of a step, and have the regions carry it out."""
        self.stop()
        what = "one step" if self.fitted is None else "a step with larger inputs"
        _say(f"sac: {what} observed, planning {len(self._profiles)} regions for a budget of {self.budget} …")
        assert self._observed is not None
        block, live = self._meter.block_bytes, self._live(inputs)
        grounds = Grounds(
            tuple(rounded(one, block) for one in self._profiles),
            self._observed.rebased(live, self._gradients()),
            self._unseen_state(),
            self._meter.memory_bytes,
            self._observed.shapes,
        )
        grounds = agreed(grounds, self.model)
        self._warn_of_full(grounds.profiles)
        profiles, policy = merged(grounds.profiles), self.config.policy
        prediction = Prediction(
            profiles, grounds.record, _figures_at(self.device), extra=grounds.extra, may_skip=policy is None
        )
        least, most = prediction.least(), prediction.peak_of(prediction.fastest)
        allowed = _allowed(self.budget, least, most, grounds.memory_bytes)
        self._observed, self._profiles = None, ()
        self._plans += 1
        error: SacError | None = None
        if policy is not None and not any(profile.candidates or profile.reason for profile in profiles):
            found = f"policy {policy.name} saves nothing in these blocks, so there is nothing to choose"
            fix = "choose another policy, or leave it out to choose among all ops"
            error = ConfigError(Problem("activation_checkpointing.policy", found, fix=fix))
        elif least > allowed:
            error = prediction.refuse("activation_checkpointing.budget", str(self.budget), allowed)
        if error is not None and self.fitted is None:
            raise error
        if error is not None:
            self._plans = _MOST_PLANS
            warn(f"{error}\n    until then: {_LARGER}")
            self.use(PLANNED if self._is_known(shapes) else FULL)
            return
        self.shapes, self._prediction, self._choice = grounds.shapes, prediction, ()
        self._checks = 0 if most <= allowed or meshes_of(self.model) else _MOST_CHECKS
        self._put(prediction, prediction.search(allowed), allowed)
        self.use(PLANNED if self._is_known(shapes) else FULL)

    def _put(self, prediction: Prediction, choice: Choice, allowed: int, *, took: str = "") -> None:
        """Use a choice from the next pass on. ``took``: what a step with the last one has taken."""
        planned = planned_regions(prediction, choice, "planned")
        self.fitted = BudgetPlan(
            planned.policy,
            allowed,
            prediction.peak_of(choice),
            prediction.least(),
            prediction.peak_of(prediction.fastest),
            prediction.time_of(choice),
            sum(sum(prediction.times[kind]) for kind in prediction.kinds),
            prediction.in_flight,
            prediction.next_faster(choice),
            self.config.policy is not None,
        )
        if choice != self._choice:
            self._choice, self.new = choice, planned
            self._tell(str(self.fitted))
            _say(f"sac: {took}{', so a faster choice fits: ' if took else ''}{self.fitted}")
        else:
            self._tell(f"{self.fitted}; {took}")

    def _warn_of_full(self, profiles: Sequence[RegionProfile]) -> None:
        """Warn of the regions that cannot be planned, which run under full recomputation."""
        unplanned = [one for one in profiles if one.reason]
        if unplanned:
            more = f" and {len(unplanned) - 1} more blocks are" if len(unplanned) > 1 else " is"
            found = f"it{more} recomputed in full, and not planned op by op: {unplanned[0].reason}"
            warn(Problem(unplanned[0].paths[0], found))

    def _compare(self, observed: Observed) -> None:
        """Report the peak of a step of the plan; use a faster choice if one fits by what the step shows."""
        prediction, fitted = self._prediction, self.fitted
        assert prediction is not None
        assert fitted is not None
        peak, allowed = observed.record.peak, fitted.allowed
        text = f"a step with the plan took {bytes_text(peak)}"
        self._tell(f"{fitted}; {text}")
        if peak > allowed:
            more = f"{peak - allowed} bytes ({bytes_text(peak - allowed)})"
            found = f"{text}, {more} more than the budget of {self.budget}; {bytes_text(fitted.peak)} were predicted"
            fix = f"{_TOO_MUCH}; or give a budget that is smaller by that much"
            warn(Problem("activation_checkpointing.budget", found, fix=fix))
        if observed.shapes != self.shapes:
            return
        prediction.learn(observed.record, self._choice)
        choice = prediction.search(allowed, self._choice)
        if prediction.time_of(choice) >= (1 - _WORTH_CHANGING) * prediction.time_of(self._choice):
            choice, self._checks = self._choice, 0
        self._put(prediction, choice, allowed, took=text)
        if not self._checks:
            self._prediction = None

    def _tell(self, text: str) -> None:
        """Show ``text`` in the report."""
        for one in self.forwards[:1]:
            others = tuple(note for note in one.applied.notes if note != self.told)
            one.applied.notes = (*others, text)
        self.told = text


def _allowed(budget: StepBudget, least: int, most: int, memory_bytes: int) -> int:
    """Return a budget in bytes."""
    if budget.bytes is not None:
        return budget.bytes
    if budget.share is not None:
        return least + int(budget.share * max(0, most - least))
    return int((budget.of_device or 0) * memory_bytes)


def _figures_at(device: torch.device) -> Device:
    """Return the figures of a device; of another GPU if it is unknown, since only their ratios matter here."""
    try:
        return device_at_hand(device)
    except PlanError:
        return device_named("h100")


def _is_within(shapes: Shapes, known: Shapes) -> bool:
    return len(shapes) == len(known) and all(
        len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
        for one, other in zip(shapes, known, strict=True)
    )


def _say(text: str) -> None:
    """Write a line on stderr, on the first rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(text, file=sys.stderr, flush=True)


_LARGER = "inputs larger than it was made for run under full recomputation"
_TOO_MUCH = "find what takes memory that the observed step, the first one, did not take"
