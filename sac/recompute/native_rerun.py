"""The rerun engine with the optional native library: ordinary ops are signed and run in C++, in both passes."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from functools import cache, partial
from threading import get_ident
from typing import Any, NamedTuple

from torch import Tensor, nn

from sac.checksums import Sums
from sac.recompute.module_tracker import RegionMode
from sac.recompute.native_recorder import tell
from sac.recompute.parameter_only import ParameterOnlyIds
from sac.recompute.rerun import ForwardMode, RecomputeMode, RerunRecorder
from sac.recompute.table import CallSite, DecisionTable
from sac.recompute.value_ids import ValueIds
from sac.recompute.whole_modules import SavedModuleCall
from sac.region.frame import Handle, Progress
from sac.tensors import WeakStorages
from sac.torch_private import OpOverload

# Note [Native value ids]
#
# While a mode of the rerun engine, or one of `sac.context_fn`, is on top of the stack, the library runs an ordinary op
# (Note [The native recorder]) without a trip into Python: it hashes its signature, runs it, and names its results in
# the tables of `ValueIds`. So it does with factories, and with ops that write to one tensor that the region has made
# and that nothing needs as it was (`may_overwrite` in csrc/ids.h). If the op may be saved, and no rule looks at its
# arguments, the library decides; `RerunState.hold` gets what is saved, with what `ValueIds.describe` returns for the
# arguments. In recomputation the library serves a value that is held as it was returned, and runs an op that the
# forward saw and did not save. All other ops go to Python. What autograd saves is described, and compared in
# recomputation, in C++ too.
#
# A call must have the same signature in both passes. But the library may run it in one of them and Python in the other,
# as when it reads a value that the forward saves: Python notes that, and in recomputation there is nothing to note. So
# if tensors are plain, the library signs every op of torch's own, before Python sees the op, and `NativeValueIds` hands
# that signature out. Python hashes only what the library signs in neither pass: ops of others, and those on subclasses.
#
# Inside of a module that is saved as a whole, no rule decides on ops, and what they compute is not named: the library
# runs those that write to nothing. It also names a tensor from outside of the region, if all parameters are instances
# of `Parameter` itself, so that the tensor is not a component of one.
#
# The tables are in C++ (csrc/value_ids.h), and Python reads and writes them through views, which are made when they are
# first needed: most passes need none. The thread of the pass gets at them without the GIL. So no other thread may, and
# what a thread does that was forked inside of the region, which is an error, is not recorded.


class NativeValueIds(ValueIds):
    """Value ids whose signatures come from the library; see Note [Native value ids]."""

    __slots__ = ("_owners", "library", "native")

    def __init__(self, library: Any, owners: tuple[nn.Module, ...] = ()) -> None:
        self.library, self._owners = library, owners
        self.native = library.Ids()
        self.packed = self.native.packs()
        self.input_ids, self._draws = {}, {}
        self.external_storages = WeakStorages()

    def __getattr__(self, name: str) -> Any:
        """Make the views of the library's tables: most passes do not need them in Python."""
        if name not in ValueIds.__slots__:
            raise AttributeError(name)
        self.make_tables()
        return getattr(self, name)

    def make_tables(self) -> None:
        """See ``ValueIds``: these are views of the library's."""
        views = self.native.views()
        self.parameter_only = ParameterOnlyIds(self._owners)
        self._by_storage, self._moved, self.saved_versions, self.parameter_only.table, self.producers, *sets = views
        self.external, self._parameters, self._inputs, self._elsewhere, self.parameter_addresses, *sets = sets
        self.recent, self._weak = sets
        self._parameter_bytes = 0

    def note_saved(self, part: Tensor) -> int:
        """See ``ValueIds``."""
        address: int | None = self.native.note_saved(part)
        return super().note_saved(part) if address is None else address

    def not_as_saved(self, values: list[Any]) -> list[Any]:
        """See ``ValueIds``."""
        found: list[Any] = self.library.not_as_saved(values)
        return found

    def signatures(self) -> Collection[int]:
        """See ``ValueIds``."""
        known: Collection[int] = self.native.producers()
        return known

    def name_input(self, tensor: Tensor, position: int, *, lasts: bool = True) -> None:
        """See ``ValueIds``."""
        named = self.native.name_input(tensor, hash(("input", position)), lasts)
        if named is None:
            super().name_input(tensor, position, lasts=lasts)
        else:
            self.input_ids[position] = named

    def name_input_again(self, tensor: Tensor, input_ids: list[tuple[int, int]]) -> None:
        """See ``ValueIds``."""
        if not self.native.name_input_again(tensor, input_ids):
            super().name_input_again(tensor, input_ids)

    def sums_of(self, out: Any) -> Sums:
        """See ``ValueIds``."""
        found: Sums | None = self.library.sums_of(out)
        return super().sums_of(out) if found is None else found

    def tell_turn(self, *, is_paused: bool, inside: dict[int, CallSite] | None) -> None:
        """See ``ValueIds``."""
        native = self.native
        native.is_paused, native.is_inside, native.inside = is_paused, inside is not None, inside

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
        mode = native_forward_mode(self.library, ForwardMode)(self.state, self.op_trace)
        mode.packer = self
        return mode  # type: ignore[no-any-return]

    def new_recompute_mode(self, inputs: list[tuple[int, Tensor]], progress: Progress) -> RecomputeMode:
        """See ``RerunRecorder``."""
        return native_recompute_mode(self.library, RecomputeMode)(self.state, inputs, progress)  # type: ignore[no-any-return]

    def close(self, kept: list[Handle], last_missing: int) -> bool:
        """See ``RerunRecorder``."""
        self.native_ops = _native(self.state.value_ids).recorded
        return super().close(kept, last_missing)


class _Inside(NamedTuple):
    """What ``tell`` reads of a mode, for the ops inside of a saved module."""

    table: DecisionTable
    sites: dict[int, CallSite]

    @classmethod
    def of(cls, mode: RegionMode, call: SavedModuleCall) -> Any:
        """Return what there is while ``call`` runs."""
        return cls(mode.table, mode.table.sites_of(call.call_key[0]))


def _tell(library: Any, mode: RegionMode, func: Any) -> None:
    site = mode.sites.get(id(func))
    if site is not None and not site.is_told:
        tell(library, mode, site)


def _native(value_ids: ValueIds) -> Any:
    assert isinstance(value_ids, NativeValueIds)
    return value_ids.native


# -- The two modes, which derive from the library's and from a mode in Python


@cache
def native_forward_mode(library: Any, base: type[ForwardMode]) -> Any:
    """Return the class of the modes like ``base`` of which the library runs the ordinary ops."""

    class NativeForwardMode(library.Mode, base):  # type: ignore[misc, valid-type]
        """Gets the ops that the library does not run. ``packer``: whose ``pack`` gets what autograd saves."""

        packer: Any = None

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
                self.packer,
                *keeps,
                state.modules,
            )
            return self

        def __exit__(self, *error: Any) -> None:
            _native(self.state.value_ids).leave()
            super().__exit__(*error)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if type(func) is not OpOverload:
                _native(self.state.value_ids).forget()
            inside = self.state.inside
            out = ForwardMode.__torch_dispatch__(self, func, types, args, kwargs)
            _tell(library, self if inside is None else _Inside.of(self, inside), func)
            return out

    return NativeForwardMode


@cache
def native_recompute_mode(library: Any, base: type[RecomputeMode]) -> Any:
    """Return the class of the modes like ``base`` of which the library runs the ordinary ops."""

    class NativeRecomputeMode(library.Mode, base):  # type: ignore[misc, valid-type]
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
            if get_ident() != self.thread and self.is_forked():
                return func(*args, **(kwargs or {}))
            if type(func) is not OpOverload:
                _native(self.value_ids).forget()
            out = RecomputeMode.__torch_dispatch__(self, func, types, args, kwargs)
            _tell(library, self, func)
            return out

    return NativeRecomputeMode
