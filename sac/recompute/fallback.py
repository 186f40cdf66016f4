"""Python run again where a tape cannot be replayed, with the forward's routing and random numbers."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sac.checksums import Sums, same, sums_of
from sac.errors import Problem, RegionError
from sac.recompute.forward_state import ForwardState, Generators, Images
from sac.recompute.module_tracker import RegionMode
from sac.recompute.rerun import overwritten_problem, written_tensors
from sac.recompute.table import Plan, Table, run_op
from sac.region.frame import OTHER_KIND, Ending, ToTheEnd
from sac.tensors import cloned, describe, map_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class Routed:
    """A call of an op that may answer differently the second time, and its results.

    ``written``: whether the region writes to one of them, so that each run of it needs a copy.
    """

    plan: Plan
    outputs: list[Tensor]
    written: bool
    sums: Sums  # if they are compared: checksums of the results


class FallbackMode(RegionMode):
    """Runs a region again from its start. Only what must not be chosen anew is served, call by call."""

    def __init__(
        self, table: Table, path: str, images: Images, generators: Generators, routed: list[Routed], ending: Ending
    ) -> None:
        super().__init__(table)
        self._region = path
        self._ending = ending
        self._state = ForwardState(images, generators)
        self._waiting: defaultdict[Any, deque[Routed]] = defaultdict(deque)
        for one in routed:
            self._waiting[one.plan].append(one)

    def __enter__(self) -> FallbackMode:
        self._state.put_back()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._ending = ToTheEnd()
        self._state.undo()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plan: Plan | None = self.plans.get(id(func))
        if plan is None:
            plan = self.table.plan(func, self.path)
        if plan.light:
            return plan.run(*args, **kwargs)
        if self._ending.done:
            self._ending.settle(written_tensors(plan, args, kwargs) if plan.writes else ())
        out = run_op(plan, args, kwargs)
        if self._waiting.get(plan):
            out = in_place_of(self._region, self._waiting[plan].popleft(), out)
        self._ending.after_op()
        return out


def in_place_of(region: str, one: Routed, out: Any) -> Any:
    """Return what ``one`` holds, in place of the result ``out`` that its op has now; ``region`` names the region."""
    # The op has run, so that generators are where they were; what it chose in forward stands for its result.
    for found, kept in zip(tensors_of(out), one.outputs, strict=True):
        if found.shape != kept.shape or found.dtype != kept.dtype:
            raise RegionError(
                Problem(
                    region or "region",
                    f"{one.plan.op} gave {describe(kept)} in forward and gives {describe(found)} in recomputation",
                    fix=OTHER_KIND,
                )
            )
    if one.sums and not same(one.sums, sums_of(one.outputs)):
        if not same(one.sums, sums_of(out)):
            raise RegionError(overwritten_problem(region, one.plan.op))
        return out
    outputs = iter(one.outputs)
    return map_tensors(out, lambda _: cloned(next(outputs)) if one.written else next(outputs).detach())
