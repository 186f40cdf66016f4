"""Collectives that take no memory but their results, so that a measured peak does not depend on gloo or the clock.

gloo copies the input of a reduce-scatter and the result of an all-gather, which NCCL does not, and its threads hold the
tensors of a collective a little after the wait for it has ended. Inside `prompt_collectives()`, those of tensor and
expert parallelism make no such copies, and return when the thread has dropped its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor


@contextmanager
def prompt_collectives() -> Iterator[None]:
    """Replace functional collectives; they end at once, and waits for them do nothing."""
    with torch.library._scoped_library("_c10d_functional", "IMPL") as kernels:
        kernels.impl("all_reduce", _all_reduce, "CPU")
        kernels.impl("all_gather_into_tensor", _all_gather, "CPU")
        kernels.impl("reduce_scatter_tensor", _reduce_scatter, "CPU")
        kernels.impl("all_to_all_single", _all_to_all, "CPU")
        yield


def _all_reduce(tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
    assert reduce_op == "sum"
    result = tensor.clone(memory_format=torch.contiguous_format)
    return _until_dropped(lambda: dist.all_reduce(result, group=_group(group_name)), result)


def _all_gather(tensor: Tensor, group_size: int, group_name: str) -> Tensor:
    group, tensor = _group(group_name), tensor.contiguous()
    result = tensor.new_empty(group_size * len(tensor), *tensor.shape[1:])
    for number, share in enumerate(result.chunk(group_size)):
        if number == group.rank():
            share.copy_(tensor)
        _until_dropped(partial(dist.broadcast, share, group=group, group_src=number), share)
    return result


def _reduce_scatter(tensor: Tensor, reduce_op: str, group_size: int, group_name: str) -> Tensor:
    assert reduce_op == "sum"
    group, tensor = _group(group_name), tensor.contiguous()
    scratch = _scratch(tensor.shape, tensor.dtype).copy_(tensor)
    _until_dropped(lambda: dist.all_reduce(scratch, group=group), scratch)
    return scratch.chunk(group_size)[group.rank()].clone()


def _all_to_all(tensor: Tensor, received: list[int], sent: list[int], group_name: str) -> Tensor:
    tensor = tensor.contiguous()
    result = tensor.new_empty(sum(received), *tensor.shape[1:])
    collective = partial(dist.all_to_all_single, result, tensor, received, sent, group=_group(group_name))
    return _until_dropped(lambda: _until_dropped(collective, tensor), result)


@cache
def _scratch(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory that the first step makes, and all others use."""
    return torch.empty(shape, dtype=dtype)


def _until_dropped(collective: Callable[[], object], tensor: Tensor) -> Tensor:
    before = tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    collective()
    while (tensor._use_count(), torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) != before:
        time.sleep(0.001)
    return tensor


def _group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)
