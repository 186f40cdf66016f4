"""Live bytes of a step, op by op, from the storages of tensors: without an allocator or data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from sac.engine.tracker import BareMode
from sac.memory_timeline import CUDA_BLOCK
from sac.planner.cost import Device, entry_of_call, seconds
from sac.tensors import tensor_parts, tensors_of
from sac.torch_private import FakeTensor, FakeTensorMode, fake_mode_is_active, in_kernel

# Note [What the ledger counts]
#
# A storage counts from the end of the op that made it until it is freed, with its own bytes, rounded up to the
# allocator's block size if there is one. An op on tensors that wrap others, such as DTensors, counts as the ops into
# which it is divided: each works on one rank's share, and there may be collectives and copies between them. Ops by
# which DTensor only finds the layout of a result, in a fake mode of its own, do not count. Written arguments and
# results located in known storages are not new. A resized storage, as in FSDP2, counts with its new size. The memory
# that a kernel allocates and frees while it runs is not a tensor of any op, and does not count; nor do the states of
# random generators that regions hold, of some KB on a CPU.

# Note [Gathered parameters]
#
# FSDP2 gathers parameters into uninitialised memory, which it allocates without any tensor that has no data. Such a
# parameter would have data, and so would all results computed from it and real inputs (token numbers): the embedding
# and the products of the first block would run for real. So where a plan shards the model, uninitialised
# floating-point memory is made without data.

_EMPTY = torch.ops.aten.empty.memory_format
_GROUPED = torch.ops.aten._grouped_mm.default
_PLACED = (torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset)


class Ledger(BareMode):
    """Counts the bytes of storages while it is active; see Note [What the ledger counts].

    ``device``: that whose ops are planned. ``gathers``: the mode in which uninitialised memory is made without data,
    see Note [Gathered parameters]. ``seconds``: the predicted time of the ops so far.
    """

    def __init__(self, device: Device, gathers: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.gathers = device, gathers
        self.block_bytes = 1 if device.name == "cpu" else CUDA_BLOCK
        self.live = self.peak = 0  # the peak since the last reset
        self.seconds = 0.0
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __enter__(self) -> Ledger:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._resize = resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:  # FSDP2 so allocates and frees whole parameters
            out = resize(storage, size)
            if (known := self.storages.get(storage._cdata)) is not None:
                self.storages[storage._cdata] = known[0], self._size(storage)
                self._rise(self._size(storage) - known[1])
            return out

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def read(self) -> tuple[int, int]:
        """Return the peak since this was called last, and the live bytes."""
        peak, self.peak = self.peak, self.live
        return peak, self.live

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the storages of tensors if they are not counted yet."""
        parts = (part for tensor in tensors for part in tensor_parts(tensor) if part.layout is torch.strided)
        for storage in (part.untyped_storage() for part in parts):
            key = storage._cdata
            if key not in self.storages:
                self.storages[key] = weakref.ref(storage, partial(self._freed, key)), self._size(storage)
                self._rise(self._size(storage))

    def _size(self, storage: torch.UntypedStorage) -> int:
        return -(-storage.nbytes() // self.block_bytes) * self.block_bytes

    def _rise(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def _freed(self, key: int, _: Any) -> None:
        self.live -= self.storages.pop(key)[1]

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        if func in _PLACED and type(args[0]) is FakeTensor:
            with in_kernel(args[0].fake_mode):
                return func(*args)
        dtype: torch.dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if func is _EMPTY and self.gathers is not None and dtype.is_floating_point:
            with self.gathers:
                return func(*args, **kwargs)
        if func is _GROUPED and isinstance(args[0], FakeTensor):  # torch 2.13 knows the shape for bfloat16 only
            left, right, *rest = args
            out = func(left.bfloat16(), right.bfloat16(), *rest, **{**kwargs, "out_dtype": None})
            return out.new_empty(out.shape, dtype=kwargs.get("out_dtype") or left.dtype)
        return func(*args, **kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one is not FakeTensor and hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # its ops on the tensors inside come here
        if func.namespace == "prim" or fake_mode_is_active():
            return func(*args, **(kwargs or {}))
        out = self.run(func, args, kwargs or {})
        if not func.is_view:
            self.seconds += seconds(entry_of_call(func, args, kwargs or {}, out), self.device)
        self.note(tensors_of(out))
        if torch.Tag.nondeterministic_seeded in func.tags and any(type(one) is FakeTensor for one in tensors_of(out)):
            torch.empty(1).uniform_()  # nothing is drawn without data; advance the generator's state visibly
        return out
