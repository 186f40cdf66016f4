"""A budget in the config: in which step regions are observed, when the plan is made, what a step runs with."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from sac.blocks.install import Applied
from sac.config import Config
from sac.config_keys import STATES
from sac.errors import ModelError, PlanError, Problem, warn
from sac.memory_timeline import Meter, meter_of
from sac.planner.agreeing import Grounds, agreed, meshes_of
from sac.planner.cost import DEVICES, figures_of
from sac.planner.observing import Observation, Shapes, StepRecord
from sac.planner.predict import Choice, Plan, Prediction
from sac.planner.regions import FULL, PLANNED, PROFILED, BudgetRegions
from sac.tables import bytes_text
from sac.tensors import tensor_parts
from sac.torch_private import NO_TASK, current_graph_task_id, tree_leaves

# Note [A budget]
#
# In the first step, all regions are recomputed in full and profiled, and the allocator is asked at their borders. When
# the second step begins, the plan is made, and every region gets one that carries it out. Calls of earlier steps keep
# the table and the settings that they began with until their graph is gone.
#
# A *pass* is a forward of the model and its backward. The first step is over when a pass begins after parameters have
# changed, or gradients have gone. Until then, passes accumulate gradients, and are observed too, since later ones find
# memory in use that the first one did not.
#
# What a later step begins with is asked when it begins, with the optimizer's state. If no parameter has changed by then
# (a scaled loss has overflowed), the state is reserved for.
#
# A pass on larger inputs than were observed runs under full recomputation. If it begins a step, that step is observed
# for a new plan, else the next one; a plan is used if it covers all that the last one was made for. The first steps of
# a plan are measured, and the choice that is best by what they show is used from the next step on: a faster one that
# fits, or after a step above the budget a slower one. In the end, with host memory, comes a plan that sends values
# (Note [Values on the host]), if it is faster. If a step of that exceeds the budget, the plan before it is used again.
# Ranks that share parameters agree on their first plan (`agreeing.py`), which may send values, and keep it.

# Note [A profiler in steps]
#
# On a CPU, a step is measured by torch's profiler. A `record_function` that begins while a profiler runs must not end
# while another one does: torch then writes to memory that is free. Pipelines and users' loops have one around each
# forward. So when a step ends at the begin of a pass, the next one is measured from the next pass on; and passes that
# turn out not to be of the step are measured, too, and left out.

_MOST_CHECKS = 3  # steps of plans that are measured
_MOST_PLANS = 8  # of one training
_LARGER = "inputs larger than it was made for run under full recomputation"


class Controller(BudgetRegions):
    """See Note [A budget]."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        super().__init__(model, config)
        self.budget: Any = config.budget  # a ``StepBudget``
        self.fitted: Plan | None = None
        self.shapes: tuple[Shapes, ...] = ()  # of the inputs that the plan was made for
        self.handles: list[RemovableHandle] = []  # of hooks around the model's forward
        self._meter = Meter(torch.device("cpu"))  # known when a step is observed: trainers move models after sac.apply
        self._record: StepRecord | None = None  # of a step that is over
        self._checks = 0  # steps of the plan that are still to be measured
        self._prediction: Any = None  # of the plan
        self._choice: Choice = ()  # of those that send nothing
        self._host = 0 if "host" in config.full.store else config.full.host_memory or 0  # in which values may wait
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hook: RemovableHandle | None = None  # of each step of an optimizer
        self._versions: tuple[int, ...] = ()  # of parameters when the observed step began, else the last pass
        self._first: str | None = None  # what begins a pass: a path if the model's own forward, "", is not called
        self._is_in_forward = False  # of the model
        self._wants = False  # larger inputs came within a step: the next one is observed, from its begin
        self._plans = 0
        self.told = f"budget {self.budget}: no step has been observed yet"

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model observes a step of its own, in which it exchanges whatever regions have been copied.
        return Controller, (self.model, self.config), {"handles": self.handles, "used": ""}

    def __deepcopy__(self, memo: dict[int, Any]) -> Controller:
        if id(self.model) not in memo:  # a block is copied by itself
            return self
        made = memo[id(self)] = Controller(memo[id(self.model)], self.config)
        made.handles, made.used = copy.deepcopy(self.handles, memo), ""
        return made

    def put_on(self, **arguments: Any) -> Applied | None:
        """See ``BudgetRegions.put_on``; also put hooks on the model."""
        applied = super().put_on(**arguments)
        if applied is not None:
            before = self.model.register_forward_pre_hook(self.before, with_kwargs=True, prepend=True)  # before FSDP
            self.handles = [before, self.model.register_forward_hook(self.after, always_call=True)]
            applied.restores = (*applied.restores, self.undo)
        return applied

    def undo(self) -> None:
        """Take the hooks off the model, and stop observing."""
        self.close()
        for handle in self.handles:
            handle.remove()

    def close(self) -> None:
        """Observe nothing any more; also when the model is gone."""
        self.stop()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    __del__ = close

    # -- The begin of a pass

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a pass; a hook of the model."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._first, self._is_in_forward = "", True
            self.begin((args, kwargs))

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the forward of a pass; a hook of the model. ``output`` is None if it has raised."""
        if not torch.compiler.is_compiling():
            self._is_in_forward = False
            if output is None and torch.is_grad_enabled():
                self.stop()

    def begin(self, inputs: Any, path: str = "") -> None:
        """See ``BudgetRegions.begin``."""
        self._first = path if self._first is None else self._first
        if path != self._first:
            return
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        observation = self.observation
        if observation is not None and self._goes_on(observation, inputs, shapes):
            return
        if self._record is not None and self._step_is_over():
            self._make_plan(self._record, inputs)
        versions = self._versions_now()
        starts, self._versions = versions != self._versions, versions
        may_observe = observation is None and self._record is None  # see Note [A profiler in steps]
        if self.fitted is not None and _cover(self.shapes, [shapes]) and not (self._wants and starts and may_observe):
            self.use(PLANNED)
            if may_observe and self._checks and self._observe(inputs, shapes):
                self._checks -= 1
            elif may_observe:
                self.close()
            return
        self.use(FULL)
        if self.fitted is not None and not self.told.endswith(_LARGER):
            self.told = f"{self.told}; {_LARGER}"
        if self.fitted is not None and not starts:
            self._wants = True
            return
        may_observe = may_observe and (self._wants or _cover([shapes], self.shapes))
        may_plan = self.fitted is None or (self._plans < _MOST_PLANS and not meshes_of(self.model))
        is_lazy_now = any(map(is_lazy, self.model.parameters()))  # this pass makes them
        if may_observe and may_plan and not is_lazy_now and self._observe(inputs, shapes):
            self.use(PROFILED)

    def _goes_on(self, observation: Observation, inputs: Any, shapes: Shapes) -> bool:
        """Return whether the pass that begins is one more of the observed step; otherwise the observation ends."""
        is_check = self.used == PLANNED
        if not observation.waits:
            if not is_check and not observation.is_whole(self._versions_now() != self._versions):
                observation.begin_again(self._live(inputs))
            elif self._step_is_over():
                self._end_pass(observation)
        if self.observation is not None and is_check and not _cover(self.shapes, [shapes]):
            self.stop()
        if self.observation is not None:
            self.observation.shapes.append(shapes)
        return self.observation is not None

    def _observe(self, inputs: Any, shapes: Shapes) -> bool:
        """Observe the pass that begins, if it can be measured."""
        devices = {part.device for parameter in self.model.parameters() for part in tensor_parts(parameter)}
        meter = meter_of(next(iter(devices))) if len(devices) == 1 else None
        if meter is None:
            places = ", ".join(sorted(map(str, devices))) or "no device"
            found = f"a budget applies to one device, but the parameters are on {places}"
            fix = "move the model to one device, a GPU or the CPU; or plan with `sac plan`"
            raise ModelError(Problem(type(self.model).__name__, found, fix=fix))
        if not meter.is_free():
            return False
        if self._hook is None:
            mine = weakref.WeakMethod(self._optimizer_steps)
            steps = lambda optimizer, *_: method(optimizer) if (method := mine()) else None  # noqa: E731
            self._hook = register_optimizer_step_pre_hook(steps)
        self._meter = meter
        self.observation = Observation(meter, self._live(inputs), self._gradients, self._lost)
        self.observation.shapes.append(shapes)
        return True

    def _lost(self) -> None:
        """The graph of the observed step was freed before its backward was over: its loss or backward has raised."""
        observation = self.observation
        if self._first == "" and not self._is_in_forward and observation is not None and observation.is_here:
            self.stop()

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer) -> None:
        mine = {id(parameter) for parameter in self.model.parameters()}
        if not any(id(one) in mine for group in optimizer.param_groups for one in group["params"]):
            return
        self._optimizers.add(optimizer)
        seen = self.observation  # in another thread, the begin of the next pass ends it
        if seen is not None and seen.is_here and not seen.waits and current_graph_task_id() == NO_TASK:
            self._end_pass(seen)

    def _end_pass(self, observation: Observation) -> None:
        self.observation, record = None, observation.end()
        if self.used == PLANNED:
            if record is not None:
                self._compare(record)
            return
        if record is not None and _cover(record.shapes, self.shapes) and not _cover(self.shapes, record.shapes):
            self._record = record
        self._wants = False
        self.use(FULL)

    def _step_is_over(self) -> bool:
        """Return whether the pass that begins is not one more of the step that was observed."""
        return self._versions_now() != self._versions or not self._gradients()

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _versions_now(self) -> tuple[int, ...]:
        return tuple(part._version for parameter in self._trained() for part in tensor_parts(parameter))

    def _gradients(self) -> int:
        return self._meter.bytes_of([parameter.grad for parameter in self._trained()])

    def _states(self) -> list[Any]:
        return [[*optimizer.state.values()] for optimizer in self._optimizers]

    def _live(self, inputs: Any) -> int:
        parameters = [*self.model.parameters()]
        gradients = [one.grad for one in parameters]
        return self._meter.live([parameters, gradients, [*self.model.buffers()], inputs, self._states()])

    def _unseen_state(self) -> int:
        """Return the bytes of optimizer state to reserve: none if a step of an optimizer has been seen."""
        if self._versions_now() != self._versions:
            return 0
        states = STATES[self.config.optimizer or "adamw"]
        return max(0, states * self._meter.bytes_of(self._trained()) - self._meter.bytes_of(self._states()))

    # -- The plan

    def _make_plan(self, record: StepRecord, inputs: Any) -> None:
        """Make the plan at the begin of a step, and have the regions carry it out."""
        observed, self._record = self.profiles(self._meter.block_bytes), None
        what = "one step" if self.fitted is None else "a step with larger inputs"
        _say(f"sac: {what} observed, planning {len(observed)} regions for a budget of {self.budget} …")
        record = record.rebased(self._live(inputs), self._gradients())
        mine = Grounds(tuple(observed.values()), record, self._unseen_state(), self._meter.memory_bytes)
        grounds = agreed(mine, self.model)
        profiles = dict(zip(observed, grounds.profiles, strict=True))
        if unplanned := [(block, one) for block, one in profiles.items() if one.reason]:
            more = f" and {len(unplanned) - 1} more blocks are" if len(unplanned) > 1 else " is"
            found = f"it{more} recomputed in full, and not planned op by op: {unplanned[0][1].reason}"
            warn(Problem(unplanned[0][0].path, found))
        figures = DEVICES["h100"]  # of a GPU that is unknown too, since only their ratios matter here
        with contextlib.suppress(PlanError):
            figures = figures_of(self._meter.device)
        prediction = Prediction(profiles, grounds.record, figures, extra=grounds.extra)
        least, most = prediction.peak_of(prediction.full), prediction.peak_of(prediction.fastest)
        allowed = self.budget.within(least, most, grounds.memory_bytes)
        self._plans += 1
        if least > allowed:
            error = prediction.refuse("activation_checkpointing.budget", str(self.budget), allowed)
            if self.fitted is None:
                raise error
            self._plans = _MOST_PLANS
            warn(f"{error}\n    until then: {_LARGER}")
            return
        if self._host and not figures.host_bytes_per_s:
            self._host, found = 0, f"nothing is copied to the host from {figures.title}"
            warn(Problem("activation_checkpointing.host_memory", found))
        self.shapes, self._prediction, self.fitted = grounds.record.shapes, prediction, None
        self._checks = 0 if most <= allowed or meshes_of(self.model) else _MOST_CHECKS
        self._take(prediction.search(allowed), allowed)

    def _take(self, choice: Choice, allowed: int, took: str = "") -> None:
        """Use a choice, or after the checks a faster one that sends values. ``took``: what a step has taken so far."""
        self._choice, last = choice, self.fitted
        plain = way = self._prediction
        if self._host and not self._checks:
            sending = plain.sending(self._host)
            if plain.time_of(faster := sending.search(allowed)) < plain.time_of(choice):
                way, choice = sending, faster
        self.fitted = fitted = plain.plan(choice, allowed, way)
        if last is not None and last.policy == fitted.policy:
            self.told = f"{fitted}; {took}"
            return
        self.told = str(fitted)
        self._checks = 1 if fitted.host and not meshes_of(self.model) else self._checks
        self.plan(way.regions(choice))
        _say(f"sac: {took}{'; now ' if took else ''}{fitted}")

    def _compare(self, record: StepRecord) -> None:
        """Report the peak of a step of the plan; use the fastest choice that fits by what the step shows."""
        prediction, fitted, choice = self._prediction, self.fitted, self._choice
        assert fitted is not None
        allowed, over = fitted.budget, record.peak - fitted.budget
        text = f"a step with the plan took {bytes_text(record.peak)}"
        if over > 0:
            more = f"{over} bytes ({bytes_text(over)}) more than the budget of {self.budget}"
            fix = "find what takes memory that the first step did not. The plan is changed where that helps"
            found = f"{text}, {more}; {bytes_text(fitted.peak)} were predicted"
            warn(Problem("activation_checkpointing.budget", found, fix=fix))
            self._host = 0 if fitted.host else self._host
        if record.shapes == self.shapes and not fitted.host:
            prediction.learn(record, choice, exceeds=over > 0)
            best = prediction.search(allowed, choice)
            is_better = over > 0 or prediction.time_of(best) < prediction.time_of(choice)
            if is_better and prediction.peak_of(best) <= allowed:
                choice = best
            else:
                self._checks = 0
        self._take(choice, allowed, text)


def _cover(several: Sequence[Shapes], others: Sequence[Shapes]) -> bool:
    """Return whether each of the ``others`` is no larger than one of ``several`` in any dimension."""

    def covers(known: Shapes, other: Shapes) -> bool:
        sizes = zip(chain(*known), chain(*other), strict=False)
        return [*map(len, known)] == [*map(len, other)] and all(most >= size for most, size in sizes)

    return all(any(covers(known, one) for known in several) for one in others)


def _say(text: str) -> None:
    """Write a line on stderr, on the first rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(text, file=sys.stderr, flush=True)
