"""The planner of one model: it runs steps of a copy without data and measures each choice in them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import apply
from sac.blocks.find import Block, find_blocks
from sac.blocks.install import regions_of, remove, take_off
from sac.blocks.paths import parts_of
from sac.engine.settings import NEVER, REPLAY
from sac.errors import ModelError, SacWarning
from sac.planner.alike import AlikeLayers, expanded
from sac.planner.by_hand import SavedByPath
from sac.planner.choices import Choice, policy_for, policy_to_try
from sac.planner.fakes import Inputs
from sac.planner.layers import BudgetTooSmallError, assign, assign_alike
from sac.planner.live_bytes import Ledger
from sac.planner.memory import StepModel
from sac.planner.peak import OPTIMIZER, AliveRow, PeakBreakdown, explain, with_more
from sac.planner.pricing import Pricing
from sac.planner.profile import RegionProfile
from sac.planner.step import StepRecord, run_step
from sac.planner.step_log import StepLog, inputs_among
from sac.policy.model import Decision, Policy

# Note [The walk of a plan]
#
# model, inputs -> a copy without data (fakes.py) -> a profile of each region group (tracing.py) -> the time of each
# op (cost.py) -> the Pareto-optimal save options of each group (pareto.py) and those by hand (by_hand.py) -> steps of
# the whole model with as many of them as there are layers, which measure what each option holds and the peak with it
# (step.py, memory.py) -> the choice per layer with the least time within the budget (layers.py) -> a step with that
# choice. If its peak is as predicted, or at least within the budget, the choice becomes a policy (choices.py).
# Otherwise the problem is solved again with the new measurements. Everything before the first step is in prepare.py,
# everything after in plan_file.py.

_MOST_MEASURED = 300  # regions, over all steps that are run before the first query
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Point:
    """One way to checkpoint the model: kept bytes and peak in bytes, and recomputation in FLOPs and seconds.

    ``choice``: the choice of each region, in forward order. ``is_checked``: a step was run with it; otherwise the peak
    is predicted.
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
    """The state of planning one model: its copy, profiles and measured steps. See Note [The walk of a plan]."""

    model: nn.Module  # the copy
    inputs: Inputs
    blocks: tuple[Block, ...]
    pricing: Pricing
    loss_fn: Callable[[Any], Tensor] | None
    profiles: tuple[RegionProfile, ...]
    times: tuple[tuple[float, ...], ...]  # seconds of each entry of each profile
    choices: tuple[tuple[Choice, ...], ...]
    step: StepModel
    ledger: Callable[[], Ledger]
    progress: Progress = lambda done, total, label: None
    alike: AlikeLayers | None = None  # None: run all layers
    by_hand: Mapping[str, SavedByPath] = field(default_factory=dict)  # label -> what it saves in each region
    records: dict[tuple[int, ...], StepRecord] = field(default_factory=dict)

    @property
    def groups(self) -> tuple[int, ...]:
        """The region group of each position."""
        return self.step.groups

    @property
    def repeats(self) -> bool:
        """Whether a block is called more than once in a step: all its calls belong to one region, with one choice."""
        return len({*self.step.paths}) < len(self.step.paths)

    def run(self, choice: tuple[int, ...]) -> StepRecord:
        """Run a step with this choice per position, and learn from it."""
        if choice in self.records:
            return self.records[choice]
        with self._applied(choice):
            record = self._shortened(choice) or self._step(self.ledger())
        self.records[choice] = record
        self.step.learn(record, choice)
        return record

    def explain(self, choice: tuple[int, ...], label: str) -> PeakBreakdown:
        """Run a step with this choice once more, and return what is alive at its peak; see ``StepModel.peak_of``."""
        with self._applied(choice, lists_ops=True):
            found = explained_step(
                self.model,
                self.inputs,
                self.ledger(),
                self.loss_fn,
                label,
                self.blocks,
            )
        return with_more(found, [AliveRow(OPTIMIZER, "(model)", "", "", 1, self.step.extra)])

    def step_without_checkpointing(self, ledger: Ledger) -> None:
        """Run a step without checkpointing under ``ledger``."""
        with self._applied(self.without_checkpointing):
            self._step(ledger)

    @property
    def _modules(self) -> list[tuple[str, nn.Module]]:
        return [(block.path, block.module) for block in self.blocks]

    def _step(self, ledger: Ledger, at_end: Callable[[], None] = lambda: None) -> StepRecord:
        return run_step(
            self.model,
            self.inputs,
            self._modules,
            ledger,
            self.loss_fn,
            at_end=at_end,
        )

    def _shortened(self, choice: tuple[int, ...]) -> StepRecord | None:
        """Run a step without layers that others stand for; None if there are none, or others do not stand for them."""
        if self.alike is None or self.repeats:
            return None
        paths = self.step.paths
        gaps = self.alike.gaps(paths, self.groups, choice)
        left_out = [path for gap in gaps for path in paths[gap.start : gap.start + gap.count]]
        if not left_out:
            return None
        ledger = self.ledger()
        modules = {block.path: block.module for block in self.blocks}
        gradients: dict[str, int] = {}

        def at_end() -> None:
            gradients.update((path, ledger.size_of(one.grad for one in modules[path].parameters())) for path in modules)

        with self.alike.leaving_out(left_out):
            record = expanded(self._step(ledger, at_end), gaps, paths, gradients.__getitem__)
        if record is None:
            self.alike = None
        return record

    @contextmanager
    def _applied(self, choice: tuple[int, ...], *, lists_ops: bool = False) -> Iterator[None]:
        """Apply the policy of a choice to the copy. ``lists_ops``: whether its regions list ops and rules."""
        known = self.profiles, self.choices, self.groups, self.step.paths, choice
        policy = policy_for(*known, "planned") if lists_ops else policy_to_try(*known)
        plain = {
            path
            for path, group, one in zip(self.step.paths, self.groups, choice, strict=True)
            if self.choices[group][one].keep is None
        }
        with quiet():
            value = {"mode": "selective", "policy": policy, "engine": self.pricing.engine, "verify": NEVER}
            apply(self.model, value)
            try:
                for block in self.blocks:
                    if block.path in plain:  # its first call would be observed; later ones run as without sac
                        for _, module in parts_of(block.module):
                            take_off(module)
                for installed in regions_of(self.model):
                    installed.region.group.lists_ops = lists_ops
                yield
            finally:
                remove(self.model)

    def measure(self) -> None:
        """Run steps until each choice of each group has occurred in one; a step measures one choice per layer.

        A group with few layers may need too many steps; its other choices are estimated, and checked if they are used.
        """
        each = {group: 1 if self.repeats else self.groups.count(group) for group in {*self.groups}}
        if self.step.unmeasured is not None and not self.repeats:
            each[self.groups[0]] -= 1
        rounds = max(2, *(-(-len(self.choices[group]) // count) for group, count in each.items()))
        rounds = min(rounds, max(2, _MOST_MEASURED // len(self.groups)))
        for one in range(rounds):
            self.progress(one, rounds + 1, "running steps")
            if self.repeats:
                self.run(tuple(_spread(one, rounds, len(self.choices[group])) for group in self.groups))
                continue
            taken = [one * each.get(group, 0) for group in range(len(self.choices))]
            found = []
            for position, group in enumerate(self.groups):
                if position == self.step.unmeasured:
                    found.append(0)
                    continue
                # "No checkpointing" goes to the second region: the model itself holds the first region's input.
                count = len(self.choices[group])
                found.append((taken[group] - 2) % count if taken[group] % count else count - 2)
                taken[group] += 1
            self.run(tuple(found))

    def assign(self, budget: int, *, same_layers: bool = False) -> tuple[int, ...]:
        """Return the fastest choice within ``budget`` by what is known so far; raises ``BudgetTooSmallError``."""
        held = [self.step.held_by(group) for group in self.groups]
        seconds = [tuple(choice.seconds for choice in self.choices[group]) for group in self.groups]
        if same_layers or self.repeats:
            return assign_alike(self.step.constraints(), held, seconds, budget, self.groups)
        return assign(self.step.constraints(), held, seconds, budget)

    def point(self, label: str, choice: tuple[int, ...]) -> Point:
        """Return the cost of a choice: measured if a step was run with it, else predicted."""
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
            return self.point("least", self.assign(0))  # raises, since no step fits into 0 bytes
        except BudgetTooSmallError as error:
            return self.point("least", self.assign(error.least))

    @property
    def without_checkpointing(self) -> tuple[int, ...]:
        """The choice of no checkpointing for all positions: the last choice of each group."""
        return self.everywhere(lambda group: len(self.choices[group]) - 1)

    def every_nth(self, count: int) -> tuple[int, ...]:
        """Return the choice of full in every ``count``-th layer, and of no checkpointing in the others."""
        layers = {path: layer for one in self.profiles for path, layer in zip(one.paths, one.layers, strict=True)}
        both = zip(self.step.paths, self.everywhere(lambda group: 0), self.without_checkpointing, strict=True)
        return tuple(none if layers[path] % count else full for path, full, none in both)

    def choice_by_hand(self, label: str) -> tuple[int, ...]:
        """Return the choice of saving in each region what people save; see Note [Choices by hand]."""
        saved = self.by_hand[label]
        numbers = [
            {one.keep.saved: number for number, one in enumerate(of_group) if one.keep is not None}
            for of_group in self.choices
        ]
        return tuple(numbers[group][saved[path]] for group, path in zip(self.groups, self.step.paths, strict=True))

    def everywhere(self, pick: Callable[[int], int]) -> tuple[int, ...]:
        """Return the choice that gives each region the option that ``pick`` returns for its group."""
        return tuple(pick(group) for group in self.groups)


def saved_by(
    policy: Policy,
    model: nn.Module,
    profiles: Sequence[RegionProfile],
    forward: Callable[[], Any],
    alike: AlikeLayers | None = None,
) -> dict[str, frozenset[int]]:
    """Return the entries that ``policy`` saves in each region of ``profiles``, by path, as the regions decide.

    ``forward`` runs ``model`` once. Of ``alike`` layers with one profile and the same rules, one runs.
    """
    with quiet():
        apply(model, {"mode": "selective", "policy": policy, "verify": NEVER, "engine": REPLAY})
        try:
            groups = {one.region.path: one.region.group for one in regions_of(model)}
            numbers = {path: number for number, profile in enumerate(profiles) for path in profile.paths}
            first: dict[Any, str] = {}
            for path, group in groups.items():
                first.setdefault((id(group), numbers.get(path)), path)
            repeated = () if alike is None else alike.links.keys() & groups.keys() - {*first.values()}
            with torch.enable_grad(), alike.leaving_out([*repeated]) if alike is not None else nullcontext():
                forward()
            traces = {path: group.op_trace for path, group in groups.items()}
        finally:
            remove(model)
    calls = {
        path: {(row.module, row.op, row.call) for row in trace if Decision(row.decision).keeps}
        for path, trace in traces.items()
    }
    return {
        path: frozenset(one.number for one in profile.candidates if (one.module, one.op, one.call) in calls[path])
        for profile in profiles
        for path in profile.paths
    }


def explained_step(
    model: nn.Module,
    inputs: Inputs,
    ledger: Ledger,
    loss_fn: Callable[[Any], Tensor] | None,
    label: str,
    blocks: Sequence[Block] | None = None,
    *,
    accumulates: bool = False,
) -> PeakBreakdown:
    """Run one step of ``model`` and return what is alive at its peak, counted as under ``ledger``.

    ``blocks``: those of the model, found if None (there may be none); for the other arguments see ``run_step``.
    """
    if blocks is None:
        try:
            blocks = find_blocks(model)
        except ModelError:
            blocks = ()
    modules = [(block.path, block.module) for block in blocks]
    log = StepLog(ledger, model, modules, inputs_among(inputs))
    with log.on_step():
        run_step(model, inputs, modules, log, loss_fn, accumulates=accumulates)
    return explain(log, model, blocks, label)


def _spread(one: int, rounds: int, count: int) -> int:
    """Return which of ``count`` choices a round runs, spread evenly so that the last choice is included."""
    return min(count - 1, (one + 1) * count // rounds - 1) if count > rounds else one % count


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings about the planner's copy of the model: those of sac, and FSDP2's about views in each step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        yield
