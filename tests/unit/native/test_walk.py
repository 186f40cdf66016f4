"""The library walks over modules as Python does: same fingerprints and records, same changes found and undone."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.jit._script import RecursiveScriptModule

import sac
from sac.native.load import library
from sac.region import fingerprint, holders, python_state, tables
from sac.region.fingerprint import PLAIN, FunctionFingerprint
from sac.region.module_state import ModuleState
from sac.region.python_state import ReachableState
from sac.region.tables import STANDARD_COUNT, STANDARD_NAMES, TablesHolder
from sac.region.undo import UndoStack
from tests.support.blocks import policy, save

NATIVE: Any = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the library is off")
SWITCHED = (tables, fingerprint, holders, python_state)  # see the fixture `switch`
WALKS = (
    "flat_entries",
    "holds_entries",
    "all_begin_with",
    "any_entry",
    "modules_below",
    "entries_of_classes",
)


class Meta(type):
    """Classes that are equal to all others."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type)

    def __hash__(cls) -> int:
        return 1


class Table(dict[str, Any]):
    """A dict of a user's."""


class Sized(nn.Linear):
    limit: ClassVar = [4]
    __name: ClassVar = [5]

    def __init__(self, width: int = 3) -> None:
        super().__init__(width, width)
        self.extra = width

    @property
    def twice(self) -> int:
        raise AssertionError("a walk has read a property")

    def keeps(self, value: Any, into: Any = [], *, also: Any = ()) -> None:  # noqa: B006
        into.append((value, also))

    def plain(self, value: int = 1, *, also: str = "") -> Any:
        return super().extra_repr(), value, also


class Slotted(nn.Module):
    __slots__ = ("memory", "unset")

    def __init__(self) -> None:
        super().__init__()
        self.memory = [1]


class EarlyAttribute(nn.Module):
    def __init__(self) -> None:
        object.__setattr__(self, "early", 1)
        super().__init__()
        self.late = [2]


class OddClass(nn.Module, metaclass=Meta):
    pass


class OwnParameters(nn.Module):
    """Its parameters are not those of its dict."""

    @property
    def _parameters(self) -> Any:
        return {}

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        self.__dict__["_parameters"] = value


class HidesItsDict(nn.Module):
    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return Table(found) if name == "__dict__" else found


class Raises(nn.Module):
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__" and "is_ready" in super().__getattribute__("__dict__"):
            raise RuntimeError("no dict")
        return super().__getattribute__(name)


def built_in() -> Any:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2), nn.Dropout(0.5), nn.Sequential(nn.GELU()))


def with_attributes() -> Any:
    model = built_in()
    model[0].note = "plain"  # one more than a Linear has
    model[1].memory = [torch.ones(2)]
    model[2].config = SimpleNamespace(a=1)
    model.scale, model.kind, model.none = 0.5, torch.float32, None
    model.function = lambda x: x * 2
    return model


def with_nones() -> Any:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Sized())
    model.register_module("nothing", None)
    model.register_buffer("unset", None)
    model.register_parameter("missing", None)
    return model


def shared() -> Any:
    one = nn.Linear(2, 2)
    model = nn.Sequential(one, nn.ReLU(), one)
    other = nn.Module()
    other.__dict__["_modules"] = model._modules  # one table of two modules
    return nn.Sequential(model, other, model)


def with_replaced_dict() -> Any:
    model = built_in()
    object.__setattr__(model[0], "__dict__", Table(vars(model[0])))
    return model


def with_other_tables() -> Any:
    model = built_in()
    model.__dict__["_modules"] = OrderedDict(model._modules)
    return model


def with_hooks() -> Any:
    model = built_in()
    model[0].register_forward_hook(lambda *_: None)
    model[3].register_forward_pre_hook(lambda *_: None)
    model[1].register_full_backward_hook(lambda *_: None)
    return model


def with_forward() -> Any:
    model = built_in()
    original = model[0].forward
    model[0].forward = lambda x: original(x) * 2
    return model


def odd_name() -> Any:
    model = built_in()

    class Name(str):
        __slots__ = ()

    vars(model)[Name("own")] = [1]
    return model


def with_generator() -> Any:
    model = built_in()
    model.generator = torch.Generator()
    return model


def installed() -> Any:
    """Forwards that sac has installed, one of them over a forward of the user's."""
    model = nn.Sequential(Sized(), nn.Linear(2, 2), nn.BatchNorm1d(2), with_forward())
    return sac.apply(model, {"mode": "selective", "policy": policy(save("matmul")), "blocks": ["*"]})


def raising() -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2), Raises())
    model[1].is_ready = True
    return model


MAKERS = (
    *(built_in, with_attributes, with_nones, shared, with_replaced_dict, with_other_tables, with_hooks, with_forward),
    *(odd_name, with_generator, installed, EarlyAttribute, OwnParameters, OddClass, HidesItsDict, Slotted, Sized),
    lambda: nn.Sequential(nn.Linear(2, 2), EarlyAttribute(), Slotted(), Sized()),
    lambda: nn.Sequential(nn.Linear(2, 2), OddClass()),
    lambda: nn.Sequential(nn.Linear(2, 2), HidesItsDict()),
    lambda: nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.ReLU())),
    lambda: nn.LazyLinear(3),
    lambda: nn.Module(),
)


@pytest.fixture(params=MAKERS, ids=[getattr(make, "__name__", "") for make in MAKERS])
def model(request: pytest.FixtureRequest) -> Any:
    return request.param()


def seen_in(model: Any) -> dict[str, Any]:
    found = FunctionFingerprint()
    found.look_at(model)
    tables = found.tables
    attributes = tables.attributes if tables is not None else None
    return {
        "parts": found.parts,
        "is_known": found.is_known,
        "owners": [*map(id, found.owners)],
        "seen": [*found._seen.items()],
        "attributes": None if attributes is None else recorded(attributes),
        "objects": None if attributes is None else [*map(id, attributes.objects)],
    }


def tables_below(model: Any, seen: dict[int, int], **given: Any) -> Any:
    """Call the library's walk as a fingerprint does, except for what is ``given``."""
    return NATIVE.modules_below(
        *(model, seen, fingerprint._BUILT_IN, {}, given.get("identity", fingerprint.weak_identity), STANDARD_NAMES),
        *(PLAIN, given.get("parts", []), given.get("owners", []), given.get("add_object", lambda *_: None)),
    )


def recorded(holder: TablesHolder) -> Any:
    return holder.names, [*map(id, holder.values)], holder.counts, [*map(len, holder.tables)], holder._lengths


def reached_from(model: Any) -> tuple[ReachableState, list[Any]]:
    found = FunctionFingerprint()
    found.look_at(model)
    state = ReachableState(found.owners, model.forward, found=found.tables)
    holders = [
        (type(one), recorded(one) if isinstance(one, TablesHolder) else getattr(one, "_held", None))
        for one in state._holders
    ]
    modules = ModuleState(tuple(found.owners), found=found.tables)
    bound = [(id(owner), [*held.items()]) for owner, held in modules._buffers]
    flags = recorded(modules._parameters), modules._training, str(bound)
    return state, [holders, sorted(state.tensors), [*map(id, state.generators)], flags]


def change_attribute(model: Any) -> None:
    model.changed = [1]


def change_child(model: Any) -> None:
    for name, child in [*model._modules.items()]:
        if child is not None:
            model._modules[name] = nn.Identity()


def change_order(model: Any) -> None:
    for name in [*model._modules][:1]:
        model._modules[name] = model._modules.pop(name)


def change_mode(model: Any) -> None:
    vars(model)["training"] = not model.training


def change_hooks(model: Any) -> None:
    model.register_forward_hook(lambda *_: None)


def change_names(model: Any) -> None:
    model.first, model.second = 1, 2
    del model.first
    model.first = 1


CHANGES = (change_attribute, change_child, change_order, change_mode, change_hooks, change_names)


def test_fingerprints_are_the_same(model: Any, switch: Callable[[bool], None]) -> None:
    for change in (None, *CHANGES):
        if change is not None:
            change(model)
        switch(True)
        native = seen_in(model)
        switch(False)
        assert native == seen_in(model)


def test_an_error_makes_both_fingerprints_unknown(switch: Callable[[bool], None]) -> None:
    model = raising()
    switch(True)
    native = seen_in(model)
    switch(False)
    assert native == seen_in(model)
    assert not native["is_known"]


def test_records_are_the_same(model: Any, switch: Callable[[bool], None]) -> None:
    for change in (None, *CHANGES):
        if change is not None:
            change(model)
        switch(True)
        native = reached_from(model)[1]
        switch(False)
        assert native == reached_from(model)[1]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("recorded_by_library", [True, False])
def test_changes_are_found_and_undone(
    model: Any, change: Callable[[nn.Module], None], recorded_by_library: bool, switch: Callable[[bool], None]
) -> None:
    def contents() -> Any:
        return [
            ([*vars(one)], [*map(id, [*vars(one).values()][STANDARD_COUNT:])], [*one._modules.items()])
            for one in modules
        ]

    modules = [one for one in model.modules() if type(one) is not RecursiveScriptModule]
    before = contents()
    switch(recorded_by_library)
    state = reached_from(model)[0]
    change(model)
    switch(not recorded_by_library)
    after = contents()
    with UndoStack() as stack:
        state.enter_on(stack)
        if type(model) not in (EarlyAttribute, HidesItsDict):  # Python records these in other ways
            assert contents() == before
        switch(recorded_by_library)
    assert contents() == after


def test_a_changed_table_differs(switch: Callable[[bool], None]) -> None:
    """An equal value in place of the same object, and an equal name in place of the same string."""
    value, name = float("1.5"), "".join(["na", "me"])
    table = {"other": 0, name: value}
    switch(True)
    holder = TablesHolder([{}, table], 0)
    args = holder._walked, 0, holder._lengths, holder.names, holder.values
    assert NATIVE.holds_entries(*args)
    table[name] = float("1.5")
    assert not NATIVE.holds_entries(*args)
    assert holder.now() == {1: table}
    del table[name]
    table["na" + name[2:]] = value
    assert not NATIVE.holds_entries(*args)  # the names are equal: Python says so
    assert holder.now() == {}
    table["new"] = 1
    assert not NATIVE.holds_entries(*args)
    holder.put({})
    assert [*table.items()] == [("other", 0), (name, value)]


def test_each_length_of_table(switch: Callable[[bool], None]) -> None:
    """Tables with fewer entries than come first have none that count."""
    made: list[dict[str, Any]] = [{str(i): [i] for i in range(n)} for n in (0, STANDARD_COUNT, 3, STANDARD_COUNT + 2)]
    for first in (0, STANDARD_COUNT):
        switch(True)
        native = TablesHolder(made, first)
        assert not native.now()
        switch(False)
        assert recorded(native) == recorded(TablesHolder(made, first))
        assert not native.now()


def test_what_is_unusual_is_left_to_python() -> None:
    odd = with_replaced_dict()
    seen: dict[int, int] = {}
    assert NATIVE.flat_entries([Table()], 0) is None
    assert NATIVE.flat_entries([vars(Sized)], 0) is None  # the class itself would do
    assert NATIVE.any_entry([Table()], ("name",)) is None
    assert NATIVE.entries_of_classes([SimpleNamespace()], True, PLAIN) is None
    assert not NATIVE.holds_entries([Table()], 0, [0], [], [])
    assert not NATIVE.all_begin_with([{}], "training")
    for unusual in (odd, raising(), OddClass(), EarlyAttribute(), nn.Sequential(HidesItsDict()), OwnParameters()):
        parts: list[Any] = []
        owners: list[Any] = []
        assert tables_below(unusual, seen, parts=parts, owners=owners) is None
        assert not [*seen, *parts, *owners]


def test_the_library_looks_at_usual_models(switch: Callable[[bool], None]) -> None:
    """Python is not asked: the same results could come from it."""
    switch(True)
    for model in (built_in(), with_attributes(), with_nones(), shared(), with_hooks(), Slotted(), Sized()):
        seen: dict[int, int] = {}
        assert tables_below(model, seen) is not None
        assert len(seen) == len({*model.modules()})
    assert NATIVE.entries_of_classes([Sized, Slotted], True, PLAIN) is not None


@pytest.mark.parametrize("with_methods", [True, False])
@pytest.mark.parametrize("cls", [Sized, Slotted, Meta, OddClass, nn.Linear, SimpleNamespace, Table])
def test_entries_of_classes(cls: type, with_methods: bool, switch: Callable[[bool], None]) -> None:
    classes = [Slotted, cls, Sized]
    native = NATIVE.entries_of_classes(classes, with_methods, PLAIN)
    if native is None:
        return
    found = python_state._values_in_classes(classes, with_methods)
    assert [*map(id, native[0])] == [*map(id, found)]
    switch(False)
    assert recorded(holders.ClassesHolder(classes, native[1])) == recorded(holders.ClassesHolder(classes))


def test_functions_of_classes() -> None:
    """What a method holds makes it part of the state: a default, a free variable, an attribute, its own name."""
    free = [1]

    class Methods:
        def nothing(self) -> int:
            return 1

        def closes(self) -> Any:
            return free

        def asks_super(self) -> Any:
            return super().__repr__()

        def has_default(self, one: Any = free) -> Any:
            return one

        def has_named_default(self, *, one: Any = free) -> Any:
            return one

        def has_plain_defaults(self, one: Any = 1, *, two: Any = None) -> Any:
            return one, two

        def names_itself(self) -> Any:
            return self.names_itself

        def has_attribute(self) -> None:
            pass

        has_attribute.calls = 0  # type: ignore[attr-defined]
        _private, __mangled = [1], [2]

    names = [
        name for name, value in vars(Methods).items() if value in NATIVE.entries_of_classes([Methods], True, PLAIN)[0]
    ]
    assert names == [
        *("closes", "has_default", "has_named_default", "names_itself", "has_attribute"),
        *("_private", "_Methods__mangled"),
    ]


def test_interrupts_are_passed_on() -> None:
    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    def failing(_: Any) -> None:
        raise ValueError

    seen: dict[int, int] = {}
    assert tables_below(built_in(), seen, identity=failing) is None
    with pytest.raises(KeyboardInterrupt):
        tables_below(built_in(), seen, identity=interrupted)
    assert not seen


def test_errors_of_attributes_are_passed_on() -> None:
    def failing(*_: Any) -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        tables_below(with_attributes(), {}, add_object=failing)


def test_no_reference_is_lost_or_kept(switch: Callable[[bool], None]) -> None:
    """Twenty walks over one model leave the references of what they have met as they were."""
    model = with_attributes()
    model[0].register_forward_hook(lambda *_: None)
    odd = raising()
    watched = [model, vars(model), model[0], vars(model[0]), model._modules, vars(model[1])["memory"], Sized.limit]
    watched += [type(model), nn.Linear, odd[1], model[0]._forward_hooks, NATIVE]
    switch(True)

    def walk() -> None:
        state, _ = reached_from(model)
        with UndoStack() as stack:
            state.enter_on(stack)
        seen_in(odd)
        holders.ClassesHolder([Sized]).now()
        NATIVE.entries_of_classes([Sized], True, PLAIN)

    walk()
    gc.collect()
    before = [sys.getrefcount(one) for one in watched]
    for _ in range(20):
        walk()
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before


def test_all_walks_are_used() -> None:
    sources = "".join(Path(module.__file__ or "").read_text() for module in SWITCHED)
    for name in WALKS:
        assert f"native.{name}(" in sources
