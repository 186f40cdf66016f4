"""The library reads tensors and storages as Python does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sac import tensors
from sac.native.load import library
from sac.region import module_state
from sac.region.module_state import other_bytes
from sac.tensors import copy_of, storages_of

NATIVE: Any = library()
pytestmark = pytest.mark.skipif(NATIVE is None, reason="the library is off")
SWITCHED = (tensors, module_state)  # see the fixture `switch`


class Subclass(Tensor):
    pass


def inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def written() -> Tensor:
    return torch.zeros(4).add_(1).mul_(2)


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(3)


USUAL: tuple[Callable[[], Any], ...] = (
    *(inference, written, lambda: torch.ones(5)[1:3], lambda: torch.empty(0)),
    *(lambda: nn.Parameter(torch.ones(2)), lambda: nn.Parameter(torch.ones(2), requires_grad=False)),
    *(lambda: torch.ones(2, requires_grad=True) * 2, lambda: torch.empty(3, device="meta"), lambda: None),
)
UNUSUAL: tuple[Callable[[], Any], ...] = (lambda: torch.ones(3).as_subclass(Subclass), fake)
WITHOUT_STORAGE: tuple[Callable[[], Any], ...] = (lambda: torch.eye(3).to_sparse(),)


@pytest.mark.parametrize("seed", range(20))
def test_states_and_storages_are_the_same(seed: int, switch: Callable[[bool], None]) -> None:
    chosen = random.Random(seed)
    makers = [*USUAL, *UNUSUAL, *WITHOUT_STORAGE] if seed % 2 else [*USUAL]
    values = [make() for make in chosen.choices(makers, k=6)]
    found: list[Any] = []
    for is_on in (True, False):
        switch(is_on)
        held, needs = module_state._states_of(values)
        found.append(([*map(id, held)], needs, storages_of(held)))
    assert found[0] == found[1]


def test_usual_tensors_are_read_by_the_library() -> None:
    values = [make() for make in USUAL]
    assert NATIVE.tensor_states(values) is not None
    assert NATIVE.storages_of([one for one in values if one is not None]) is not None
    assert all(NATIVE.tensor_states([make()]) is None for make in UNUSUAL)
    assert all(NATIVE.storages_of([make()]) is None for make in (*UNUSUAL, *WITHOUT_STORAGE))


@pytest.mark.parametrize("size", [0, 1, 512, 1 << 16, (1 << 16) + 4])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_copies_and_comparisons_are_the_same(size: int, device: str, switch: Callable[[bool], None]) -> None:
    storage = torch.arange(size, dtype=torch.uint8, device=device).untyped_storage()
    found: list[Any] = []
    for is_on in (True, False):
        switch(is_on)
        copy = copy_of(storage)
        assert type(copy) is torch.UntypedStorage
        assert (copy.nbytes(), copy.device, copy.resizable()) == (size, storage.device, True)
        assert size == 0 or device == "meta" or copy.data_ptr() != storage.data_ptr()
        found.append([other_bytes(copy, storage)])
        if size and device == "cpu":
            found[-1].append(bytes(copy) == bytes(storage))
            copy[size - 1] = 255 - copy[size - 1]
            found[-1].append(other_bytes(copy, storage))
        copy.resize_(size + 8)
        found[-1].append(other_bytes(copy, storage))
    assert found[0] == found[1]


def test_a_copy_holds_its_memory_alone() -> None:
    storage = torch.arange(8.0).untyped_storage()
    copy = NATIVE.copy_of_storage(storage)
    torch.empty(0).set_(storage).zero_()  # type: ignore[call-overload]
    assert torch.equal(torch.empty(0).set_(copy), torch.arange(8.0))  # type: ignore[call-overload]
    assert NATIVE.copy_of_storage(torch.empty(2, device="meta").untyped_storage()) is None
    assert NATIVE.copy_of_storage("no storage") is None


def test_a_copy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(tensors, "STORAGE_WATCHERS", [made.append])
    copy = copy_of(torch.ones(3).untyped_storage())
    assert [one._cdata for one in made] == [copy._cdata]
