"""What ranks run in the tests of replay: regions with collectives of every kind, and what each rank is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import sac
from sac.errors import RegionError
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.support.blocks import FunctionBlock, Stack, selective
from tests.support.custom_ops import Wobble, wobble
from tests.support.training import built
from tests.support.ways import POLICIES

Body = Callable[[FunctionBlock, Tensor], Tensor]


def functional(block: FunctionBlock, x: Tensor) -> Tensor:
    return reduced(x @ block.a).sin() @ block.b


class FunctionalSum(torch.autograd.Function):
    """As `SummedOverRanks`, by a functional collective, whose result can be saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class CollectivesSent(TorchDispatchMode):
    """Counts the collectives that this rank sends while it is active; waits are not counted."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.namespace == "_c10d_functional" and "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


class SummedOverRanks(torch.autograd.Function):
    """Sum over the ranks in forward, as it is in backward: what ends a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ModelParallelUnit:
    """What DeepSpeed calls an mpu, over the default group."""

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size()

    def get_model_parallel_group(self) -> Any:
        return dist.group.WORLD


def reduced(x: Tensor) -> Tensor:
    """The sum over the ranks, by a functional collective."""
    out: Tensor = FunctionalSum.apply(x)  # type: ignore[no-untyped-call]
    return out


def not_waited_for_at_once(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    sent = funcol.all_reduce(h.detach(), "sum", dist.group.WORLD)
    between = h.sin() @ block.b
    return between * (sent + 1).cos() * funcol.all_gather_tensor(h.detach(), 0, dist.group.WORLD).mean()


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, asynchronous: bool) -> Tensor:
        out = x.clone()
        work = dist.all_reduce(out, async_op=asynchronous)
        if work is not None:
            work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad, None


def in_place(block: FunctionBlock, x: Tensor) -> Tensor:
    return _InPlace.apply(x @ block.a, False).sin() @ block.b  # type: ignore[no-untyped-call,no-any-return]


def in_place_later_waited_for(block: FunctionBlock, x: Tensor) -> Tensor:
    h = _InPlace.apply(x @ block.a, True)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        parts = [torch.empty_like(h) for _ in range(dist.get_world_size())]
        work = dist.all_gather(parts, h.contiguous(), async_op=True)
        between = h.cos()
        work.wait()
        whole = torch.empty(len(h) * dist.get_world_size(), h.shape[1])
        dist.all_gather_into_tensor(whole, h.contiguous())
        mine = torch.empty_like(h)
        dist.all_to_all_single(mine, h.contiguous())
        first, second = h.clone(), h.clone()
        with dist._coalescing_manager():
            dist.all_reduce(first)
            dist.all_reduce(second)
    return (h.sin() * torch.stack(parts).sum(0) + between * mine + (h * first - second) * whole.mean()) @ block.b


def sent_and_received(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        got = torch.empty_like(h)
        calls = [
            dist.P2POp(dist.isend, h.contiguous(), (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        again = torch.empty_like(h)
        if rank % 2 == 0:
            dist.send(got, (rank + 1) % size)
            dist.recv(again, (rank - 1) % size)
        else:
            dist.recv(again, (rank - 1) % size)
            dist.send(got, (rank + 1) % size)
        broadcast = again.clone()
        dist.broadcast(broadcast, 0)
    return (h.sin() * got + again.cos() * h * broadcast) @ block.b


def sharded(block: FunctionBlock, x: Tensor) -> Tensor:
    """In and out of a DTensor; the product sends inside of its op."""
    mesh = block.mesh
    left = DTensor.from_local(x @ block.a, mesh, [Replicate()])
    right = distribute_tensor(block.b, mesh, [Shard(0)])
    h = (left @ right.redistribute(mesh, [Replicate()])).sin()
    columns = h.redistribute(mesh, [Shard(1)]).to_local().cos()
    mean = DTensor.from_local(columns, mesh, [Shard(1)]).sum(1).full_tensor()
    return h.to_local() * mean.unsqueeze(1) * h.full_tensor()


BODIES: dict[str, Body] = {
    body.__name__: body
    for body in (functional, not_waited_for_at_once, in_place, in_place_later_waited_for, sent_and_received, sharded)
}


def stack_of(name: str) -> Stack:
    """Two regions with this body, equal on all ranks."""
    model = Stack(FunctionBlock(BODIES[name]), FunctionBlock(BODIES[name]))
    for block in model.blocks:
        block.mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if name == "sharded" else None
    return model


def trained(name: str, engine: str, chosen: dict[str, Any]) -> tuple[Outcome, int, list[str]]:
    """Steps under an engine ("none": without us), how often Python ran the bodies in all of them, and warnings."""
    model = built(lambda: stack_of(name))
    if engine != "none":
        verify = {"verify": "never"} if engine == "replay" else {}  # nothing hides what the tape gets wrong
        model = sac.apply(model, selective(chosen, engine=engine, **verify))

    def step() -> Tensor:
        torch.manual_seed(dist.get_rank())
        loss = model(torch.randn(8, 8)).square().sum()
        forward_done()
        loss.backward()
        return loss

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = outcome(step, model)
    calls = sum(block.runs for block in model.blocks)
    return seen, calls, [str(one.message) for one in caught if "replay" in str(one.message)]


def wobbling(block: FunctionBlock, x: Tensor) -> Tensor:
    Wobble.sign = 1.0
    return wobble(reduced(x @ block.a)).sin() @ block.b


def wobbling_inside(block: FunctionBlock, x: Tensor) -> Tensor:
    """No collective stands on the tape: the product of a sum that is not added up yet sends inside of an op."""
    Wobble.sign = 1.0
    h = DTensor.from_local(x @ block.a, block.mesh, [Shard(0)])
    scale = (h.detach().sum() * h.detach()).to_local()[: len(x)]
    return wobble(h.to_local() * scale).sin() @ block.b


def told_of_a_difference(engine: str, inside: bool) -> str:
    """On rank 0 a replayed value differs from that of the forward; what the rank is told."""
    body = wobbling_inside if inside else wobbling
    model = Stack(FunctionBlock(body))
    model.blocks[0].mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sac.apply(model, selective(POLICIES["nothing"], engine=engine, verify="first"))
    loss = model(torch.randn(8, 8)).sum()
    if dist.get_rank() == 0:
        Wobble.sign = -1e5
    try:
        loss.backward()
    except RegionError as error:
        return str(error)
    finally:
        Wobble.sign = 1.0
    return "no error" if all(p.grad is not None for p in model.parameters()) else "no gradient"
