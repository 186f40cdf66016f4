"""What a forward may change of parameters and buffers: the library's record says what Python's records say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sac import tensors
from sac.region import marks, module_state
from sac.region.module_state import MOST_COPIED_BYTES_UNRECORDED, ModuleState
from sac.tensors import STORAGE_WATCHERS
from tests.support.native_engine import needs_library

pytestmark = needs_library
SWITCHED = (marks, module_state, tensors)
LARGE = 1 << 15  # elements: more bytes than are ever copied


class Block(nn.Module):
    """A parameter, a frozen one, a small buffer, one of middle size, a large one, and one that is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("small", torch.zeros(3))
        self.register_buffer("middle", torch.zeros(MOST_COPIED_BYTES_UNRECORDED))
        self.register_buffer("large", torch.zeros(LARGE))
        self.register_buffer("part", torch.arange(6.0)[2:4])
        self.register_buffer("none", None)


def write(tensor: Any) -> None:
    with torch.no_grad():
        tensor.add_(1)


def give_gradient(block: Any) -> None:
    block.weight.grad = torch.ones(4)


def give_data(block: Any) -> None:
    block.weight.data = torch.zeros(4)


def write_unseen(block: Any) -> None:
    block.small.numpy()[1] = 7


def move(block: Any) -> None:
    block.small.data = torch.ones(3)


def resize(block: Any) -> None:
    block.middle.untyped_storage().resize_(1 << 13)


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda block: None,
    "a parameter": lambda block: write(block.weight),
    "a frozen parameter": lambda block: write(block.frozen),
    "its data": give_data,
    "its gradient": give_gradient,
    "a small buffer": lambda block: write(block.small),
    "a buffer of middle size": lambda block: write(block.middle),
    "a large buffer": lambda block: write(block.large),
    "a view": lambda block: write(block.part),
    "a buffer, through NumPy": write_unseen,
    "a buffer's data": move,
    "a buffer's size": resize,
    "another tensor": lambda block: write(block.other),
    "a parameter from elsewhere": lambda block: write(block.elsewhere[0]),
}


def answers(state: ModuleState, block: Any, *, is_over: bool) -> dict[str, Any]:
    """All that others ask of the state of a region's modules."""
    names = {id(one): name for name, one in [*block.named_parameters(), *block.named_buffers(), ("other", block.other)]}
    addresses = {one.untyped_storage()._cdata: name for name, one in block.named_buffers()}
    addresses[block.other.untyped_storage()._cdata] = "other"
    copies = state.copies()
    found: dict[str, Any] = {
        "copies": None if copies is None else {addresses.get(one): len(copy) for one, copy in copies.items()},
        "written unseen": {addresses.get(one) for one in state.written_unseen()},
        "parameter": str(state.changed_parameter("block")),
        "tensor": str(state.changed_tensor("block")) if is_over else None,
    }
    if is_over:
        found["written"] = state.were_written
        found["unseen"] = str(state.unseen_write("block"))
        found["watched"] = [names[id(one)] for one in state.watched()]
        found["without copy"] = {addresses.get(one) for one in state.watched_without_copy()}
        found["exchanged"] = [(names[id(one)], name) for one, name, _ in state._exchanged]
    return found


def story(recorded: bool, inside: str, between: str) -> list[Any]:
    """What is said during a forward in which one thing changes, when it is over, and after another has changed."""
    block: Any = Block()
    block.other, block.elsewhere = torch.zeros(5), [nn.Parameter(torch.ones(2))]
    found = []
    state = ModuleState(tuple(block.modules()), [block.other, block.small], block.elsewhere, recorded=recorded)
    CHANGES[inside](block)
    found.append(answers(state, block, is_over=False))
    state.close()
    found.append(state.were_written)
    CHANGES[between](block)
    found.append(answers(state, block, is_over=True))
    state.note_parameters()
    found.append(answers(state, block, is_over=True))
    state.drop()
    return found


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("between", CHANGES)
@pytest.mark.parametrize("inside", CHANGES)
def test_both_records_say_the_same(inside: str, between: str, recorded: bool, switch: Callable[[bool], None]) -> None:
    switch(True)
    native = story(recorded, inside, between)
    switch(False)
    assert native == story(recorded, inside, between)


def test_python_takes_over_what_was_recorded_at_the_start(switch: Callable[[bool], None]) -> None:
    switch(True)
    block: Any = Block()
    state = ModuleState(tuple(block.modules()))
    assert state._at_start is not None
    write(block.small)
    write(block.weight)
    state.close()
    assert state._at_start is None
    copy = state.at_start(block.small.untyped_storage()._cdata)
    assert copy is not None
    assert torch.equal(torch.tensor(copy, dtype=torch.uint8), torch.zeros(12, dtype=torch.uint8))
    assert [one is block.weight for one in state._written or ()] == [True]


def test_a_change_in_place_that_is_undone_is_still_a_write(switch: Callable[[bool], None]) -> None:
    switch(True)
    block = Block()
    state = ModuleState(tuple(block.modules()))
    with torch.no_grad():
        block.small.add_(1).sub_(1)
    state.close()
    assert state.were_written


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(lambda: torch.zeros(2, device="meta"), id="without data"),
        pytest.param(lambda: torch.zeros(0), id="empty"),
        pytest.param(lambda: torch.zeros(2).as_subclass(type("Sub", (torch.Tensor,), {})), id="subclass"),
    ],
)
def test_unusual_tensors_are_left_to_python(tensor: Callable[[], Any], switch: Callable[[bool], None]) -> None:
    switch(True)
    block = Block()
    block.register_buffer("unusual", tensor())
    assert ModuleState(tuple(block.modules()))._at_start is None


def test_a_plan_that_counts_storages_sees_each_copy(switch: Callable[[bool], None]) -> None:
    switch(True)
    made: list[Any] = []
    STORAGE_WATCHERS.append(made.append)
    try:
        state = ModuleState(tuple(Block().modules()))
    finally:
        STORAGE_WATCHERS.remove(made.append)
    assert state._at_start is None
    assert len(made) == 3  # small, middle, part


def test_the_record_holds_nothing_once_it_is_dropped(switch: Callable[[bool], None]) -> None:
    switch(True)
    block = Block()
    state = ModuleState(tuple(block.modules()))
    state.close()
    state.drop()
    assert (state._at_start, state._held, state._watched) == (None, [], [])
    assert module_state._NO_TABLES.tables == []
