"""Collectives that hold no memory after they have ended, so that a measured peak does not depend on the clock.

gloo's threads hold the tensors of a collective a little after the wait for it has ended, and a peak may count them, or
not. Inside `prompt_collectives()`, those of tensor parallelism return when the thread has dropped its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def prompt_collectives() -> Iterator[None]:
    """Replace the functional collectives of tensor parallelism; they end at once, and waits for them do nothing."""
    with torch.library._scoped_library("_c10d_functional", "IMPL") as kernels:
        kernels.impl("all_reduce", _all_reduce, "CPU")
        kernels.impl("all_gather_into_tensor", _all_gather, "CPU")
        kernels.impl("reduce_scatter_tensor", _reduce_scatter, "CPU")
        yield


def _all_reduce(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    assert reduce_op == "sum"
    result = tensor.clone(memory_format=torch.contiguous_format)
    return _until_dropped(lambda: dist.all_reduce(result, group=_group(group_name)), result)


def _all_gather(tensor: Tensor, group_size: int, group_name: str) -> Tensor:
    tensor = tensor.contiguous()
    result = tensor.new_empty(group_size * len(tensor), *tensor.shape[1:])
    return _until_dropped(lambda: dist.all_gather_into_tensor(result, tensor, _group(group_name)), result, tensor)


def _reduce_scatter(tensor: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    assert reduce_op == "sum"
    tensor = tensor.contiguous()
    result = tensor.new_empty(len(tensor) // group_size, *tensor.shape[1:])
    return _until_dropped(lambda: dist.reduce_scatter_tensor(result, tensor, group=_group(group_name)), result, tensor)


def _until_dropped(collective: Callable[[], object], result: Tensor, *read: Tensor) -> Tensor:
    before = [one._use_count() for one in (result, *read)]
    collective()
    while [one._use_count() for one in (result, *read)] != before:
        time.sleep(0.001)
    return result


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)
