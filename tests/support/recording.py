"""Independent measurement: which storages were made, which still live, and which ops ran. Nothing here asks sac."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)


class Recorder(TorchDispatchMode):
    """While active, notes every op and, by weak reference, every storage that an op made.

    It can be entered any number of times; `live_bytes` may be asked at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()
        self.product_flops = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What Python's numbers are made into comes to the dispatcher first as the argument of this op.
        is_new = func is torch.ops.aten.lift_fresh.default
        given = set() if is_new else {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        self.ops[_name(func)] += 1
        if func.overloadpacket in PRODUCTS:
            self.product_flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=result)
        for storage in _storages(result):
            if (key := storage._cdata) not in given and key not in self._made:
                self._made[key] = StorageWeakRef(storage), storage.nbytes()
        return result

    def live_bytes(self, besides: Any = ()) -> int:
        """Bytes of the storages made while active that still live, less those under the tensors of `besides`."""
        left_out = {storage._cdata for storage in _storages(besides)}
        return sum(size for key, (ref, size) in self._made.items() if key not in left_out and not ref.expired())

    def count(self, *fragments: str) -> int:
        """How many ops ran whose name holds one of the fragments."""
        return sum(count for name, count in self.ops.items() if any(fragment in name for fragment in fragments))


# The accessors of a sparse tensor's dense parts.
SPARSE_PARTS = {
    torch.sparse_coo: (Tensor._indices, Tensor._values),
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices, Tensor.values),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices, Tensor.values),
}


def _storages(values: Any) -> list[torch.UntypedStorage]:
    """The storages of the tensors in a structure, or of a sparse tensor's parts.

    A StorageWeakRef keeps an address from being given to another while we remember it.
    """
    found: list[torch.UntypedStorage] = []
    left = [values]
    for value in left:
        if isinstance(value, Tensor):
            parts = SPARSE_PARTS.get(value.layout)
            found += [part(value).untyped_storage() for part in parts] if parts else [value.untyped_storage()]
        elif type(value) in (tuple, list):  # by far the most; `tree_leaves` is slow
            left += value
        elif type(value) is dict:
            left += value.values()
        elif type(value) not in (int, float, bool, str, type(None)):
            left += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


_name = functools.cache(str)  # of an op


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Memory must be free without the cycle collector, so keep it from helping."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept_bytes(model: torch.nn.Module, inputs: tuple[Tensor, ...], warm: int = 1) -> int:
    """Bytes that a forward of the model leaves for backward, its outputs not counted.

    `warm` whole steps run first, so that what is learned in the first step is known.
    """
    for _ in range(warm):
        step(model, inputs)
    with without_collector():
        recorder = Recorder()
        with recorder:
            outputs = model(*inputs)
        kept = recorder.live_bytes(besides=(outputs, list(model.buffers())))
    return kept


def step(model: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One forward and backward; gradients are dropped."""
    outputs = [x for x in tree_leaves(model(*inputs)) if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    for x in [*model.parameters(), *inputs]:
        x.grad = None


def backward_ops(model: torch.nn.Module, inputs: tuple[Tensor, ...], warm: int = 1) -> Recorder:
    """What a backward of the model runs, recomputation included."""
    for _ in range(warm):
        step(model, inputs)
    outputs = [x for x in tree_leaves(model(*inputs)) if isinstance(x, Tensor) and x.requires_grad]
    recorder = Recorder()
    with recorder:
        torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    return recorder
