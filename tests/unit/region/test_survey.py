"""What a survey finds in a later call is what Python finds, whatever has changed, and it keeps nothing alive."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from sac.native.load import library
from sac.recompute.regions import Region, _fingerprint_of, _key
from sac.region import fingerprint, holders, python_state, survey, tables
from sac.region.fingerprint import PLAIN
from sac.region.python_state import ReachableState
from sac.region.survey import Surveys
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

import sac
from sac.blocks.install import regions_of
from sac.engine.undo import UndoStack

pytestmark = pytest.mark.skipif(library() is None, reason="surveys need the library")

FACTOR = 1.0
LIMITS = {"most": [1]}
HIDDEN = {"height": 5}
UNDO: list[tuple[Any, Any]] = []


def halved(x: Tensor, by: float = 0.5) -> Tensor:
    return x * by


def counting(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    calls = [0]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] += 0
        return function(*args, **kwargs)

    return call


def doubled(x: Tensor, by: float = 2.0) -> Tensor:
    return x * by


class Choices(OrderedDict[str, Any]):
    """A dict with an order and attributes of its own."""

    def __init__(self) -> None:
        super().__init__(a=1, b=[2])
        self.chosen = "a"


class Careful:
    """As the configs of transformers: asked for an attribute, it may look under another name."""

    other = ""

    def __init__(self) -> None:
        self.width = 4

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__" and object.__getattribute__(self, "other"):
            return HIDDEN
        return object.__getattribute__(self, name)


class Settings:
    kinds: ClassVar = ["a"]

    def __init__(self) -> None:
        self.width = 4
        self.names = ["x", 1]


class Gates:
    """An object whose dict is known by its version, as a module's; see Note [Versions]."""

    def __init__(self) -> None:
        self.gate = globals()["doubled"]  # no code names it, so only this attribute leads to it

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


class Part(nn.Module):
    gain: ClassVar = 2.0
    memory: ClassVar = [3]

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scale = 0.5

    @staticmethod
    def halved_twice(x: Tensor) -> Tensor:
        return halved(halved(x))

    @counting
    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return halved(self.fc(x)) * self.scale * self.gain * FACTOR * LIMITS["most"][0]


class Other(Part):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), Part(), Part()
        self.seen = [torch.ones(2), 1]
        self.also = self.seen
        self.table = {"a": [1], "b": None}
        self.config, self.gates = Settings(), Gates()
        self.act = torch.tanh
        self.shape = (4, 4)
        self.note = "plain"
        self.choices, self.careful, self.none = Choices(), Careful(), set[int]()
        self.opaque = object()
        self.pairs = ("a", [1], {"b": torch.ones(1)})
        self.offset = torch.zeros(4)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.gates.gate(self.second(self.act(self.first(x))))) + self.offset


def with_survey(block: nn.Module | None = None) -> tuple[Any, Region, Surveys]:
    """A block in training, its region, and the survey that its calls have made."""
    model = sac.apply(nn.Sequential(block or Block()), {"mode": "full", "blocks": ["*"]})
    for _ in range(3):
        step(model)
    (installed,) = regions_of(model)
    return model, installed.region, installed.region.evidence.surveys


def step(model: Any) -> None:
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()


def is_made(surveys: Surveys) -> bool:
    return surveys._known is not None


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes one of `CHANGES`; what it changes in this file comes back."""
    parts = [(one, one.__defaults__, one.__code__) for one in (halved, doubled)]
    monkeypatch.setitem(globals(), "FACTOR", FACTOR)
    monkeypatch.setitem(globals(), "halved", halved)
    handles: list[Any] = []

    def change(name: str, block: nn.Module) -> None:
        handles.append(CHANGES[name][1](block, monkeypatch))

    yield change
    for function, defaults, code in parts:
        function.__defaults__, function.__code__ = defaults, code
        function.__dict__.clear()
    while UNDO:
        cell, before = UNDO.pop()
        cell.cell_contents = before
    closure_of(Part.scaled)[0].cell_contents[:] = [0]
    for one in handles:
        if isinstance(one, RemovableHandle):
            one.remove()


@pytest.fixture
def versions() -> Iterator[Callable[[bool], Any]]:
    """Turn the use of versions on or off."""
    native: Any = library()
    before = native.survey_versions(False)
    native.survey_versions(before)
    yield native.survey_versions
    native.survey_versions(before)


def closure_of(method: Any) -> tuple[Any, ...]:
    closure: tuple[Any, ...] = method.__closure__
    return closure


scaled = Part.scaled.__wrapped__  # type: ignore[attr-defined]


def set_cell(method: Any, value: Any) -> None:
    cell = closure_of(method)[0]
    UNDO.append((cell, cell.cell_contents))
    cell.cell_contents = value


def add_to_graph(block: Block) -> None:
    block.offset.add_(torch.ones(4, requires_grad=True))


def exec_class(block: Block) -> None:
    block.first.__class__ = Other


def set_defaults(block: Block) -> None:
    halved.__defaults__ = (0.25,)


def set_code(block: Block) -> None:
    halved.__code__ = (lambda x, by=0.5: x * by + 1).__code__


def set_gate_defaults(block: Block) -> None:
    doubled.__defaults__ = (3.0,)


def set_gate_code(block: Block) -> None:
    doubled.__code__ = (lambda x, by=2.0: x * by + 1).__code__


def patched_forward(self: Part, x: Tensor) -> Tensor:
    return self.fc(x) * FACTOR


def alias(block: Block) -> None:
    block.table["a"] = block.config.names = [1]


def another(block: Block) -> list[Any]:
    block.seen = [torch.ones(2), 1]
    return block.seen


def own_dict(block: Block) -> None:
    block.config.__dict__ = {"width": 4, "names": ["x", 1]}


# What changes, and whether a survey still holds; None: with another function.
CHANGES: dict[str, tuple[bool | None, Callable[[Block, pytest.MonkeyPatch], Any]]] = {
    "nothing": (True, lambda block, patch: None),
    "a float": (None, lambda block, patch: setattr(block.first, "scale", 0.25)),
    "a plain value that is equal": (True, lambda block, patch: setattr(block, "note", "plain")),
    "a plain value of another class": (None, lambda block, patch: setattr(block.first, "scale", None)),
    "a new attribute": (False, lambda block, patch: setattr(block.second, "more", 1)),
    "an attribute less": (False, lambda block, patch: delattr(block, "note")),
    "the order of attributes": (False, lambda block, patch: block.__dict__.update(note=block.__dict__.pop("note"))),
    "a flag": (None, lambda block, patch: block.eval()),
    "the flag of a submodule": (None, lambda block, patch: block.first.fc.eval()),
    "a list grows": (False, lambda block, patch: block.seen.append(2)),
    "a list has another tensor": (True, lambda block, patch: block.seen.__setitem__(0, torch.zeros(3))),
    "a list has another plain value": (True, lambda block, patch: block.seen.__setitem__(1, "b")),
    "a list has a list": (False, lambda block, patch: block.seen.__setitem__(1, [])),
    "another list": (True, lambda block, patch: setattr(block, "also", another(block))),
    "one list is two": (False, lambda block, patch: setattr(block, "also", [*block.seen])),
    "a tuple for a list": (False, lambda block, patch: setattr(block, "seen", (1, 2))),
    "a dict inside": (False, lambda block, patch: block.table["a"].append(2)),
    "a dict has another name": (False, lambda block, patch: block.table.update(c=1)),
    "one list in two places": (False, lambda block, patch: alias(block)),
    "an object": (True, lambda block, patch: setattr(block, "config", Settings())),
    "an object of another class": (False, lambda block, patch: setattr(block, "config", SimpleNamespace(width=4))),
    "the dict of an object": (True, lambda block, patch: own_dict(block)),
    "an attribute of an object": (True, lambda block, patch: setattr(block.config, "width", 5)),
    "a new attribute of an object": (False, lambda block, patch: setattr(block.config, "more", [])),
    "a tensor": (True, lambda block, patch: setattr(block, "offset", torch.ones(4))),
    "a tensor with a graph": (
        False,
        lambda block, patch: setattr(block, "offset", torch.ones(4, requires_grad=True) * 1),
    ),
    "a tensor that gets a graph": (False, lambda block, patch: add_to_graph(block)),
    "a parameter for a tensor": (False, lambda block, patch: block.seen.__setitem__(0, nn.Parameter(torch.ones(2)))),
    "the function of an attribute": (False, lambda block, patch: setattr(block, "act", torch.sin)),
    "the defaults of a function that an object has": (False, lambda block, patch: set_gate_defaults(block)),
    "the code of a function that an object has": (False, lambda block, patch: set_gate_code(block)),
    "an attribute of a function that an object has": (False, lambda block, patch: setattr(doubled, "calls", [1])),
    "a function of the user": (False, lambda block, patch: setattr(block, "act", lambda x: x * 2)),
    "the cell of a method": (False, lambda block, patch: closure_of(Part.scaled)[0].cell_contents.append(1)),
    "what the cell of a method holds": (True, lambda block, patch: set_cell(Part.scaled, [7])),
    "a plain value in a cell": (False, lambda block, patch: set_cell(Part.scaled, 7)),
    "a method of the same code": (True, lambda block, patch: patch.setattr(Part, "scaled", counting(scaled))),
    "a method of another function": (False, lambda block, patch: patch.setattr(Part, "scaled", counting(halved))),
    "an attribute of a method": (False, lambda block, patch: patch.setattr(Part.scaled, "note", 1, raising=False)),
    "the file of a method": (False, lambda block, patch: patch.setattr(Part.scaled, "__module__", "torch")),
    "the order of an ordered dict": (False, lambda block, patch: block.choices.move_to_end("a")),
    "an attribute of a dict": (True, lambda block, patch: setattr(block.choices, "chosen", "b")),
    "a new attribute of a dict": (False, lambda block, patch: setattr(block.choices, "more", [1])),
    "another ordered dict": (True, lambda block, patch: setattr(block, "choices", Choices())),
    "a list in an ordered dict": (False, lambda block, patch: block.choices["b"].append(2)),
    "an object that hides its dict": (False, lambda block, patch: patch.setattr(Careful, "other", "x")),
    "the access to an object": (False, lambda block, patch: patch.delattr(Careful, "__getattribute__")),
    "a set gets an element": (False, lambda block, patch: block.none.add(1)),
    "a list in a tuple": (False, lambda block, patch: block.pairs[1].append(2)),
    "another tuple": (True, lambda block, patch: setattr(block, "pairs", ("c", [1], {"b": torch.ones(2)}))),
    "a longer tuple": (False, lambda block, patch: setattr(block, "pairs", (*block.pairs, 1))),
    "an object that is not examined": (True, lambda block, patch: setattr(block, "opaque", object())),
    "an object that is examined": (False, lambda block, patch: setattr(block, "opaque", Settings())),
    "the file of a global function": (False, lambda block, patch: patch.setattr(halved, "__module__", "torch")),
    "what sac's forward stands for": (
        False,
        lambda block, patch: patch.setattr(block.first.forward.__self__, "before", patched_forward),
    ),
    "a property of torch's class": (
        False,
        lambda block, patch: patch.setattr(nn.LayerNorm, "_buffers", property(lambda self: {}), raising=False),
    ),
    "an iterator": (False, lambda block, patch: setattr(block, "note", iter([1]))),
    "a generator": (False, lambda block, patch: setattr(block, "note", torch.Generator())),
    "a set": (False, lambda block, patch: setattr(block, "note", {1})),
    "another parameter": (True, lambda block, patch: setattr(block.first.fc, "bias", nn.Parameter(torch.ones(4)))),
    "no parameter": (True, lambda block, patch: setattr(block.first.fc, "bias", None)),
    "another buffer": (True, lambda block, patch: setattr(block, "count", torch.ones(1))),
    "a new buffer": (True, lambda block, patch: block.register_buffer("more", torch.ones(1))),
    "a submodule": (False, lambda block, patch: setattr(block.first, "fc", nn.Linear(4, 4))),
    "a submodule of other sizes": (False, lambda block, patch: setattr(block.first, "fc", nn.Linear(4, 4, bias=False))),
    "a submodule of another class": (False, lambda block, patch: setattr(block.first, "fc", nn.Identity())),
    "one submodule twice": (False, lambda block, patch: setattr(block.first, "fc", block.second.fc)),
    "a new submodule": (False, lambda block, patch: block.norm.add_module("more", nn.Identity())),
    "a submodule less": (False, lambda block, patch: setattr(block, "norm", None)),
    "the class of a submodule": (False, lambda block, patch: exec_class(block)),
    "a hook": (False, lambda block, patch: block.first.register_forward_hook(lambda *_: None)),
    "a hook that is removed": (True, lambda block, patch: block.first.register_forward_hook(lambda *_: None).remove()),
    "a hook of backward": (False, lambda block, patch: block.first.register_full_backward_hook(lambda *_: None)),
    "a hook of all modules": (False, lambda block, patch: register_module_forward_hook(lambda *_: None)),
    "a static method": (False, lambda block, patch: patch.setattr(Part, "halved_twice", staticmethod(torch.sin))),
    "a plain class attribute": (True, lambda block, patch: patch.setattr(Part, "gain", 3.0)),
    "a new class attribute": (False, lambda block, patch: patch.setattr(Part, "more", 3.0, raising=False)),
    "a list of a class": (False, lambda block, patch: patch.setattr(Part, "memory", [3, 4])),
    "a class attribute of an object": (True, lambda block, patch: patch.setattr(Settings, "kinds", ["b"])),
    "the forward of a class": (False, lambda block, patch: patch.setattr(Part, "forward", patched_forward)),
    "the forward of torch's class": (
        False,
        lambda block, patch: patch.setattr(nn.LayerNorm, "forward", lambda self, x: x * self.weight),
    ),
    "the access to attributes": (
        False,
        lambda block, patch: patch.setattr(
            Part, "__getattribute__", lambda self, name: object.__getattribute__(self, name), raising=False
        ),
    ),
    "the forward of a module": (False, lambda block, patch: setattr(block.first, "forward", lambda x: x * 3)),
    "a plain global": (True, lambda block, patch: patch.setitem(globals(), "FACTOR", 2.0)),
    "a global of another class": (False, lambda block, patch: patch.setitem(globals(), "FACTOR", [2.0])),
    "a global less": (False, lambda block, patch: patch.delitem(globals(), "FACTOR")),
    "the contents of a global": (True, lambda block, patch: patch.setitem(LIMITS, "most", [2])),
    "a global function": (
        False,
        lambda block, patch: patch.setitem(globals(), "halved", lambda x: x * 0.5),
    ),
    "the defaults of a global function": (False, lambda block, patch: set_defaults(block)),
    "the code of a global function": (False, lambda block, patch: set_code(block)),
    "an attribute of a global function": (False, lambda block, patch: setattr(halved, "calls", [1])),
}
CHANGED = pytest.mark.parametrize("name", CHANGES)


def contents(state: ReachableState) -> list[Any]:
    """The record: of each holder its class, what it is of, and what that held."""
    return [(type(one), *map(_by_identity, (_target(one), one.before()))) for one in state._recorded()]


def _target(holder: Any) -> Any:
    if isinstance(holder, holders.ClassesHolder):
        return holder.classes, [*map(_by_identity, holder.recorded())]
    if isinstance(holder, holders.CellHolder):
        return id(holder.cell)
    if isinstance(holder, tables.TablesHolder):
        return [*map(id, holder.tables)], [*map(_by_identity, holder.recorded())]
    return [*map(id, holder.owners)] if isinstance(holder, holders.HooksHolder) else id(holder.target)


def _by_identity(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [*map(_by_identity, value)]
    if isinstance(value, frozenset):
        return {*map(id, value)}
    if type(value) in holders.ITERATORS:
        return type(value)  # a copy
    if isinstance(value, dict):
        return [(name, _by_identity(one)) for name, one in value.items()]
    return value if isinstance(value, int) else id(value)


def of_modules(found: Any) -> Any:
    return _by_identity([*found.parameters.recorded()]), found.training, _by_identity(found.buffers)


class Found(NamedTuple):
    """What a call finds that has no survey."""

    parts: object
    owners: tuple[nn.Module, ...]
    tables: Any
    state: ReachableState


def by_python(block: nn.Module) -> Found:
    found = _fingerprint_of(block)
    owners, taken = found.taken()
    return Found(_key(found) if found.is_known else None, owners, taken, ReachableState(owners, None, found=taken))


@pytest.mark.parametrize("with_versions", [True, False])
@CHANGED
def test_a_survey_finds_what_python_finds(
    name: str, changed: Callable[..., None], with_versions: bool, versions: Callable[[bool], Any]
) -> None:
    versions(with_versions)
    model, region, surveys = with_survey()
    assert is_made(surveys)
    key = region.evidence.function_keys[by_python(model[0]).parts]
    changed(name, model[0])
    again = surveys.taken(model[0])
    holds = CHANGES[name][0]
    assert (again is None) == (holds is False)
    if again is not None:
        wanted, (found_key, owners, found) = by_python(model[0]), again
        state = ReachableState(owners, None, found=found)
        assert found_key is (key if holds else None)
        assert region.evidence.function_keys.get(wanted.parts) is found_key
        assert owners == wanted.owners
        assert of_modules(found) == of_modules(wanted.tables)
        assert [*state.tensors] == [*wanted.state.tensors]
        assert [*state.parameters] == [*wanted.state.parameters]
        assert contents(state) == contents(wanted.state)


@pytest.mark.parametrize("with_versions", [True, False])
@CHANGED
def test_what_changes_later_is_found_and_undone_as_by_python(
    name: str, changed: Callable[..., None], with_versions: bool, versions: Callable[[bool], Any]
) -> None:
    versions(with_versions)
    model, _, surveys = with_survey()
    again = surveys.taken(model[0])
    assert again is not None
    states = ReachableState(again[1], None, found=again[2]), by_python(model[0]).state
    assert not any(state.has_changed() for state in states)
    changed(name, model[0])
    seen = []
    for state in states:
        is_other, before = state.has_changed(), contents(by_python(model[0]).state)
        with UndoStack() as stack:
            state.enter_on(stack)
            seen.append((is_other, contents(by_python(model[0]).state)))
        assert contents(by_python(model[0]).state) == before
    assert seen[0] == seen[1]


def test_what_a_recomputation_changes_is_undone() -> None:
    model, _, surveys = with_survey()
    block = model[0]
    again = surveys.taken(block)
    assert again is not None
    state = ReachableState(again[1], None, found=again[2])
    before = contents(by_python(block).state)
    with UndoStack() as stack:
        state.enter_on(stack)
        block.first.scale, block.table["a"], Part.memory, block.more = 9.0, [9], [9], 1
        block.seen.clear()
    assert contents(by_python(block).state) == before
    assert Part.memory == [3]


def test_unusual_models_have_no_survey() -> None:
    for put in (
        lambda block: setattr(block, "note", {1}),
        lambda block: setattr(block, "note", iter([1])),
        lambda block: setattr(block, "act", lambda x: x),
        lambda block: setattr(block, "act", torch.no_grad()(halved)),
        lambda block: setattr(block, "act", partial(torch.sin)),
        lambda block: setattr(block, "note", deque()),
        lambda block: setattr(block, "note", [nn.Linear(1, 1)]),
        lambda block: block.first.register_forward_hook(lambda *_: None),
    ):
        block = Block()
        put(block)
        surveys = with_survey(block)[2]
        assert not is_made(surveys)
        assert surveys._credit < survey._MOST_CREDIT


def test_a_survey_that_is_never_of_use_is_not_made_again_and_again() -> None:
    model, _, surveys = with_survey()
    for count in range(20):
        model[0].first.scale = (0.5, 0.25)[count % 2]
        step(model)
    assert not surveys.is_wanted(None)
    assert is_made(surveys)  # the last one is of use to half of the calls


def test_a_survey_is_made_again_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "_USES", 2)  # otherwise it takes more calls
    monkeypatch.setattr(survey, "_MOST_CREDIT", 4)
    model, _, surveys = with_survey()
    for _ in range(8):
        model.train(not model.training)
        for _ in range(5):
            step(model)
        assert is_made(surveys)


def test_a_counter_leaves_the_rest_of_a_survey() -> None:
    block = Block()
    block.calls = 0
    block.register_buffer("sums", torch.zeros(1))
    forward = Block.forward

    class Counts(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return forward(self, x) * self.calls

    block.__class__ = Counts
    plain = copy.deepcopy(block)
    model, _, surveys = with_survey(block)
    for _ in range(3):
        step(plain)
    for _ in range(60):
        for one in (model, plain):
            one.zero_grad()
            step(one)
        assert all(map(torch.equal, grads(model), grads(plain)))
        assert block.calls == plain.calls
    again = surveys.taken(block)
    assert again is not None
    assert again.key is None


def grads(model: nn.Module) -> list[Any]:
    return [one.grad for one in model.parameters()]


def test_no_reference_is_lost_or_kept() -> None:
    model, _, surveys = with_survey()
    block = model[0]
    watched = [block, vars(block), block.first, block._modules, block.seen, block.pairs, block.choices]
    watched += [block.offset, Part, vars(Part)["scaled"], halved, LIMITS, PLAIN, surveys._known.survey, block.note]

    def walk() -> None:
        again = surveys.taken(block)
        state = ReachableState(again.owners, None, found=again.tables)
        state.has_changed()
        block.note = "other"
        assert surveys.taken(block).key is None
        state.put_back()
        block.seen.append(1)
        survey_of_before = surveys._known
        assert surveys.taken(block) is None
        surveys._known = survey_of_before
        block.seen.pop()

    walk()
    gc.collect()
    before = [sys.getrefcount(one) for one in watched]
    for _ in range(20):
        walk()
    gc.collect()
    assert [sys.getrefcount(one) for one in watched] == before


def test_two_threads_call_one_region() -> None:
    model, _, _ = with_survey()
    plain = sac.remove(copy.deepcopy(model))
    wanted = [run(plain, number) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert all(map(torch.equal, pool.map(partial(run, model), range(4)), wanted))


def run(model: nn.Module, number: int) -> Tensor:
    x = torch.full((2, 4), 0.1 * number, requires_grad=True)
    (found,) = torch.autograd.grad(model(x).square().sum(), x)
    return found


def test_the_root_is_part_of_a_survey() -> None:
    model, _, surveys = with_survey()
    assert surveys.taken(Block()) is None
    assert surveys.taken(copy.copy(model[0])) is None


class File(NamedTuple):
    """A model whose code names another Python module, `file`, in `names`."""

    model: Any
    surveys: Surveys
    names: dict[str, Any]


def file_of(limit: float) -> Any:
    file: Any = types.ModuleType("a_file")
    file.LIMIT, file.__file__ = limit, "/elsewhere/a_file.py"
    return file


@pytest.fixture
def far() -> File:
    names: dict[str, Any] = {"__name__": "elsewhere", "file": file_of(1.0)}
    exec("def forward(self, x):\n    return self.fc(x) * file.LIMIT\n", names)
    block = type("Far", (nn.Module,), {"forward": names["forward"], "__module__": "elsewhere"})()
    block.fc = nn.Linear(4, 4)
    model, _, surveys = with_survey(block)
    assert is_made(surveys)
    return File(model, surveys, names)


def test_a_file_that_is_gone_is_not_read(far: File) -> None:
    gone = weakref.ref(far.names["file"])
    far.names["file"] = file_of(2.0)
    gc.collect()
    assert gone() is None
    assert far.surveys.taken(far.model[0]) is None


def test_globals_that_were_found_again_make_another_survey(far: File) -> None:
    first, far.names["file"] = far.names["file"], file_of(2.0)
    assert far.surveys.taken(far.model[0]) is not None
    cls = type(far.model[0])
    for forward in (patched_forward, far.names["forward"]):
        cls.forward = forward
        python_state.module_class(cls).globals.of(cls)
    assert far.surveys.taken(far.model[0]) is None
    assert first.LIMIT == 1.0


def test_other_bases_of_a_class_make_another_survey() -> None:
    class Middle(Part):
        pass

    class Last(Part):
        pass

    block = Block()
    block.first = Last()
    model, _, surveys = with_survey(block)
    assert is_made(surveys)
    Last.__bases__ = (Middle,)
    assert surveys.taken(model[0]) is None


def test_copies_have_surveys_of_their_own() -> None:
    model, _, surveys = with_survey()
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        (installed,) = regions_of(made)
        own = installed.region.evidence.surveys
        assert own is not surveys
        assert not is_made(own)
        for _ in range(3):
            step(made)
        assert is_made(own)
    assert is_made(surveys)


def test_a_survey_keeps_nothing_alive_that_may_hold_memory() -> None:
    model, _, _ = with_survey()
    block = model[0]
    gone = [
        *map(weakref.ref, (block.seen[0], block.offset, block.config, block.second.fc, block.count)),
        weakref.ref(block.second.fc.weight),
    ]
    gc.collect()
    gc.disable()
    try:
        block.seen = block.also = block.config = block.count = None
        block.offset = torch.zeros(4)
        block.second.fc.__dict__.pop("forward")  # sac's, which is a cycle
        block.second.fc = nn.Identity()
        assert [one() for one in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_a_model_is_freed_with_its_survey() -> None:
    class Local(Part):
        pass

    block = Block()
    block.first = Local()
    model, region, surveys = with_survey(block)
    assert is_made(surveys)
    gone = [*map(weakref.ref, (model, block, region, Local))]
    del model, block, region, surveys, Local
    gc.collect()
    gc.collect()
    assert [one() for one in gone] == [None] * len(gone)


def test_a_survey_of_a_namespace_that_holds_the_model_is_freed() -> None:
    names: dict[str, Any] = {"__name__": "elsewhere", "nn": nn}
    exec(
        "class Far(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return turned(self.fc(x))\n"
        "def turned(x):\n"
        "    return -x\n",
        names,
    )
    names["model"], *others = with_survey(names["Far"]())
    assert is_made(others[1])
    gone = weakref.ref(names["model"])
    del others, names
    gc.collect()
    gc.collect()
    assert gone() is None


def test_a_call_keeps_its_record_when_later_calls_find_another() -> None:
    def losses(model: Any) -> list[Tensor]:
        x = torch.ones(2, 4, requires_grad=True)
        for _ in range(3):
            model(x).sum().backward()
        first = model(x).square().sum()
        model[0].offset = torch.full((4,), 2.0)
        model[0].seen = [torch.zeros(1), 5]
        second = model(x).square().sum()
        model[0].first.scale = 4.0
        third = model(x).square().sum()
        for loss in (first, third, second):
            loss.backward()
        return [x.grad, *(one.grad for one in model.parameters())]  # type: ignore[list-item]

    torch.manual_seed(0)
    plain = nn.Sequential(Block())
    with_sac = sac.apply(copy.deepcopy(plain), {"mode": "full", "blocks": ["*"]})
    assert all(map(torch.equal, losses(with_sac), losses(plain)))


def test_without_the_library_there_are_no_surveys(monkeypatch: pytest.MonkeyPatch) -> None:
    from sac.recompute import regions

    for module in (tables, fingerprint, holders, python_state, survey, regions):
        monkeypatch.setattr(module, "library", lambda: None)
    surveys = with_survey()[2]
    assert not is_made(surveys)
    assert not surveys.is_wanted(None)


# -- With versions of tables and classes, and without: see Note [Versions]


class Spare:
    """An object of which a random change may make an entry."""

    def __init__(self) -> None:
        self.width = 4


def spare_values() -> list[Any]:
    values = [0.5, 0.25, "plain", None, True, 1, [1], [torch.ones(2), 1], {"a": [1]}, (4, 4), (4, [1]), {1}, set()]
    values += [torch.ones(4), nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True) * 1, nn.Linear(4, 4)]
    values += [Settings(), Careful(), Choices(), Spare(), Spare, Part, object(), halved, torch.tanh, lambda x: x * 2]
    return [*values, counting(halved), OrderedDict(), OrderedDict(a=1), {}, iter([1]), torch.Generator()]


def restoring_dict(table: dict[Any, Any]) -> Callable[[], None]:
    before = {**table}

    def restore() -> None:
        table.clear()
        table.update(before)

    return restore


def change_dict(table: dict[Any, Any], values: list[Any], rng: random.Random) -> Callable[[], None]:
    restore, names = restoring_dict(table), [*table]
    kind, name = rng.randrange(6), rng.choice(names) if names else "first"
    if kind == 0:
        table[f"more{rng.randrange(3)}"] = rng.choice(values)
    elif kind == 1:
        table.pop(name, None)
    elif kind == 2 and names:
        table[name] = table.pop(name)
    elif kind == 3:
        restore()  # the same again
    elif kind == 4 and names:
        table[name] = copy.copy(table[name]) if type(table[name]) in (list, dict, float, Settings) else table[name]
    else:
        table[name] = rng.choice(values)
    return restore


def change_list(one: list[Any], values: list[Any], rng: random.Random) -> Callable[[], None]:
    before = [*one]
    if rng.random() < 0.4 or not one:
        one.append(rng.choice(values))
    elif rng.random() < 0.3:
        one.pop()
    else:
        one[rng.randrange(len(one))] = rng.choice(values)
    return lambda: one.__setitem__(slice(None), before)


def change_class(cls: Any, values: list[Any], rng: random.Random) -> Callable[[], None]:
    own = [name for name in vars(cls) if name[:2] != "__"]
    name = rng.choice([*own, "forward", "_buffers", "__getattribute__", "more"])
    usual = {"forward": patched_forward, "_buffers": property(lambda self: {}), "__getattribute__": reading}
    had, before = name in vars(cls), vars(cls).get(name)
    setattr(cls, name, usual.get(name) or rng.choice(values))
    return lambda: setattr(cls, name, before) if had else delattr(cls, name)


def reading(self: Any, name: str) -> Any:
    return object.__getattribute__(self, name)


def change_function(function: Any, values: list[Any], rng: random.Random) -> Callable[[], None]:
    name, value = rng.choice(
        [
            ("__defaults__", (0.25,)),
            ("__defaults__", ([1],)),
            ("__kwdefaults__", {"by": 1.0}),
            ("__module__", "torch"),
            ("__name__", "other"),
            ("note", [1]),
        ]
    )
    had, before = name != "note" or name in vars(function), getattr(function, name, None)
    setattr(function, name, value)
    return lambda: setattr(function, name, before) if had else vars(function).pop(name)


def change_attribute(one: Any, name: str, value: Any) -> Callable[[], None]:
    before = getattr(one, name)
    setattr(one, name, value)
    return lambda: setattr(one, name, before)


def change_global(name: str, value: Any) -> Callable[[], None]:
    had, before = name in globals(), globals().get(name)
    globals()[name] = value
    return lambda: globals().update({name: before}) if had else globals().__delitem__(name)


def random_change(block: Any, values: list[Any], rng: random.Random) -> Callable[[], None]:
    """Change something of a block, or of what it reaches; return what undoes it."""
    second, cell = block.second, closure_of(Part.scaled)[0]
    dicts = [vars(block), vars(block.first), vars(second), vars(second.fc), vars(block.norm), vars(block.config)]
    dicts += [block.table, block.choices, vars(block.choices), LIMITS, block._modules, second._modules]
    dicts += [block._buffers, second.fc._parameters, block._forward_hooks, second._backward_hooks, block.none_yet]
    dicts += [block.careful.__dict__]
    return rng.choice(
        [
            *[lambda: change_dict(rng.choice(dicts), values, rng)] * 8,
            lambda: change_list(rng.choice([block.seen, block.table["a"], block.pairs[1], Part.memory]), values, rng),
            lambda: change_class(rng.choice([Part, Block, Settings, Choices, nn.LayerNorm]), values, rng),
            lambda: change_function(rng.choice([halved, Part.scaled, patched_forward]), values, rng),
            lambda: change_global(rng.choice(["FACTOR", "LIMITS", "halved", "a_new_name"]), rng.choice(values)),
            lambda: change_attribute(cell, "cell_contents", rng.choice(values)),
            lambda: change_attribute(rng.choice([block.first, second]), "__class__", Other),
            lambda: change_attribute(block.config, "__class__", Spare),
            lambda: change_attribute(Careful, "other", "x"),
            lambda: change_attribute(block.config, "__dict__", {**vars(block.config)}),
            lambda: change_attribute(second, "__dict__", {**vars(second)}),
            lambda: change_attribute(block, "offset", torch.zeros(4).add_(torch.ones(4, requires_grad=True))),
            lambda: change_attribute(second.forward.__self__, "before", patched_forward),
            lambda: change_attribute(rng.choice([block, second.fc]), "training", False),
        ]
    )()


def found_by(known: Any, root: Any, native: Any, *, with_versions: bool) -> Any:
    """What the pass of a survey finds, by identity, and its record."""
    native.survey_versions(with_versions)
    found = known.survey.take(root)
    if found is None:
        return None, None
    is_same_function, reached, *others = found
    return (is_same_function, recorded_by(known, reached), _by_identity(others)), reached


def recorded_by(known: Any, reached: Any) -> list[Any]:
    rows = sorted({row for _, rows, _ in known.parts for row in rows})
    return [(id(table), names, [*map(id, values)]) for table, names, values in map(reached.table, rows)]


@pytest.mark.parametrize("seed", range(12))
def test_random_changes_are_found_as_without_versions(seed: int, versions: Callable[[bool], Any]) -> None:
    rng, native = random.Random(seed), library()
    block: Any = Block()
    block.none_yet = {}
    _model, _, surveys = with_survey(block)
    known, values = surveys._known, spare_values()
    assert known is not None
    undo: list[Callable[[], None]] = []
    earlier: list[tuple[Any, Any]] = []  # records, and what they were
    outcomes = {True: 0, False: 0}
    try:
        for _ in range(120):
            for _ in range(rng.choice([0, 1, 1, 2])):
                if undo and (len(undo) > 1 or rng.random() < 0.5):
                    undo.pop()()
                else:
                    with contextlib.suppress(AttributeError, KeyError, TypeError):  # an earlier change is in the way
                        undo.append(random_change(block, values, rng))
            orders = rng.choice([(True, False), (False, True), (True, True, False)])
            answers = [found_by(known, block, native, with_versions=one) for one in orders]
            assert all(one == answers[0][0] for one, _ in answers)
            outcomes[answers[0][0] is not None] += 1
            for reached, was in earlier:
                holds = []
                for one in (True, False, True):
                    native.survey_versions(one)
                    holds.append(reached.holds())
                assert len({*holds}) == 1
                assert recorded_by(known, reached) == was
            native.survey_versions(True)
            again = surveys.taken(block)
            surveys._known = known
            if again is not None:
                wanted, state = by_python(block), ReachableState(again.owners, None, found=again.tables)
                assert contents(state) == contents(wanted.state)
                assert again.owners == wanted.owners
                assert of_modules(again.tables) == of_modules(wanted.tables)
            earlier += [(reached, one[1]) for one, reached in answers if one is not None and rng.random() < 0.3]
            del earlier[:-3]
    finally:
        while undo:
            undo.pop()()
    assert min(outcomes.values()) > 3
    assert found_by(known, block, native, with_versions=True)[0] is not None


def test_a_table_with_the_entries_of_before_has_another_version(versions: Callable[[bool], Any]) -> None:
    model, _, surveys = with_survey()
    block = model[0]
    held = vars(block.config)
    for change in (lambda: held.update(width=5), lambda: held.update(width=4), lambda: held.update(names=["x", 1])):
        change()
        answers = [found_by(surveys._known, block, library(), with_versions=one)[0] for one in (True, False, True)]
        assert answers[0] is not None
        assert answers[0] == answers[1] == answers[2]


class CallsWhenFreed:
    """Calls ``then`` when it is freed, if that is set."""

    then: ClassVar[Callable[[], object] | None] = None

    def __del__(self) -> None:
        call, CallsWhenFreed.then = CallsWhenFreed.then, None
        if call is not None:
            call()


class WithItsOwnDict:
    def __init__(self) -> None:
        self.__dict__ = {"seen": [torch.ones(1)]}  # not the kind of dict that objects get from Python


class ReadsHolder(nn.Module):
    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.lin, self.holder = nn.Linear(8, 8), holder

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).sin() * self.holder.seen[0]


def with_a_list() -> nn.Module:
    module = nn.Module()
    module.seen = [torch.ones(1)]
    return module


@pytest.mark.parametrize("new_holder", [WithItsOwnDict, with_a_list], ids=["object", "module"])
def test_a_region_runs_while_an_attribute_is_exchanged(new_holder: Callable[[], Any]) -> None:
    """The old value is freed in the middle of the store, and its finalizer runs forward and backward."""

    def put(holder: Any, value: Any) -> None:  # in a function of its own, which the interpreter makes quicker
        holder.seen = value

    def gradients(is_ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        holder = new_holder()
        model: Any = nn.Sequential(ReadsHolder(holder))
        if is_ours:
            sac.apply(model, {"mode": "full", "blocks": ["*"]})
        found = []

        def step() -> None:
            x = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()
            model(x).sum().backward()
            found.append(x.grad)

        for number in range(40):
            put(holder, [torch.full((1,), float(number))])
        for _ in range(20):
            step()
        for number in range(5):
            put(holder, [torch.full((1,), number + 7.0), CallsWhenFreed()])
            for _ in range(4):
                step()
            CallsWhenFreed.then = step  # called by the next store, or by `del`
        holder.seen = None
        return found

    plain, ours = gradients(False), gradients(True)
    assert len(plain) == len(ours) > 40
    assert all(map(torch.equal, plain, ours))
