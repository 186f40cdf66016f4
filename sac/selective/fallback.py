"""Running a region's Python again where its tape cannot be replayed."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sac.errors import Problem, RegionError
from sac.region.advice import OTHER_KIND
from sac.region.detach import cloned
from sac.region.handles import Ending, ToTheEnd
from sac.region.storages import describe
from sac.selective.bare_mode import RegionMode
from sac.selective.checksum import Sums, same, sums_of
from sac.selective.forward_state import ForwardState, Generators, Images
from sac.selective.mismatch import overwritten_problem
from sac.selective.record import written_tensors
from sac.selective.table import Plan, Table, run_op
from sac.selective.tensors import map_tensors, tensors_of


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
