"""What plans of one model are made with: steps of a copy without data, and what they show of each choice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from sac.blocks.applying import apply
from sac.blocks.find import Block
from sac.blocks.install import regions_of, remove, take_off
from sac.blocks.paths import parts_of
from sac.errors import SacWarning
from sac.planner.choices import Choice, policy_for
from sac.planner.devices import Device
from sac.planner.fakes import Inputs
from sac.planner.layers import BudgetTooSmallError, assign, assign_alike
from sac.planner.live_bytes import Ledger
from sac.planner.memory import StepModel
from sac.planner.profile import RegionProfile
from sac.planner.step import StepRecord, run_step
from sac.region.settings import NEVER

# Note [The walk of a plan]
#
# model, inputs -> a copy without data (fakes.py) -> a profile of each kind of region (tracing.py) -> what each op takes
# (cost.py) -> all keep-sets of a kind of which none is better than another (pareto.py) -> a step of the whole model
# with as many of them as there are layers, which tells what each holds and how high the step goes with it (step.py,
# memory.py) -> the choice per layer that takes least time within the budget (layers.py) -> a step with that choice. If
# it goes as high as predicted, or at least not above the budget, the choice becomes a policy (choices.py); otherwise
# what was learnt from it is solved for again. All before the first step is in prepare.py, all after in plan_file.py.

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
    def groups(self) -> tuple[int, ...]:
        """The kind of each position."""
        return self.step.groups

    @property
    def repeats(self) -> bool:
        """Whether a block is called more than once in a step: all its calls are one region, with one choice."""
        return len({*self.step.paths}) < len(self.step.paths)

    def run(self, choice: tuple[int, ...]) -> StepRecord:
        """Run a step with this choice per position, and learn from it."""
        if choice in self.records:
            return self.records[choice]
        policy = policy_for(self.profiles, self.choices, self.groups, self.step.paths, choice, "planned")
        plain = {
            path
            for path, group, one in zip(self.step.paths, self.groups, choice, strict=True)
            if self.choices[group][one].keep is None
        }
        with quiet():
            apply(self.model, {"mode": "selective", "policy": policy, "engine": self.engine, "verify": NEVER})
            try:
                for block in self.blocks:
                    if block.path in plain:  # its first call would be watched; all later ones run as without sac
                        for _, module in parts_of(block.module):
                            take_off(module)
                for installed in regions_of(self.model):
                    installed.region.group.lists_ops = False
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
        each = {group: 1 if self.repeats else self.groups.count(group) for group in {*self.groups}}
        rounds = max(2, *(-(-len(self.choices[group]) // count) for group, count in each.items()))
        rounds = min(rounds, max(2, _MOST_MEASURED // len(self.groups)))
        for one in range(rounds):
            self.progress(one, rounds + 1, "running steps")
            if self.repeats:
                self.run(tuple(_spread(one, rounds, len(self.choices[group])) for group in self.groups))
                continue
            taken = [one * self.groups.count(group) for group in range(len(self.choices))]
            found = []
            for group in self.groups:
                # No checkpointing is the second: what the first region is given is held by the model itself.
                count = len(self.choices[group])
                found.append((taken[group] - 2) % count if taken[group] % count else count - 2)
                taken[group] += 1
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
                    raise BudgetTooSmallError(budget, self.step.peak(choice)[0], error.constraint) from None
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
        held = [self.step.held_by(group) for group in self.groups]
        seconds = [tuple(choice.seconds for choice in self.choices[group]) for group in self.groups]
        if same_layers or self.repeats:
            return assign_alike(self.step.constraints(), held, seconds, budget, self.groups)
        return assign(self.step.constraints(), held, seconds, budget)

    def point(self, label: str, choice: tuple[int, ...]) -> Point:
        """Return what a choice costs; by a step with it if one was run, else as predicted."""
        record = self.records.get(choice)
        picked = [self.choices[group][one] for group, one in zip(self.groups, choice, strict=True)]
        return Point(
            label,
            choice,
            kept=sum(self.step.held_by(group)[one] for group, one in zip(self.groups, choice, strict=True)),
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
        return self.everywhere(lambda group: len(self.choices[group]) - 1)

    def everywhere(self, pick: Callable[[int], int]) -> tuple[int, ...]:
        """Return the choice that gives each region what ``pick`` returns for its kind."""
        return tuple(pick(group) for group in self.groups)


def _spread(one: int, rounds: int, count: int) -> int:
    """Return which of ``count`` choices is run in a round, so that the last is, and the rest are evenly apart."""
    return min(count - 1, (one + 1) * count // rounds - 1) if count > rounds else one % count


@contextmanager
def quiet() -> Iterator[None]:
    """What sac says of a copy of the model is nothing to its user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        yield
