"""Calls without a recorder, with the optional native library: their ops are watched all the same."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import Tensor

from sac.checksums import Sums, same, sums_of
from sac.errors import Problem, RegionError
from sac.recompute.op_trace import NO_RULE, SavedFigures
from sac.recompute.rerun import overwritten_problem
from sac.recompute.table import DecisionTable, holdable_ops
from sac.region.frame import OTHER_KIND, OTHER_PATH, OTHER_VALUE, Handle, Handles, Progress, Recorder
from sac.region.inputs import RegionInputs
from sac.region.module_state import KEPT_WHOLE, ModuleState, UnseenWriteError
from sac.stores.saved_tensor import compact
from sac.tensors import describe

# Note [Watched calls]
#
# A call that needs no recorder, as an earlier call has shown (Note [Evidence]), may do what the earlier one did not:
# run an op that chooses, pass a generator to an op, fill what autograd has saved just before, or write to a parameter,
# a buffer or an input in a way that moves no version counter. With the library such calls are watched. No mode is
# active: torch reports each op to a callback in C++ (`RecordFunction`), at about 0.2 us per op. It sees composite ops
# and the ops that they consist of, and it ignores the ops that others run inside of their kernels, which no mode sees.
#
# What an op has chosen (`topk`, `nonzero`, `sort`) must not be chosen anew. If an earlier call has made choices, and
# nothing else needs a recorder, the library holds them: what the op returned, the shapes and dtypes of its arguments,
# and checksums if the call is verified. Such ops have kernels at a dispatch key of their own (csrc/choices.h), so that
# all other ops run as if nothing were active, in both passes. A result that the region is about to write to is copied
# first. What autograd saves of the results is kept, as a recorder keeps it. In recomputation the op runs, and returns
# what it returned in forward: its n-th call what its n-th call returned, if the arguments are of the same kind. If a
# choice is left over that the recomputation had to reach, it is an error. As in any call without a recorder, nothing
# else shows that a recomputation ran other ops, unless it saves other kinds of tensors.
#
# If the recomputation could not repeat something else, the call's activations are kept (Note [The walk of a region] on
# unseen writes), with one warning, and later calls have a recorder. So with the library, what earlier calls have shown
# changes no result.
#
# Example. A layer in mode `full` routes tokens with `topk`, and adds noise from its own generator in every third call.
# The first call has a recorder, which finds that nothing but the `topk` needs one. In the second call the watch holds
# the result of the `topk`; nothing else is kept. The `randn` of the third call is passed a generator: its activations
# are kept. From the fourth call on, a recorder holds the `topk` and restores the generator.

_FOUND = (  # by `Reason` of the library
    "which makes a choice",
    "with a generator of its own",
    "which fills a tensor that autograd has saved before",
)


class _Choices:
    """What the library asks of Python about choices. It does not know the recorder, which holds what knows it."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def sums_of(self, results: tuple[Tensor, ...]) -> Sums:
        """Return the checksums of what an op has returned."""
        return sums_of(results)

    def are_same(self, now: Sums, then: Sums) -> bool:
        """Return whether two checksums are equal."""
        return same(then, now)

    def compare(self, name: str, overload: str, now: Sums | None, then: Sums) -> None:
        """Raise if an op, of which the results are lost, has chosen something else than in forward."""
        if now is None or not same(then, now):
            raise RegionError(overwritten_problem(self._path, _op_name(name, overload)))

    def refuse(self, name: str, overload: str, then: Tensor, now: Tensor) -> None:
        """Raise since an op has returned ``now``, which cannot be replaced by what it returned in forward."""
        told = f"{_op_name(name, overload)} gave {describe(then)} in forward and gives {describe(now)} in recomputation"
        raise RegionError(Problem(self._path or "region", told, fix=OTHER_KIND))


class NativeWatch(Recorder):
    """The ``Recorder`` of a call that decides on nothing; see Note [Watched calls].

    ``watches_writes``: whether the region starts again from the buffers that its forward started from. ``holds``:
    whether the results of ops that choose are held, and ``compares``, whether changes to them are looked for.
    """

    sees_ops = False

    def __init__(
        self,
        library: Any,
        table: DecisionTable,
        path: str,
        inputs: RegionInputs,
        *,
        watches_writes: bool,
        holds: bool = False,
        compares: bool = True,
    ) -> None:
        self.path = path
        self.watches_writes = watches_writes
        self.figures: SavedFigures | None = None  # after the forward, if something was held
        self._inputs: RegionInputs | None = inputs
        self._module_state: ModuleState | None = None
        self._library, self._ops, self._holds, self._compares = library, table.watched_ops(library), holds, compares
        self._serving: Any = None  # the library's part of the recomputation at hand
        self._reached = -1

    def set_start(self, module_state: ModuleState, handles: Handles) -> None:
        """See ``Recorder``."""
        self._module_state = module_state
        owner = _Choices(self.path) if self._holds else None
        self._native = self._library.Watch(self._ops, handles, owner, self._holds, self._compares)

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the context in which the ops of this thread are watched."""
        watch: AbstractContextManager[Any] = self._native
        return watch

    def settle(self, packed: Any) -> None:
        """See ``Recorder``."""
        if self._holds:
            self._native.keep(packed)

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """The forward is over. Raises ``UnseenWriteError`` if it will run again, but cannot be repeated."""
        inputs, module_state = self._inputs, self._module_state
        self._inputs = self._module_state = None
        if last_missing >= 0:
            assert inputs is not None
            assert module_state is not None
            self._check(inputs, module_state)
        found = self._native.close(last_missing) if self._holds else None
        if found is None:
            return True
        stays, goes = found
        compact([handle for handle in kept if not handle.is_external and handle.storage not in stays])
        sizes = {**stays}
        for handle in kept:
            if handle.storage not in stays and not handle.is_external:
                sizes |= handle.sizes()
        in_handles = {handle.storage for handle in kept}
        lost = sum(size for address, size in goes.items() if address not in in_handles)
        total = sum(sizes.values())
        self.figures = SavedFigures(total, lost, {NO_RULE: total}, {})
        return not stays

    def recompute_mode(self, inputs: list[tuple[int, Tensor]], progress: Progress) -> AbstractContextManager[Any]:
        """Return the context in which ops that choose are served what they chose."""
        if not self._native.holds_choices():
            return nullcontext()
        self._serving, self._reached = self._library.Serving(self._native), progress.last_missing
        return self._serving  # type: ignore[no-any-return]

    def check_recomputed(self) -> None:
        """Raise if a choice was not served that had to be."""
        serving, self._serving = self._serving, None
        if serving is not None and (left := serving.left(self._reached)) is not None:
            name, number, arguments, other = left
            seen = "not at all in recomputation" if other is None else f"in recomputation with ({_told(other)})"
            op, where = name.replace("::", "."), self.path or "the region itself"
            found = f"call {number} of {op} in {where} ran in forward with ({_told(arguments)}) and {seen}"
            raise RegionError(Problem(self.path or "region", found, fix=OTHER_PATH if other is None else OTHER_VALUE))

    def drop(self) -> None:
        """Release what is held."""
        self._serving = None
        self._native.forget()

    def _check(self, inputs: RegionInputs, module_state: ModuleState) -> None:
        noted = self._native.found()
        if noted is not None:
            reason, name = noted
            found = f"this call ran {name.replace('::', '.')}, {_FOUND[reason]}, and no earlier call did"
            raise UnseenWriteError(Problem(where=self.path or "region", found=found, fix=KEPT_WHOLE))
        written = self._native.written() if self.watches_writes else []
        if not written:
            return
        tensors = module_state.without_copy() if module_state.lacks_copy(written) else {}
        given = inputs.without_copy()
        for address in written:
            if address in tensors:
                raise UnseenWriteError(module_state.unseen(tensors[address], self.path))
            if address in given:
                raise UnseenWriteError(given[address].unseen(self.path))


def _op_name(name: str, overload: str) -> str:
    return f"{name.replace('::', '.')}.{overload or 'default'}"


def _told(arguments: tuple[Any, ...]) -> str:
    return ", ".join(
        f"{str(one[1]).removeprefix('torch.')}{one[0]}" if isinstance(one, tuple) else str(one) for one in arguments
    )


@cache
def can_hold(library: Any) -> bool:
    """Return whether the library can hold what ops choose; nothing else may use the dispatch key that it uses."""
    try:
        answer: bool = library.intercept(holdable_ops())
    except RuntimeError:  # another extension has registered something there
        return False
    return answer
