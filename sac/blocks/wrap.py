"""Puts regions on modules by instance-level forwards, and takes them off again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from sac.blocks.cache import Restore
from sac.blocks.find import Block
from sac.blocks.paths import parts_of
from sac.blocks.switches import refuse_callers, refuse_flags, uncover_switches
from sac.blocks.zero_hits import HitWatch
from sac.errors import ModelError, Problem
from sac.full.function_regions import run_modules
from sac.region.settings import PLAIN, Settings
from sac.selective.compiled import run_in_eager, run_traced
from sac.selective.kind import Kind, Region
from sac.selective.scope import ScopedForward


@dataclass(slots=True)
class Applied:
    """What one ``sac.apply`` did to one model, shared by its regions."""

    mode: str
    restores: tuple[Restore, ...]
    watch: HitWatch
    left_alone: tuple[str, ...] = ()  # paths of frozen blocks
    notes: tuple[str, ...] = ()
    settings: Settings = PLAIN


class InstalledForward(ABC):
    """An instance-level ``forward`` that runs its module, or parts of it, as regions.

    Picklable, and right after ``deepcopy``: it refers to its module as an attribute, which both of them follow.
    """

    def __init__(self, module: nn.Module, applied: Applied) -> None:
        self.module = module
        self.applied = applied
        self.before = module.__dict__.get("forward")

    @property
    def original(self) -> Any:
        """The forward that the module would have without sac."""
        # A partial, not a bound method: Dynamo 2.11 can trace neither `__get__` nor the making of a method.
        return self.before if self.before is not None else partial(type(self.module).forward, self.module)

    @property
    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """The regions that it runs, in order."""

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""


class RegionForward(InstalledForward):
    """Runs a module as one region."""

    def __init__(self, block: Block, kind: Kind, applied: Applied) -> None:
        super().__init__(block.module, applied)
        self.region = Region(kind, block.path)

    @property
    def regions(self) -> tuple[Region, ...]:
        """The one region."""
        return (self.region,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as a region."""
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        if torch.compiler.is_compiling():
            if self.applied.settings.needs_frame:
                return run_in_eager(self._run, *args, **kwargs)
            return run_traced(self.original, self.region.kind.table, args, kwargs)
        return self._run(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        region, module, watch = self.region, self.module, self.applied.watch
        refuse_flags(module, region.path)  # see Note [Both on]
        if not region.stats.calls:
            refuse_callers(module, region.path)
        output = run_modules(region, self.original, module, self.applied.settings, args, kwargs)
        if watch.waits and region.stats.calls:  # none yet where this call ran without checkpointing
            watch.saw(region.path, region.kind.table, region.stats)
        return output


def ours_on(module: nn.Module) -> InstalledForward | ScopedForward | None:
    """Return what sac has put on ``module``, if anything."""
    owner = getattr(module.__dict__.get("forward"), "__self__", None)
    return owner if isinstance(owner, (InstalledForward, ScopedForward)) else None


def install(pairs: Sequence[tuple[Block, Kind]], applied: Applied) -> None:
    """Put a region on each block; the caller has checked that none is there yet."""
    scope_modules([block.module for block, _ in pairs])
    for block, kind in pairs:
        set_forward(block.module, RegionForward(block, kind, applied))


def scope_modules(blocks: Sequence[nn.Module]) -> None:
    """Let the sub-modules of each block tell, while they run, which of them it is."""
    roots = {id(block) for block in blocks}
    for block in blocks:
        for path, module in parts_of(block):
            if id(module) not in roots:
                scope_module(module, path)


def scope_module(module: nn.Module, path: str) -> None:
    """Let ``module`` tell, while it runs, that it is the one at ``path`` of its region; once is enough."""
    if ours_on(module) is None:
        set_forward(module, ScopedForward(module, path))


def set_forward(module: nn.Module, forward: InstalledForward | ScopedForward) -> None:
    """Make ``forward`` the module's own."""
    # As a bound method, for which Dynamo guards on the function: a callable object would be guarded by its identity,
    # and blocks that are alike compiled one by one. Not by setattr: a module may guard it, and the name of a method is
    # no parameter, buffer or sub-module.
    module.__dict__["forward"] = MethodType(type(forward).__call__, forward)


@dataclass(frozen=True, slots=True)
class InstalledRegion:
    """A region on a model, and what the ``sac.apply`` that made it did."""

    region: Region
    applied: Applied


def regions_of(model: nn.Module) -> Iterator[InstalledRegion]:
    """Yield the regions that are on ``model``, in module order."""
    for module in model.modules():
        forward = ours_on(module)
        if isinstance(forward, InstalledForward):
            for region in forward.regions:
                yield InstalledRegion(region, forward.applied)


def remove(model: nn.Module) -> nn.Module:
    """Take every region off ``model`` and give back what ``apply`` changed; returns the model.

    Raises ``ModelError``, with nothing changed, when something else has since put its own forward over a region's.
    """
    owned = [(module, forward) for module in model.modules() if (forward := ours_on(module)) is not None]
    buried = [(name, module) for name, module in model.named_modules() if _buries_ours(module)]
    if buried:
        name, module = buried[0]
        raise ModelError(
            Problem(
                where=name or type(module).__name__,
                found=f"{_described(module.__dict__['forward'])} was put over the region's forward after sac.apply",
                fix="take that off first, then call sac.remove",
            )
        )
    uncover_switches(model)
    for module, _ in owned:
        take_off(module)
    applied = {id(forward.applied): forward.applied for _, forward in owned if isinstance(forward, InstalledForward)}
    for one in applied.values():
        for restore in one.restores:
            restore.undo()
    return model


def take_off(module: nn.Module) -> None:
    """Give ``module`` the forward that it had before sac put its own on it, if sac has."""
    forward = ours_on(module)
    if forward is not None and forward.before is not None:
        module.__dict__["forward"] = forward.before
    elif forward is not None:
        del module.__dict__["forward"]


def _buries_ours(module: nn.Module) -> bool:
    """Whether an instance-level forward that is not ours leads to one that is, as ``functools.wraps`` tells."""
    forward = module.__dict__.get("forward")
    if forward is None or ours_on(module) is not None:
        return False
    below = [getattr(forward, "__wrapped__", None), getattr(module, "_old_forward", None)]
    return any(isinstance(getattr(one, "__self__", None), (InstalledForward, ScopedForward)) for one in below)


def _described(forward: Any) -> str:
    return f"another forward ({getattr(forward, '__qualname__', type(forward).__name__)})"
