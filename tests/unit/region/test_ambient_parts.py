"""Parts of the ambient state: set as in the forward, and taken back in reverse order, whatever raises."""

from __future__ import annotations

from typing import Any

import pytest
from sac.region.ambient import Part, Snapshot, provider_parts

from sac.engine.undo import UndoStack


class Value:
    """A value that notes what it is set to."""

    def __init__(self, name: str, log: list[str], breaks_at: Any = None) -> None:
        self.name, self.log, self.breaks_at, self.now = name, log, breaks_at, 0

    def snapshot(self) -> int:
        return self.now

    def restore(self, state: int) -> None:
        self.log.append(f"{self.name}={state}")
        self.now = state
        if state == self.breaks_at:
            raise KeyError(self.name)

    @property
    def part(self) -> Part:
        return Part(self.snapshot, self.restore, self.restore)


def recomputed(snapshot: Snapshot) -> None:
    with UndoStack() as stack:
        snapshot.enter_on(stack)


def test_parts_are_set_in_order_and_taken_back_in_reverse_order() -> None:
    log: list[str] = []
    values = [Value("a", log), Value("b", log), Value("c", log)]
    snapshot = Snapshot(value.part for value in values)
    values[0].now = values[2].now = 7
    recomputed(snapshot)
    assert log == ["a=0", "c=0", "c=7", "a=7"]  # b has not changed
    assert [value.now for value in values] == [7, 0, 7]


def test_a_part_that_breaks_is_taken_back_too() -> None:
    log: list[str] = []
    values = [Value("a", log), Value("b", log, breaks_at=0), Value("c", log)]
    snapshot = Snapshot(value.part for value in values)
    for value in values:
        value.now = 7
    with pytest.raises(KeyError, match="b"):
        recomputed(snapshot)
    assert log == ["a=0", "b=0", "b=7", "a=7"]


def test_states_of_providers_are_not_compared() -> None:
    log: list[str] = []
    value = Value("a", log)
    recomputed(Snapshot(provider_parts([value])))
    assert log == ["a=0", "a=0"]
