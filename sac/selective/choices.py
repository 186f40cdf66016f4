"""Mode `full` on a region that chooses (a mixture of experts): its choices are kept, and no other op is looked at."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from sac.region.detach import detached
from sac.region.handles import Ending, Handle
from sac.region.inputs import KeptInputs
from sac.region.parking import PackHooks
from sac.region.storages import storage_sizes, version_of
from sac.selective import scope
from sac.selective.around import CAN_TAKE_OFF, mode_off
from sac.selective.bare_mode import BareMode
from sac.selective.checksum import sums_of
from sac.selective.fallback import Routed, in_place_of
from sac.selective.modes import decide
from sac.selective.scope import ScopedForward
from sac.selective.stats import NO_RULE, KeptFigures
from sac.selective.table import Plan, Table, run_op
from sac.selective.tensors import storage_address, tensors_of

# Note [Choices alone]
#
# The results of ops that choose (`topk`, `nonzero`, ...) are kept in every mode (promise 10). In mode `full` nothing
# else is decided, so most ops need not pass a dispatch mode. The modules whose code names such an op are known from
# their classes, and each recorded call adds those in which it saw one. A dispatch mode is on only while such a module
# runs its own code: it is taken off for the modules inside that do not choose, for the experts say. In recomputation an
# op that chooses runs again, so that generators end up where they did, and what it returned in forward takes the place
# of its result, in the order of calls per module and op.
#
# This is used for sorts of inputs of which a recorded call has shown that nothing but choices needs a recorder (Note
# [Evidence]). What writes to a kept result is not seen here: its checksum tells, and then the op's new result is used
# if it is the old one, which it is but for ops that do not repeat themselves; that is an error.
#
# Example. A block of attention and four experts dispatches 126 ops in its forward, 27 of them in the code of the
# mixture itself. Those pass the mode, and two kinds of them are kept: `topk` and `nonzero`.


class ChoiceRecorder:
    """Keeps what the modules at ``choosing`` choose in one region call; the ``Recorder`` of a frame."""

    sees_ops = False
    apart: frozenset[int] = frozenset()

    def __init__(self, table: Table, path: str, choosing: frozenset[str]) -> None:
        self.table = table
        self.path = path
        self.choosing = choosing
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)
        self.packs = 0
        self.paused = False  # a recomputation runs inside the region's own forward: nothing of it is recorded
        self.made: list[tuple[tuple[str, Plan], Routed, int]] = []  # in order; and how much autograd had saved before
        self._versions: dict[int, int] = {}  # storage address of a choice -> its version counter when it was made
        self.figures = KeptFigures(0, 0, {}, {})

    def begin(self, inputs: KeptInputs) -> None:
        """Nothing: no input is looked at."""

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which choices are kept."""
        return _active(ChoosingPass(self.choosing, _KeepingMode(self)))

    def keep(self, path: str, plan: Plan, args: Any, kwargs: Any, out: Any) -> None:
        """An op of a module that chooses has run."""
        if not decide(self, plan, args, kwargs, out)[0]:
            return
        outputs = [detached(tensor) for tensor in tensors_of(out)]
        self._versions.update((storage_address(one), version_of(one)) for one in outputs)
        self.made.append(((path, plan), Routed(plan, outputs, written=True, sums=sums_of(outputs)), self.packs))

    def pack(self, tensor: torch.Tensor, handle: Handle) -> None:
        """Autograd saves ``tensor``: keep it if it is a choice, as a recorder that sees all ops does."""
        self.packs += 1
        if self._versions and not self.paused:
            address = storage_address(tensor)
            if self._versions.get(address) == version_of(tensor):
                handle.keep(tensor)
                handle.storage = address

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """The forward is over: drop what recomputation does not reach; return whether nothing is left."""
        every = self.made
        self.made = [one for one in every if one[2] <= last_missing]
        held = _sizes(self.made)
        for handle in kept:
            if isinstance(handle.value, torch.Tensor):
                held.update(storage_sizes(handle.value))
        dead = sum(size for address, size in _sizes(every).items() if address not in held)
        self._versions = {}
        total = sum(held.values())
        self.figures = KeptFigures(total, dead, {NO_RULE: total} if every else {}, {})
        return not self.made

    def park(self, hooks: PackHooks) -> None:
        """Not called: regions inside hooks on saved tensors have a recorder that sees all ops."""
        raise AssertionError("choices alone are not kept inside hooks on saved tensors")

    def recompute_mode(self, inputs: list[tuple[int, torch.Tensor]], ending: Ending) -> AbstractContextManager[Any]:
        """Return the context in which choices are what they were."""
        return self._serving()

    @contextmanager
    def _serving(self) -> Iterator[None]:
        was_paused, self.paused = self.paused, True
        try:
            with _active(ChoosingPass(self.choosing, _ServingMode(self))):
                yield
        finally:
            self.paused = was_paused

    def check_recomputed(self) -> None:
        """Nothing: what is kept is asked for in order."""

    def drop(self) -> None:
        """Let everything go."""
        self.made = []


class _ChoosingMode(BareMode):
    """What is on while a module that chooses runs its own code. ``path`` is that of the module."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled function may be used under this mode."""
        return True

    def __init__(self, recorder: ChoiceRecorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder
        self.table = recorder.table
        self.plans = recorder.table.scope("")
        self.path = ""


class _KeepingMode(_ChoosingMode):
    """The mode of the forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan: Plan | None = self.plans.get(id(func))
        if plan is None:
            plan = self.table.plan(func, "")
        if not plan.counts:
            return plan.run(*args, **(kwargs or {})) if not plan.own_body else run_op(plan, args, kwargs or {})
        out = run_op(plan, args, kwargs or {})
        if not self.recorder.paused:
            self.recorder.keep(self.path, plan, args, kwargs or {}, out)
        return out


class _ServingMode(_ChoosingMode):
    """The mode of a recomputation."""

    def __init__(self, recorder: ChoiceRecorder) -> None:
        super().__init__(recorder)
        self.waiting: defaultdict[Any, deque[Routed]] = defaultdict(deque)
        for place, one, _ in recorder.made:
            self.waiting[place].append(one)
        self.calls: defaultdict[Plan, int] = defaultdict(int)
        self.alternations: defaultdict[int, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plan: Plan | None = self.plans.get(id(func))
        if plan is None:
            plan = self.table.plan(func, "")
        if not plan.counts:
            return plan.run(*args, **(kwargs or {})) if not plan.own_body else run_op(plan, args, kwargs or {})
        out = run_op(plan, args, kwargs or {})
        if self.waiting.get((self.path, plan)) and decide(self, plan, args, kwargs or {}, out)[0]:
            one = self.waiting[self.path, plan].popleft()
            return in_place_of(self.recorder.path, one, out)
        return out


class ChoosingPass:
    """Puts a mode on while modules that choose run their own code; see Note [Choices alone] and ``ModulePass``."""

    def __init__(self, choosing: frozenset[str], mode: _ChoosingMode) -> None:
        self.choosing = choosing
        self.mode = mode
        self.is_on = False

    def place_of(self, path: str) -> tuple[str, bool] | None:
        """Return the path and whether the mode has to be on, None if all stays as it is."""
        chooses = path in self.choosing
        return (path, chooses) if chooses or self.is_on else None

    def call(self, place: tuple[str, bool], forward: ScopedForward, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Run the module, with the mode on or off."""
        path, chooses = place
        outer_path, was_on = self.mode.path, self.is_on
        self.mode.path = path
        try:
            if chooses == was_on or (was_on and not CAN_TAKE_OFF):
                return _run(forward, args, kwargs)
            self.is_on = chooses
            with self.mode if chooses else mode_off(self.mode):
                return _run(forward, args, kwargs)
        finally:
            self.mode.path, self.is_on = outer_path, was_on

    @contextmanager
    def around_region(self) -> Iterator[None]:
        """Return a context with the mode on if the region's own code chooses."""
        if "" not in self.choosing:
            yield
            return
        self.is_on = True
        with self.mode:
            yield


def _run(forward: ScopedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if forward.before is not None:
        return forward.before(*args, **kwargs)
    return type(forward.module).forward(forward.module, *args, **kwargs)


@contextmanager
def _active(choosing: ChoosingPass) -> Iterator[None]:
    outer = scope.enter(None, choosing)
    try:
        with choosing.around_region():
            yield
    finally:
        scope.leave(outer)


def _sizes(made: Iterable[tuple[Any, Routed, int]]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for _, one, _ in made:
        for tensor in one.outputs:
            sizes.update(storage_sizes(tensor))
    return sizes


def paths_of(owners: Iterable[nn.Module]) -> dict[int, str]:
    """Return, by id, the paths of those modules of a region that tell when they run."""
    forwards = [(owner, getattr(owner.__dict__.get("forward"), "__self__", None)) for owner in owners]
    return {id(owner): forward.path for owner, forward in forwards if isinstance(forward, ScopedForward)}
