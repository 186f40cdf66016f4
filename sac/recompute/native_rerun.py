"""The rerun engine with the optional native library: ordinary ops are signed and run in C++, in both passes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from sac.recompute.module_tracker import RegionMode
from sac.recompute.native_recorder import tell
from sac.recompute.rerun import ForwardMode, RecomputeMode, RerunRecorder
from sac.recompute.value_ids import ValueIds
from sac.region.frame import Progress
from sac.torch_private import OpOverload

# Note [Native value ids]
#
# While a mode of the rerun engine is on top of the stack, the library runs an ordinary op (Note [The native recorder])
# without a trip into Python, if nothing decides on its result. Such an op only has to be named: the library hashes its
# signature, runs it, and names its results in the tables of `ValueIds`. So it does with factories, and with ops that
# write to one tensor that the region has made and that nobody needs as it was (`may_overwrite` in csrc/rerun.h). All
# other ops go to Python. What autograd saves is described, and compared in recomputation, in C++ too.
#
# A call must have the same signature in both passes. But the library may run it in one of them and Python in the other,
# as when it reads a value that the forward saves: Python notes that, and in recomputation there is nothing to note. So
# if tensors are plain, the library signs every op of torch's own, before Python sees the op, and `NativeValueIds` hands
# that signature out. Python hashes only what the library signs in neither pass: ops of others, and those on subclasses.


class NativeValueIds(ValueIds):
    """Value ids whose signatures come from the library; see Note [Native value ids]."""

    __slots__ = ("native",)

    def __init__(self, library: Any, owners: tuple[nn.Module, ...] = ()) -> None:
        super().__init__(owners)
        self.native = library.Ids(
            self._by_storage,
            self._moved,
            self.external,
            self._parameters,
            self.parameter_addresses,
            self.producers,
            self.parameter_only.table,
            self._weak.references,
            self._inputs,
            self._elsewhere,
        )

    def signature(self, key: int, args: tuple[Any, ...], kwargs: Any) -> tuple[int, bool, int]:
        """See ``ValueIds``."""
        return self.native.take() or super().signature(key, args, kwargs)


class NativeRerunRecorder(RerunRecorder):
    """A recorder of which the library runs the ordinary part."""

    def __init__(self, library: Any, *args: Any, **more: Any) -> None:
        self.library = library
        super().__init__(*args, **more, new_value_ids=partial(NativeValueIds, library))

    def forward_mode(self) -> AbstractContextManager[Any]:
        """Return the mode that decides."""
        return _modes(self.library).forward(self, self.state, self.op_trace)  # type: ignore[no-any-return]

    def new_recompute_mode(self, inputs: list[tuple[int, Tensor]], progress: Progress) -> RecomputeMode:
        """See ``RerunRecorder``."""
        return _modes(self.library).recompute(self.state, inputs, progress)  # type: ignore[no-any-return]


def _tell(library: Any, mode: RegionMode, func: Any) -> None:
    site = mode.sites.get(id(func))
    if site is not None and not site.is_told:
        tell(library, mode, site)


def _native(value_ids: ValueIds) -> Any:
    assert isinstance(value_ids, NativeValueIds)
    return value_ids.native


class _Modes(NamedTuple):
    forward: Any
    recompute: Any


@cache
def _modes(library: Any) -> _Modes:
    """Return the classes that derive from the library's."""

    class NativeForwardMode(library.Mode, ForwardMode):  # type: ignore[misc]
        """Gets the ops that the library does not run."""

        def __init__(self, recorder: NativeRerunRecorder, *args: Any) -> None:
            super().__init__(*args)
            self.recorder = recorder

        def __enter__(self) -> Any:
            super().__enter__()
            state = self.state
            runs = self.op_trace is None  # the library shows no op to Python
            table = self.table
            keeps = bool(table.rules), state.keeps_layouts, state.keeps_persistent, table.saves_everything
            _native(state.value_ids).enter(
                self,
                state.value_ids,
                state,
                runs,
                table.native(library),
                self.recorder,
                *keeps,
                state.modules is not None,
            )
            return self

        def __exit__(self, *error: Any) -> None:
            native = _native(self.state.value_ids)
            self.recorder.native_ops = native.recorded
            native.leave()
            super().__exit__(*error)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if type(func) is not OpOverload:
                _native(self.state.value_ids).forget()
            out = ForwardMode.__torch_dispatch__(self, func, types, args, kwargs)
            _tell(library, self, func)
            return out

    class NativeRecomputeMode(library.Mode, RecomputeMode):  # type: ignore[misc]
        """Gets the ops that the library does not run."""

        def __enter__(self) -> Any:
            super().__enter__()
            sites, packed = self.table.native(library), self.state.packed
            _native(self.value_ids).enter(self, self.value_ids, None, True, sites, packed, self._held)
            return self

        def __exit__(self, *error: Any) -> None:
            _native(self.value_ids).leave()
            super().__exit__(*error)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if type(func) is not OpOverload:
                _native(self.value_ids).forget()
            out = RecomputeMode.__torch_dispatch__(self, func, types, args, kwargs)
            _tell(library, self, func)
            return out

    return _Modes(NativeForwardMode, NativeRecomputeMode)
