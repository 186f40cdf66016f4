"""Plan sharded models on one machine: a process group that sends nothing, and FSDP2 over it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sac.blocks.find import find_blocks
from sac.errors import PlanError, Problem
from sac.torch_private import FakeTensor, silent_store


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Act as rank 0 of ``count`` ranks with collectives that send nothing.

    Memory and ops are those of a real rank; data is not. Raises ``PlanError`` if a process group already exists.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 2:
        raise PlanError(Problem("ranks", f"{count!r} ranks to shard over", "2, 3, 4, …"))
    store = silent_store() if dist.is_available() else None
    if store is None:
        raise PlanError(Problem("ranks", "this build of torch has no process group that sends nothing", "torch 2.11"))
    if dist.is_initialized():
        raise _needs_silence()
    dist.init_process_group("fake", store=store, rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _needs_silence() -> PlanError:
    found = "a process group is already initialized, but a plan for other ranks needs one that sends nothing"
    return PlanError(Problem("ranks", found, fix="plan in a process of its own"))


def refuse_senders() -> None:
    """Raise ``PlanError`` if the process group sends data: ranks of a training would wait for each other's plans."""
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake":
        raise _needs_silence()


def fsdp_over(count: int) -> Callable[[nn.Module], None]:
    """Return a function that shards a model by FSDP2 over ``count`` ranks: one unit per block, and one for the rest.

    Pass it as ``parallelize`` to ``sac.plan``, within ``fake_ranks(count)``.
    """

    def parallelize(model: nn.Module) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(next(model.parameters()).device.type, (count,))
        for module in (*(block.module for block in find_blocks(model)), model):
            fully_shard(module, mesh=mesh)

    return parallelize


class QuickChunks(TorchFunctionMode):
    """Cuts a tensor without data into at most two tensors: the chunks of equal size are one tensor, the first.

    FSDP2 and DTensor cut each parameter into a chunk per rank, and the one rank there is (`fake_ranks`) uses the first.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.chunk and len(args) > 1 and type(args[0]) is FakeTensor:
            return _chunks(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _chunks(whole: Tensor, count: int, dim: int = 0) -> tuple[Tensor, ...]:
    length = whole.shape[dim]
    size = -(-length // count)
    if not size:
        return torch.chunk(whole, count, dim)
    full, rest = divmod(length, size)
    last = (whole.narrow(dim, length - rest, rest),) if rest else ()
    return (whole.narrow(dim, 0, size),) * full + last
