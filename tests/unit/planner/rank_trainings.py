"""Trainings of one rank of two, with a budget in the config."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sac
from sac.memory_timeline import measure_memory
from tests.stacks.data_parallel import shard_fsdp2
from tests.stacks.pipelines import stage_numbers
from tests.support.blocks import llama_stack
from tests.support.prompt_collectives import prompt_collectives
from tests.unit.planner.small_training import DIM, Language, X, Y, built, controller_of, within

Found = tuple[list[int], list[torch.Tensor], Any]
STEPS = 4


def sharded(model: Language) -> None:
    """Shard each block, and the rest, over both ranks."""
    shard_fsdp2(model, *model.body.blocks)


def tensor_parallel(model: Language) -> None:
    """Split attention and the MLP of each block over both ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.body.blocks:
        plan = {
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def replicated(model: Language) -> nn.Module:
    """Give each rank the whole model; the gradients are those of both."""
    return DistributedDataParallel(model)


def trained(way: Any, value: Any, rows: tuple[int, int] = (4, 4), *, after: bool = False) -> Found:
    """Return the peaks of this rank after the first step, the losses, and what it saves at each position.

    ``rows``: of each rank's batch. ``after``: whether sac is applied after the ranks have their parts.
    """
    model = built()
    if value is not None and not after:
        sac.apply(model, value)
    called = way(model) or model
    if value is not None and after:
        sac.apply(model, value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    count = rows[dist.get_rank()]
    x, y = X.repeat(2, 1)[:count], Y.repeat(2, 1)[:count]
    peaks, losses = [], []

    def run() -> None:
        loss = nn.functional.cross_entropy(called(x).flatten(0, 1), y.flatten())
        loss.backward()
        losses.append(loss.detach())

    for step in range(STEPS):
        with prompt_collectives():
            if step:
                peaks.append(bytes_of_parts(model, optimizer, x) + measure_memory(run).peak_bytes)
            else:
                run()
        optimizer.step()
        optimizer.zero_grad()
    fitted = controller_of(model).fitted if value is not None and value != "full" else None
    return peaks, losses, fitted and (fitted.policy, fitted.peak, fitted.least, fitted.most)


def staged(schedule: str, budgets: Any) -> tuple[list[int], list[torch.Tensor], Any]:
    """Train a pipeline of 8 layers under one of torch's schedules; a rank has one part of it, or two.

    ``budgets``: the config, or its budget in bytes by rank. Returns the peaks of this rank after the first step, its
    parameters, and the least peak and what is in flight by its plan.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    numbers = stage_numbers(schedule, rank, ranks)
    count = ranks * len(numbers)
    parts = nn.ModuleList(_part(number, count) for number in numbers)
    if budgets is not None:
        sac.apply(parts, within(budgets[rank]) if isinstance(budgets, list) else budgets)
    stages = [
        PipelineStage(part, number, count, torch.device("cpu")) for part, number in zip(parts, numbers, strict=True)
    ]
    kind = getattr(schedules, schedule)
    runs = kind(stages[0] if len(stages) == 1 else stages, 4, loss_fn=_loss)
    optimizer = torch.optim.AdamW(parts.parameters(), lr=1e-2)
    x, y = X.repeat(4, 1), Y.repeat(4, 1)

    def run() -> None:
        losses: list[torch.Tensor] = []
        runs.step(*((x,) if 0 in numbers else ()), **({"target": y, "losses": losses} if count - 1 in numbers else {}))

    peaks = []
    for step in range(4):
        if step:
            there = bytes_of_parts(parts, optimizer, x)
            peaks.append(there + measure_memory(run).peak_bytes)
        else:
            run()
        optimizer.step()
        optimizer.zero_grad()
    fitted = controller_of(parts).fitted if isinstance(budgets, list) else None
    return peaks, [parameter.detach() for parameter in parts.parameters()], fitted and (fitted.least, fitted.in_flight)


def _part(number: int, count: int) -> Language:
    model = built()
    torch.manual_seed(number)
    model.body = llama_stack(8 // count, DIM, 4)
    if number:
        model.embedding = nn.Identity()  # type: ignore[assignment]
    if number < count - 1:
        model.head = nn.Identity()  # type: ignore[assignment]
    return model


def _loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def bytes_of_parts(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> int:
    """Return the bytes of this rank's parts of what is there before a pass."""
    from sac.tensors import tensor_parts

    states = [value for state in optimizer.state.values() for value in state.values()]
    known = [*model.parameters(), *model.buffers(), *(one for one in states if isinstance(one, torch.Tensor)), x]
    parts = [part.untyped_storage() for one in known for part in tensor_parts(one)]
    return sum({part._cdata: part.nbytes() for part in parts}.values())
