"""What plans of one model are made with: profiles, prices, and steps of a copy without data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sac.blocks.attach import apply, refuse_own_checkpointing
from sac.blocks.cache import turn_off_cache
from sac.blocks.find import Block, drop_frozen, find_blocks
from sac.blocks.paths import parts_of
from sac.blocks.wrap import ours_on, regions_of, remove, take_off
from sac.errors import ModelError, PlanError, Problem, SacWarning
from sac.planner.budget import optimizer_bytes
from sac.planner.calibration import Calibration
from sac.planner.choices import NONE, Choice, policy_for
from sac.planner.cost import entry_times
from sac.planner.demands import Engine, recomputed
from sac.planner.devices import Device, device_at_hand, device_named
from sac.planner.fakes import Inputs, call, fake_copy, fake_inputs, fake_mode, real_copy
from sac.planner.keep_sets import KeepSet, pareto
from sac.planner.layers import BudgetTooSmallError, assign, assign_alike
from sac.planner.ledger import Ledger
from sac.planner.memory import StepModel
from sac.planner.profile import RegionProfile
from sac.planner.quick_fakes import QuickFakes
from sac.planner.scratch import Scratch
from sac.planner.sharding import shard_again
from sac.planner.step import StepRecord, run_step
from sac.planner.tracing import CannotProfile, profile_regions
from sac.region.settings import NEVER, RERUN

# Note [The walk of a plan]
#
# model, inputs -> a copy without data (fakes.py) -> a profile of each kind of region (tracing.py) -> what each op takes
# (cost.py) -> all keep-sets of a kind of which none is better than another (keep_sets.py) -> a step of the whole model
# with as many of them as there are layers, which tells what each holds and how high the step goes with it (step.py,
# memory.py) -> the choice per layer that takes least time within the budget (layers.py) -> a step with that choice. If
# it goes as high as predicted, or at least not above the budget, the choice becomes a policy (choices.py); otherwise
# what was learnt from it is solved for again.

_HALVINGS = 16
_MOST_MEASURED = 300  # regions, in all steps that are run before anything is asked for
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to checkpoint the model: what it keeps and its peak in bytes, and what runs again, in FLOPs and seconds.

    ``choice``: of each region, in forward order. ``is_checked``: a step was run with it; else the peak is predicted.
    """

    label: str
    choice: tuple[int, ...]
    kept: int
    peak: int
    flops: int
    seconds: float
    is_checked: bool = False


@dataclass(slots=True)
class Planner:
    """One model that is planned: its copy, profiles and what its steps have shown. See Note [The walk of a plan]."""

    model: nn.Module  # the copy
    inputs: Inputs
    blocks: tuple[Block, ...]
    device: Device
    engine: str
    loss_fn: Callable[[Any], Tensor] | None
    profiles: tuple[RegionProfile, ...]
    times: tuple[tuple[float, ...], ...]  # seconds of each entry of each profile
    choices: tuple[tuple[Choice, ...], ...]
    step: StepModel
    ledger: Callable[[], Ledger]
    accumulates: bool = False
    progress: Progress = lambda done, total, label: None
    records: dict[tuple[int, ...], StepRecord] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[int, ...]:
        """The kind of each position."""
        return self.step.kinds

    def run(self, choice: tuple[int, ...]) -> StepRecord:
        """Run a step with this choice per position, and learn from it."""
        if choice in self.records:
            return self.records[choice]
        policy = policy_for(self.profiles, self.choices, self.kinds, self.step.paths, choice, "planned")
        plain = {
            path
            for path, kind, one in zip(self.step.paths, self.kinds, choice, strict=True)
            if self.choices[kind][one].keep is None
        }
        with _quiet():
            apply(self.model, {"mode": "selective", "policy": policy, "engine": self.engine, "verify": NEVER})
            try:
                for block in self.blocks:
                    if block.path in plain:  # its first call would be watched; all later ones run as without sac
                        for _, module in parts_of(block.module):
                            take_off(module)
                for installed in regions_of(self.model):
                    installed.region.kind.lists_ops = False
                places = [(block.path, block.module) for block in self.blocks]
                record = run_step(
                    self.model, self.inputs, places, self.ledger(), self.loss_fn, accumulates=self.accumulates
                )
            finally:
                remove(self.model)
        self.records[choice] = record
        self.step.learn(record, choice)
        return record

    def measure(self) -> None:
        """Run steps until each choice of each kind has stood in one; each step has as many as there are layers.

        Where a kind has few of many layers that takes too many steps: the rest is estimated, and checked if it is used.
        """
        rounds = max(2, *(-(-len(self.choices[kind]) // self.kinds.count(kind)) for kind in {*self.kinds}))
        rounds = min(rounds, max(2, _MOST_MEASURED // len(self.kinds)))
        for one in range(rounds):
            self.progress(one, rounds + 1, "running steps")
            taken = [one * self.kinds.count(kind) for kind in range(len(self.choices))]
            found = []
            for kind in self.kinds:
                # No checkpointing is the second: what the first region is given is held by the model itself.
                count = len(self.choices[kind])
                found.append((taken[kind] - 2) % count if taken[kind] % count else count - 2)
                taken[kind] += 1
            self.run(tuple(found))

    def assign(self, budget: int, *, same_layers: bool = False) -> tuple[int, ...]:
        """Return the fastest choice within ``budget``, as far as is known; raises ``BudgetTooSmallError``."""
        if self.step.in_flight == 1:
            return self._assign(budget, same_layers=same_layers)
        # The other micro-batches hold as much again, whatever is asked for: so much less is there for this one.
        low, high, found = 0, budget, None
        for _ in range(_HALVINGS):
            middle = (low + high + 1) // 2
            try:
                choice = self._assign(middle, same_layers=same_layers)
            except BudgetTooSmallError as error:
                low = max(low, min(error.least, high))
                middle, choice = low, self._assign(error.least, same_layers=same_layers)
                if found is None and self.step.peak(choice)[0] > budget:
                    raise BudgetTooSmallError(budget, self.step.peak(choice)[0], error.row) from None
            if self.step.peak(choice)[0] <= budget:
                low, found = middle, choice
            else:
                high = middle - 1
            if low >= high:
                break
        if found is None:
            raise AssertionError("the least choice fits, or has been refused")
        return found

    def _assign(self, budget: int, *, same_layers: bool) -> tuple[int, ...]:
        held = [self.step.held_by(kind) for kind in self.kinds]
        seconds = [tuple(choice.seconds for choice in self.choices[kind]) for kind in self.kinds]
        if same_layers:
            return assign_alike(self.step.rows(), held, seconds, budget, self.kinds)
        return assign(self.step.rows(), held, seconds, budget)

    def point(self, label: str, choice: tuple[int, ...]) -> Point:
        """Return what a choice costs; by a step with it if one was run, else as predicted."""
        record = self.records.get(choice)
        picked = [self.choices[kind][one] for kind, one in zip(self.kinds, choice, strict=True)]
        return Point(
            label,
            choice,
            kept=sum(self.step.held_by(kind)[one] for kind, one in zip(self.kinds, choice, strict=True)),
            peak=self.step.peak_of(record) if record is not None else self.step.peak(choice)[0],
            flops=sum(one.flops for one in picked),
            seconds=sum(one.seconds for one in picked),
            is_checked=record is not None,
        )

    def least(self) -> Point:
        """Return the choice with the least peak, and the least time among those."""
        try:
            return self.point("least", self.assign(0))  # a step of no bytes, which there is not
        except BudgetTooSmallError as error:
            return self.point("least", self.assign(error.least))

    @property
    def without_checkpointing(self) -> tuple[int, ...]:
        """The choice that is no region at all, everywhere: the last of each kind."""
        return self.everywhere(lambda kind: len(self.choices[kind]) - 1)

    def everywhere(self, pick: Callable[[int], int]) -> tuple[int, ...]:
        """Return the choice that gives each region what ``pick`` returns for its kind."""
        return tuple(pick(kind) for kind in self.kinds)


def prepare(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss_fn: Callable[[Any], Tensor] | None = None,
    device: str | torch.device | None = None,
    engine: str = "auto",
    optimizer: Any = None,
    real: bool = False,
    calibration: Calibration | None = None,
    parallelize: Callable[[nn.Module], Any] | None = None,
    accumulates: bool = False,
    in_flight: int = 1,
    progress: Progress | None = None,
) -> Planner:
    """Return what plans are made with: profiles, prices, and what steps with each choice take.

    ``parallelize`` is given the copy, and shards it in place: ``fully_shard``, ``parallelize_module``. ``accumulates``:
    the gradients of earlier micro-batches are there from the start. ``in_flight``: micro-batches whose activations a
    pipeline stage holds at once, this one included. The model is left as it is. For the rest, see ``sac.plan``.
    """
    refuse_unfit(model)
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise PlanError(Problem("in_flight", f"{in_flight!r} micro-batches", "1, 2, 3, …"))
    figures = figures_of(model, device)
    told = progress or (lambda done, total, label: None)
    on_cpu = figures.name == "cpu"
    ledger = partial(Ledger, 1 if on_cpu else _CUDA_BLOCK, Scratch() if on_cpu else None, QuickFakes(), on_host=on_cpu)
    told(0, 4, "copying the model")
    mode = fake_mode()
    copied = real_copy(model) if real else fake_copy(model, mode)
    if parallelize is not None:
        parallelize(copied)
    extra = optimizer_bytes(optimizer, copied.parameters())
    turn_off_cache(copied)
    given = inputs if real else fake_inputs(inputs, mode)
    blocks, _ = drop_frozen(find_blocks(copied), copied)
    tensors = [*copied.parameters(), *(one for one in tree_leaves(given) if isinstance(one, Tensor))]
    if not blocks or not any(tensor.requires_grad for tensor in tensors):
        raise ModelError(Problem(type(model).__name__, "every block of this model is frozen: there is nothing to plan"))
    told(1, 4, "profiling the blocks")
    order: list[str] = []
    with _quiet(), ledger():
        try:
            profiles = profile_regions(blocks, lambda: call(copied, given), order)
        except CannotProfile as error:
            found = f"its blocks cannot be planned op by op: {error}"
            raise PlanError(Problem(type(model).__name__, found, fix="use mode: full, or a policy by hand")) from None
    if not profiles:
        found = "no block of this model is called with gradients: there is nothing to plan"
        raise ModelError(Problem(type(model).__name__, found))
    shard_again(copied)
    told(2, 4, "choosing what to keep")
    of_path = {path: kind for kind, profile in enumerate(profiles) for path in profile.paths}
    times = tuple(entry_times(profile, figures, calibration) for profile in profiles)
    run_by = pricing_engine(engine)
    choices = tuple(_choices(profile, of_kind, run_by) for profile, of_kind in zip(profiles, times, strict=True))
    step = StepModel(
        kinds=tuple(of_path[path] for path in order),
        bytes=[[choice.bytes for choice in of_kind] for of_kind in choices],
        paths=tuple(order),
        extra=extra,
        in_flight=in_flight,
    )
    planner = Planner(
        copied,
        given,
        tuple(block for block in blocks if block.path in of_path),
        figures,
        engine,
        loss_fn,
        profiles,
        times,
        choices,
        step,
        ledger,
        accumulates,
        told,
    )
    planner.measure()
    return planner


_CUDA_BLOCK = 512  # torch's caching allocator rounds sizes up to it


def pricing_engine(engine: str) -> Engine:
    """Return the engine whose recomputation is priced: ``auto`` runs replay."""
    return "rerun" if engine == RERUN else "replay"


def choice_of(profile: RegionProfile, keep: KeepSet, label: str, run_by: Engine) -> Choice:
    """Return the choice of saving the entries of ``keep`` in regions of a kind."""
    flops = sum(profile.entries[number].flops for number in recomputed(profile, keep.saved, run_by).entries)
    return Choice(label, keep, keep.bytes, keep.seconds, flops)


def _choices(profile: RegionProfile, times: Sequence[float], run_by: Engine) -> tuple[Choice, ...]:
    """Return what may be done with regions of a kind: its keep-sets from the smallest on, and no checkpointing."""
    found = [
        choice_of(profile, keep, f"{len(keep.saved)} ops" if keep.saved else "full", run_by)
        for keep in pareto(profile, times, run_by)
    ]
    return (*found, Choice(NONE, None, max((one.bytes for one in found), default=0)))


def refuse_unfit(model: nn.Module) -> None:
    """Raise ``ModelError`` for a model that sac is on already, or that checkpoints by itself."""
    if not isinstance(model, nn.Module):
        raise ModelError(Problem("model", f"a {type(model).__name__} is no torch.nn.Module"))
    if any(ours_on(module) is not None for module in model.modules()):
        raise ModelError(Problem(type(model).__name__, "sac is on this model", fix="call sac.remove(model) first"))
    refuse_own_checkpointing(model)


def figures_of(model: nn.Module, device: str | torch.device | None) -> Device:
    """Return the figures of the device that is named, or of the one that the parameters are on."""
    if isinstance(device, str) and device.partition(":")[0] not in ("cpu", "cuda"):
        return device_named(device)
    if device is not None:
        return device_at_hand(torch.device(device))
    found = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return device_at_hand(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """What sac says of a copy of the model is nothing to its user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        yield
