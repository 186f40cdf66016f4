"""What decides in which step regions are observed, when the plan is made, and which regions a step runs with."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from sac.blocks.applying import groups_of
from sac.blocks.find import Block
from sac.blocks.install import Applied, RegionForward, ours_on
from sac.config import Config, usable_policy
from sac.config_keys import STATES, StepBudget
from sac.engine.compiled import run_in_eager
from sac.engine.op_trace import RegionStats, SavedFigures
from sac.engine.region import Region, RegionGroup
from sac.errors import ConfigError, ModelError, Problem, SacWarning
from sac.fitting.agreeing import Grounds, agreed
from sac.fitting.fit import Fitted, Fitting, figures_at
from sac.fitting.meters import CpuMeter, Meter, meter_of
from sac.fitting.observing import Observation, Observed, Shapes
from sac.planner.profile import RegionProfile
from sac.planner.tracing import ProfiledRegion, merged
from sac.policy.model import Decision, Policy, Rule
from sac.policy.read import bytes_text
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
# A pass on larger inputs than were observed runs under full recomputation. Nothing of this needs other ranks, except
# the plan itself (`agreeing.py`).
#
# On a GPU, the first step of the plan is measured again. If it took more than the budget, for something that the
# observed step did not need, a warning says so.

# Note [A profiler in steps]
#
# On a CPU, a step is measured by torch's profiler. A `record_function` that begins while a profiler runs must not end
# while another one does: torch then writes to memory that is free. Pipeline schedules and loops of users have one
# around each forward. So when a step ends at the begin of a pass, none is measured from there on, but from the next
# pass; and passes that turn out not to be of the step are measured, too, and left out.

_EVERYTHING = Policy("everything", (Rule("everything", Decision.SAVE.value, ("*",)),))
_UNSEEN_STATES = 2  # per trained parameter
_MOST_FORWARDS = 64  # of a step that accumulates gradients; further ones are like them
_FULL, _PROFILED, _PLANNED = "full", "profiled", "planned"


def observing_policy(policy: Policy | None) -> Policy:
    """Return the policy that saves nothing, on the blocks and layers that ``policy`` chooses."""
    if policy is None:
        return Policy("full, until the plan is made")
    return replace(policy, rules=(), default=Decision.RECOMPUTE, plan=None)


class FittedForward(RegionForward):
    """Runs its module as the region that the controller has chosen for the pass."""

    def __init__(self, block: Block, group: RegionGroup, applied: Applied) -> None:
        super().__init__(block, group, applied)
        self.block = block
        self.full = self.region
        self.planned: Region | None = None
        self.is_plain = False  # whether the plan is no checkpointing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as a region."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            return run_in_eager(self._run, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.applied.fitting.begin((args, kwargs), self.block.path)
        return super()._run(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        observation = self.applied.fitting.observation
        # No checkpointing: as a region, its first call would hold all its results.
        call = self.original if self.is_plain and self.region is self.planned else super()._call
        if observation is None:
            return call(*args, **kwargs)
        observation.enter(self.block.path, args, kwargs)
        frame = None
        region = self.region if isinstance(self.region, ProfiledRegion) else None
        if region is not None:
            region.after_op = observation.after_op
        try:
            output = call(*args, **kwargs)
        except BaseException:
            observation.fail()
            raise
        finally:
            if region is not None:
                frame, region.last_frame, region.after_op = region.last_frame, None, None
        observation.leave(output, frame)
        return output


class _ForwardBegins:
    """A forward pre-hook of the model."""

    handle: Any

    def __init__(self, controller: Controller) -> None:
        self.controller = controller

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.controller.begin((args, kwargs))

    def undo(self) -> None:
        """Take the hook off the model, and stop observing."""
        self.controller.stop()
        self.handle.remove()


class Controller:
    """See Note [A budget]. ``observation``: that of the pass that is running, if it is observed."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        assert config.budget is not None
        self.model = model
        self.config = config
        self.budget: StepBudget = config.budget
        self.fitted: Fitted | None = None
        self.told = ""
        self.shapes: tuple[Shapes, ...] = ()  # of the inputs that the plan was made for
        self.device = torch.device("meta")  # known when the first pass begins: trainers move models after sac.apply
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")} | {"observation": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        """Have observed nothing."""
        self.observation: Observation | None = None
        self._meter: Meter = CpuMeter()
        self._observed: Observed | None = None
        self._profiles: list[RegionProfile] = []
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._versions: tuple[int, ...] = ()
        self._first = ""  # the path of the region that begins a pass, if the model's own forward is not called
        self._has_forward = False
        self._used = _PLANNED if self.fitted is not None else _FULL
        self._is_tried = False  # the observed step is the first one of the plan
        self._is_untried = False  # the plan has not been measured

    def attach(self, applied: Applied) -> None:
        """Take charge of the regions of ``applied``."""
        begins = _ForwardBegins(self)
        # In front of the hook that gathers parameters.
        begins.handle = self.model.register_forward_pre_hook(begins, with_kwargs=True, prepend=True)
        applied.fitting = self
        applied.restores = (*applied.restores, begins)
        self._tell(f"budget {self.budget}: no step has been observed yet")

    def stop(self) -> None:
        """Observe nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.observation is not None:
            self.observation.end()
            self.observation = None

    @property
    def _forwards(self) -> list[FittedForward]:
        found = (ours_on(module) for module in self.model.modules())
        return [one for one in found if isinstance(one, FittedForward)]

    # -- The begin of a pass

    def begin(self, inputs: Any, path: str | None = None) -> None:
        """A forward begins: of the model, or if that is not called itself of the region at ``path``."""
        if path is None:
            self._has_forward = True
        elif self._has_forward or self._first not in ("", path):
            return
        else:
            self._first = path
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
        observation, ends = self.observation, False
        if observation is not None and not observation.waits:
            if not (self._is_tried or self._has_trained()):
                observation.begin_again(self._live(inputs), shapes)
                return
            ends = not self._goes_on()
            if ends:
                self._end_pass()
        if self.observation is not None and not self._is_tried:
            self.observation.shapes.append(shapes)
        elif self.fitted is not None and self._is_known(shapes):
            self._use(_PLANNED)
        elif self._observed is not None and self._step_is_over():
            self._plan(inputs, shapes)
        else:
            self._use(_FULL)
            if not ends and self.observation is None and self.fitted is None:
                self._observe(inputs, shapes)
        if self.observation is None and not ends:  # see Note [A profiler in steps]
            if self._is_untried and self._used == _PLANNED:
                self._try(inputs, shapes)
            elif self._hooks and self._observed is None:
                self.stop()

    def _has_trained(self) -> bool:
        """Return whether the pass that is over was one of a training, not one to learn the shapes of results."""
        assert self.observation is not None
        has_changed = self.observation.has_gradients or self._versions_now() != self._versions
        return self.observation.is_whole and has_changed

    def _goes_on(self) -> bool:
        """Return whether the pass that begins is one more of the step that is observed."""
        assert self.observation is not None
        is_short = len(self.observation.shapes) < _MOST_FORWARDS
        return is_short and not self._step_is_over()

    def _is_known(self, shapes: Shapes) -> bool:
        """Return whether the plan was made for inputs that are at least as large in each dimension."""
        return any(_is_within(shapes, known) for known in self.shapes)

    def _use(self, which: str) -> None:
        """Have the next calls run as regions that are recomputed in full, or as those of the plan."""
        if which != self._used:
            self._used = which
            for one in self._forwards:
                one.region = one.planned if which == _PLANNED and one.planned is not None else one.full

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
        if self._observed is not None or not self._meter.is_free():
            return
        self._put_profiled()
        self._start(inputs, shapes, self._gradients)

    def _start(self, inputs: Any, shapes: Shapes, gradients: Callable[[], int]) -> None:
        self._versions = self._versions_now()
        if not self._hooks:  # some trainers run forward and backward inside of the optimizer's step
            self._hooks = [
                register(self._optimizer_steps)
                for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)
            ]
        self.observation = Observation(self._meter, self._live(inputs), gradients, shapes)

    def _try(self, inputs: Any, shapes: Shapes) -> None:
        """Measure the step that begins, the first one of the plan."""
        self._is_tried, self._is_untried = self._meter.is_light, False
        if self._is_tried:
            self._start(inputs, shapes, lambda: 0)

    def _put_profiled(self) -> None:
        self._used = _PROFILED
        forwards = {one.block.path: one for one in self._forwards}
        resolved = usable_policy(self.config.policy or _EVERYTHING)
        for block, group in groups_of(resolved, [one.block for one in forwards.values()], "selective"):
            forwards[block.path].region = ProfiledRegion(block, group)

    def _optimizer_steps(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
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
        found = observation.end()
        if self._is_tried:
            self._is_tried = False
            if found is not None:
                self._compare(found.record.peak)
            return
        if found is not None:
            profiles = [one.region.profile for one in self._forwards if isinstance(one.region, ProfiledRegion)]
            self._observed, self._profiles = found, [profile for profile in profiles if profile is not None]
        self._use(_FULL)

    def _compare(self, peak: int) -> None:
        """Report the peak of the first step of the plan, with a warning if it is above the budget."""
        assert self.fitted is not None
        allowed, text = self.fitted.allowed, f"the first step with the plan took {bytes_text(peak)}"
        self._tell(f"{self.fitted}; {text}")
        if peak > allowed:
            more = f"{peak - allowed} bytes ({bytes_text(peak - allowed)})"
            found = (
                f"{text}, {more} more than the budget of {self.budget}; {bytes_text(self.fitted.peak)} were predicted"
            )
            fix = f"{_TOO_MUCH}; or give a budget that is smaller by that much"
            warnings.warn(str(Problem("activation_checkpointing.budget", found, fix=fix)), SacWarning, stacklevel=2)

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

    def _live(self, inputs: Any) -> int:
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        parameters = [*self.model.parameters()]
        gradients = [one.grad for one in parameters if one.grad is not None]
        known = [*parameters, *gradients, *self.model.buffers(), *tree_leaves((inputs, states))]
        return self._meter.live([one for one in known if isinstance(one, Tensor)])

    def _unseen_state(self) -> int:
        """Return the bytes of optimizer state to reserve: none if a step of an optimizer has been seen."""
        if self._versions_now() != self._versions:
            return 0
        states = _UNSEEN_STATES if self.config.optimizer is None else STATES[self.config.optimizer]
        there = [
            state for optimizer in self._optimizers for state in tree_leaves([*optimizer.state.values()])
            if isinstance(state, Tensor)
        ]  # fmt: skip
        return max(0, states * self._bytes_of(self._trained()) - self._bytes_of(there))

    # -- The plan

    def _plan(self, inputs: Any, shapes: Shapes) -> None:
        """Make the plan at the begin of a step, and have the regions carry it out."""
        self.stop()
        _say(f"sac: one step observed, planning {len(self._profiles)} regions for a budget of {self.budget} …")
        grounds = agreed(self._grounds(inputs), self.model)
        fitting = Fitting(
            merged(grounds.profiles),
            grounds.record,
            figures_at(self.device),
            extra=grounds.extra,
            is_free=self.config.policy is None,
        )
        if not fitting.has_freedom:
            assert self.config.policy is not None
            found = f"policy {self.config.policy.name} saves nothing in these blocks, so there is nothing to choose"
            fix = "choose another policy, or leave it out to choose among all ops"
            raise ConfigError(Problem("activation_checkpointing.policy", found, fix=fix))
        fitted = fitting.within(self.budget, grounds.memory_bytes, "fitted")
        self.shapes = grounds.shapes
        self._put_plan(fitted)
        self._observed, self._profiles, self._is_untried = None, [], True
        _say(f"sac: {fitted}")
        self._use(_PLANNED if self._is_known(shapes) else _FULL)

    def _grounds(self, inputs: Any) -> Grounds:
        assert self._observed is not None
        live, gradients, block = self._live(inputs), self._gradients(), self._meter.block_bytes
        return Grounds(
            tuple(replace(one, bytes=tuple(-(-size // block) * block for size in one.bytes)) for one in self._profiles),
            self._observed.rebased(live, gradients),
            self._unseen_state(),
            self._meter.memory_bytes,
            self._observed.shapes,
        )

    def _put_plan(self, fitted: Fitted) -> None:
        forwards = {one.block.path: one for one in self._forwards}
        resolved = usable_policy(fitted.policy)
        for block, group in groups_of(resolved, [one.block for one in forwards.values()], "selective"):
            forward, region = forwards[block.path], Region(group, block.path)
            forward.planned, forward.is_plain = region, False
            if block.path in fitted.paths and fitted.saved[at := fitted.paths.index(block.path)] is None:
                forward.is_plain = True
                rules = [one.index for one in group.table.rules]
                size = fitted.held[at]
                saved = SavedFigures(size, 0, dict.fromkeys(rules, size), dict.fromkeys(rules, 1))
                region.stats = RegionStats(1, saved)
        self.fitted, self._used = fitted, ""
        self._tell(str(fitted))

    def _tell(self, text: str) -> None:
        """Show ``text`` in the report."""
        for one in self._forwards[:1]:
            others = tuple(note for note in one.applied.notes if note != self.told)
            one.applied.notes = (*others, text)
        self.told = text


def _is_within(shapes: Shapes, known: Shapes) -> bool:
    return len(shapes) == len(known) and all(
        len(one) == len(other) and all(size <= most for size, most in zip(one, other, strict=True))
        for one, other in zip(shapes, known, strict=True)
    )


def _say(text: str) -> None:
    """Write a line on stderr, on the first rank."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank()):
        print(text, file=sys.stderr, flush=True)


_TOO_MUCH = "find what takes memory that the observed step, the first one, did not take"
