"""The library reads tensors and storages as Python does."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sac import tensors
from sac.native.load import library
from sac.recompute.recorder import _sizes_of
from sac.region import module_state
from sac.region.module_state import other_bytes
from sac.region.native_frame import native_types
from sac.stores.saved_tensor import _fills_storage
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


# -- Replay


def test_checksums_are_those_of_zlib() -> None:
    chosen = random.Random(0)
    for size in (*range(300), 511, 512, 513, 1024, 4095, 65521, 65536):
        data = chosen.randbytes(size)
        assert NATIVE.crc32(data) == zlib.crc32(data), f"of {size} bytes"


def test_each_bit_counts_in_a_checksum() -> None:
    data = bytearray(random.Random(1).randbytes(160))
    before = NATIVE.crc32(bytes(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert NATIVE.crc32(bytes(data)) != before, f"bit {bit}"
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("seed", range(30))
def test_kept_values_are_looked_at_as_in_python(seed: int) -> None:
    chosen = random.Random(seed)
    handle_type = native_types(NATIVE).handle
    handles = NATIVE.Handles()
    memory = [torch.randn(chosen.randrange(1, 9)) for _ in range(4)]
    kept = {value: chosen.choice(memory)[chosen.randrange(2) :] for value in chosen.sample(range(50), 5)}
    if seed % 5 == 4:
        kept[60] = chosen.choice([UNUSUAL[0], UNUSUAL[1], WITHOUT_STORAGE[0]])()
    held = {value: tensor for value, tensor in kept.items() if chosen.random() < 0.5}
    hooks = NATIVE.FrameHooks(handles, handle_type, None, None)
    loose = []
    for _ in range(4):
        handle = hooks.pack(chosen.choice([*kept.values()] if seed % 3 else [*kept.values(), torch.ones(2)]))
        if type(handle.value) is not Tensor:
            handle.keep(hooks[handle.index][0])
        handle.storage = tensors.storage_address(handle.value)
        loose.append(handle)
    found = NATIVE.look_at_kept(kept, held, loose)
    expected = _sizes_of(kept, loose, held)
    if {Tensor} != {*map(type, kept.values())} or any(one.layout is not torch.strided for one in kept.values()):
        assert found is None, "an unusual tensor"
        return
    addresses = {tensors.storage_address(tensor) for tensor in held.values()}
    if found is None:
        assert expected is None, "a handle on another storage"
        return
    assert found[0] == expected, "figures of another call would be taken"
    alone = [one for one in loose if one.storage not in addresses]
    filled = {one.storage for one in alone if _fills_storage(one.value)}
    assert found[1] == [one for one in alone if one.storage not in filled], "others would be copied"


def autograd_here() -> tuple[Any, ...]:
    """How ops run here."""
    weight = torch.ones(2, 2, requires_grad=True)
    product = weight @ weight
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), product.requires_grad, product.dtype


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_a_replay_leaves_autograd_and_autocast_as_they_were(grad: bool, autocast: bool) -> None:
    with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        before = autograd_here()
        found: list[Any] = []
        with contextlib.suppress(KeyError), NATIVE.Below(), NATIVE.Below():
            found += autograd_here()
            raise KeyError
        assert found == [True, False, False, torch.float32], "a replay has grad off, autograd or autocast"
        assert autograd_here() == before, "something is left behind"
