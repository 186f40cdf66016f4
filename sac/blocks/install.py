"""Install regions on modules as instance-level forwards, and report rules that match nothing."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from sac.blocks.find import Block, rules_here
from sac.blocks.other_checkpointing import disable_guards, refuse_existing_checkpointing
from sac.blocks.paths import parts_of
from sac.engine.compiled import run_in_eager, run_traced
from sac.engine.region import Region, RegionGroup
from sac.engine.settings import PLAIN, RERUN, Settings
from sac.engine.table import ResolvedPolicy
from sac.engine.tracker import TrackedForward, class_forward, takes_module, traced_forward
from sac.errors import ModelError, PolicyError, Problem, RegionError, listing, nearest, warn
from sac.policy.load import is_shipped, shipped_policies
from sac.policy.model import Rule

# -- Rules without a match: before anything runs, and after every region has run

COMPILED = "compiled"  # the save-set of compiled graphs as a whole
_OPTIONAL = "mark the rule `optional: true` if it may match nothing"
_LISTED = f"`sac trace` lists what there is; {_OPTIONAL}"


class UnmatchedRules:
    """Sums the hits of each region's first call and, after all regions have run, reports rules without a hit.

    With ``strict`` this is an error. Otherwise it is a warning, even if no rule at all has a hit: rules may match in
    later steps, when sequences are longer or the batch is no longer empty.
    """

    def __init__(self, rules: Sequence[Rule], count: int, *, strict: bool) -> None:
        self._rules, self._count, self._strict = rules, count, strict
        self._seen: dict[str, Region] = {}  # of ``count`` regions, by path
        self._hit: set[str] = set()

    def saw(self, region: Region) -> bool:
        """Record that a region has run, and what its rules have matched; return whether it was the last one."""
        hits = region.stats.saved.hits
        self._hit.update(one.rule.id for one in region.group.table.rules if one.index in hits)
        self._seen[region.path] = region
        return len(self._seen) == self._count or region.stats.calls > 1

    def report(self) -> None:
        """Report what was found; raises ``RegionError`` if ``strict``."""
        compiled = [path for path, region in self._seen.items() if region.stats.compiled_graphs]
        if compiled and self._rules and not any(COMPILED in rule.ops for rule in self._rules):
            warn(_compiled_problem(compiled))
        idle = [rule for rule in self._rules if rule.id not in self._hit and not rule.optional]
        problems = _problems(idle, self._of_no_call, any_hit=bool(self._hit))
        if problems and self._strict:
            raise RegionError(problems)
        for problem in problems:
            warn(problem)

    def _of_no_call(self, rule: Rule) -> Problem:
        key = "function" if rule.function else "unit"
        names = rule.function or rule.unit
        what = "module" if rule.matches_module else key if names else "op"
        found = f'rule "{rule.id}" matched no {what} in any region of the model'
        if not names:
            return Problem(rule.where(), found, fix=_LISTED)
        if any(region.stats.engine == RERUN for region in self._seen.values()):
            fix = "rules on functions and units hold where a region is replayed; here it runs again as Python"
            return Problem(rule.where(), found, fix=fix)
        units = {unit.partition(" ") for region in self._seen.values() for unit in region.group.units_seen}
        seen = sorted(name for kind, _, name in units if kind == key)
        near = next(filter(None, (nearest(name, seen) for name in names)), "")
        return Problem(rule.where(), found, listing(seen), near, _OPTIONAL)


def rules_without_place(
    resolved: ResolvedPolicy, blocks: Sequence[Block], *, strict: bool, stage: bool
) -> Sequence[Problem]:
    """Return problems to warn of: rules whose `blocks`, `module` or `layers` match nothing in the model.

    Raises ``PolicyError`` with them if ``strict``, or if no rule has a place. ``stage``: the model is one of several.
    """
    needed = [one.rule for one in resolved.rules if not one.rule.optional]
    known = rules_here(needed, blocks) if stage else needed
    idle = [rule for rule in known if not any(one.is_meant_by(rule) and has_module(one)(rule) for one in blocks)]
    any_hit = len(idle) < len(needed) or stage
    problems = _problems(idle, partial(_of_no_place, blocks), any_hit=any_hit)
    if problems and (strict or not any_hit):
        raise PolicyError(problems)
    return problems


def has_module(block: Block) -> Callable[[Rule], bool]:
    """Return whether a rule is about a module of ``block``, or about all of them."""
    paths = [path for path, _ in parts_of(block.module)]
    return lambda rule: rule.module is None or any(rule.module.matches(path) for path in paths)


def _problems(idle: Sequence[Rule], problem_of: Callable[[Rule], Problem], *, any_hit: bool) -> list[Problem]:
    """Return the problems to report for ``idle`` rules.

    Single idle rules of a shipped policy are not reported, since the user did not write them. If no rule matches at all
    (``any_hit`` is False), this is one problem: the choice of policy.
    """
    found = [problem_of(rule) for rule in idle if not is_shipped(rule.location)]
    names = dict.fromkeys(rule.origin for rule in idle if is_shipped(rule.location)) if not any_hit else ()
    fix = "`sac trace` lists the ops there are; choose another policy, or write one for this model"
    legal = listing(shipped_policies())
    return found + [
        Problem(f"policy {name}", "no rule of it matches anything in this model", legal, fix=fix) for name in names
    ]


def _compiled_problem(paths: list[str]) -> Problem:
    more = f" and {len(paths) - 1} more regions" if len(paths) > 1 else ""
    return Problem(
        where=f"{paths[0]}{more}",
        found="torch.compile was applied to a part of the region, which sac sees as one piece: rules do not apply "
        "to modules and ops inside of it, and it runs again as a whole",
        fix="compile the whole block or model instead, after sac.apply: block.compile() or torch.compile(model)",
    )


def _of_no_place(blocks: Sequence[Block], rule: Rule) -> Problem:
    limits = {"module": rule.module, "blocks": rule.blocks, "layers": rule.layers}
    keys = [key for key, limit in limits.items() if limit]
    paths = {path for block in blocks for path, _ in parts_of(block.module)}
    near = nearest(rule.module.text, sorted(paths)) if rule.module is not None else ""
    sizes = ", ".join(str(size) for size in sorted({block.stack_size for block in blocks}))
    found = f'no region has the {" and ".join(keys)} of rule "{rule.id}" (the model has stacks of {sizes})'
    return Problem(rule.where(keys[0]), found, nearest=near, fix=_LISTED)


# -- Instance-level forwards: installing and removing regions


class ModelReference:
    """Refers to a model without keeping it alive. A copy refers to the copied model; an unpickled one to none."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.of = weakref.ref(model) if model is not None else lambda: None

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelReference:
        model = self.of()
        return type(self)(memo.get(id(model), model))

    def __reduce__(self) -> tuple[type[ModelReference], tuple[()]]:
        return type(self), ()


@dataclass(slots=True)
class Applied:
    """The record of one ``sac.apply`` on one model, shared by its regions."""

    mode: str
    restores: tuple[Callable[[], None], ...]  # undo the other changes of the model
    unmatched: UnmatchedRules | None = None  # until all regions have run
    notes: tuple[str, ...] = ()
    settings: Settings = PLAIN
    fitting: Any = None  # the controller of a budget
    unchecked: ModelReference | None = None  # the model, until a region has run

    def refuse_both_on(self) -> None:
        """Raise ``ModelError`` if the model's own checkpointing has been turned on since; see Note [Both on]."""
        if self.unchecked is not None and (model := self.unchecked.of()) is not None:
            refuse_existing_checkpointing(model)
        self.unchecked = None


class InstalledForward(ABC):
    """An instance-level ``forward`` that runs its module, or parts of it, as regions.

    It works after pickling and ``deepcopy``: it refers to its module as an attribute, which both of them follow.
    """

    regions: tuple[Region, ...] = ()  # in order; none if it only moves what is saved

    def __init__(self, module: nn.Module, applied: Applied) -> None:
        self.module = module
        self.applied = applied
        self.before = module.__dict__.get("forward")
        self.is_passed = takes_module(module)

    @property
    def original(self) -> Any:
        """The forward that the module would have without sac."""
        if self.before is not None:
            return self.before
        if is_dynamo_compiling():
            return traced_forward(self.module, is_passed=self.is_passed)
        return class_forward(self.module)

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""


class RegionForward(InstalledForward):
    """Runs a module as one region."""

    def __init__(self, block: Block, group: RegionGroup, applied: Applied) -> None:
        super().__init__(block.module, applied)
        self.region = Region(group, block.path)
        self.regions = (self.region,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as a region."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.applied.settings.needs_frame or self.applied.fitting is not None:
                return run_in_eager(self._run, *args, **kwargs)
            return run_traced(self.original, self.region.group.table, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        applied, region = self.applied, self.region
        applied.refuse_both_on()
        output = self._call(*args, **kwargs)
        # No calls if this one ran without checkpointing.
        if (watch := applied.unmatched) is not None and region.stats.calls and watch.saw(region):
            applied.unmatched = None
            watch.report()
        return output

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self.region.run(self.original, (self.module,), self.applied.settings, args, kwargs)


def ours_on(module: nn.Module) -> InstalledForward | TrackedForward | None:
    """Return the forward that sac has installed on ``module``, or None."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner if isinstance(owner, (InstalledForward, TrackedForward)) else None


def install(
    pairs: Sequence[tuple[Block, RegionGroup]], applied: Applied, forward: type[RegionForward] = RegionForward
) -> None:
    """Install a region on each block; the caller has checked that none is installed yet."""
    track_modules([block.module for block, _ in pairs])
    for block, group in pairs:
        set_forward(block.module, forward(block, group, applied))


def track_modules(blocks: Sequence[nn.Module]) -> None:
    """Track the sub-modules of each block, so that a region knows which of them is running."""
    roots = {id(block) for block in blocks}
    for block in blocks:
        for path, module in parts_of(block):
            if id(module) not in roots and ours_on(module) is None:
                set_forward(module, TrackedForward(module, path))


def set_forward(module: nn.Module, forward: InstalledForward | TrackedForward) -> None:
    """Set ``forward`` as the module's instance-level forward."""
    # A bound method, because Dynamo guards on its function. For a callable object it would guard on the identity and
    # compile blocks of the same structure one by one. Not by setattr: a module may override it, and the name of a
    # method is not a parameter, buffer or sub-module.
    module.__dict__["forward"] = MethodType(type(forward).__call__, forward)


@dataclass(frozen=True, slots=True)
class InstalledRegion:
    """A region on a model, and the record of the ``sac.apply`` that installed it."""

    region: Region
    applied: Applied


def regions_of(model: nn.Module) -> Iterator[InstalledRegion]:
    """Yield the regions on ``model``, in module order."""
    for module in model.modules():
        forward = ours_on(module)
        if isinstance(forward, InstalledForward):
            for region in forward.regions:
                yield InstalledRegion(region, forward.applied)


def has_regions(model: nn.Module) -> bool:
    """Return whether there are regions on ``model``."""
    return next(regions_of(model), None) is not None


def remove(model: nn.Module) -> nn.Module:
    """Remove every region from ``model``, undo the other changes of ``sac.apply``, and return the model.

    Raises ``ModelError``, with nothing changed, if something else has since replaced a region's forward by its own.
    """
    owned = [(module, forward) for module in model.modules() if (forward := ours_on(module)) is not None]
    for path, module in model.named_modules():
        forward = module.__dict__.get("forward")
        below = getattr(forward, "__wrapped__", getattr(module, "_old_forward", None))  # functools.wraps, Accelerate
        ours = isinstance(getattr(below, "__self__", None), (InstalledForward, TrackedForward))
        if forward is not None and ours and ours_on(module) is None:
            found = "another forward was put over the region's forward after sac.apply"
            fix = "take that off first, then call sac.remove"
            raise ModelError(Problem(path or type(module).__name__, found, fix=fix))
    disable_guards(model)
    for module, _ in owned:
        take_off(module)
    applied = {id(forward.applied): forward.applied for _, forward in owned if isinstance(forward, InstalledForward)}
    for one in applied.values():
        for restore in one.restores:
            restore()
    return model


def take_off(module: nn.Module) -> None:
    """Restore the forward that ``module`` had before sac installed its own; does nothing if sac has not."""
    forward = ours_on(module)
    if forward is not None and forward.before is not None:
        module.__dict__["forward"] = forward.before
    elif forward is not None:
        del module.__dict__["forward"]


def alike(regions: Sequence[Region]) -> list[list[Region]]:
    """Return the regions of each group, split by what their last call kept."""
    found: list[list[Region]] = []
    for region in regions:
        same = (one for one in found if one[0].group is region.group and one[0].stats == region.stats)
        if (known := next(same, None)) is None:
            found.append(known := [])
        known.append(region)
    return found
