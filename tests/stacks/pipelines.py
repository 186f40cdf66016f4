"""Pipeline parallel training of a small Llama under torch's schedules, with several micro-batches in flight."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from tests.stacks.composition import Outcome, outcome
from tests.stacks.model_parallel import put
from tests.stacks.parallel_llama import Llama, Sizes, batch, built, cross_entropy

SINGLE = ("ScheduleGPipe", "Schedule1F1B")  # one stage a rank; the others have two
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # the first rank has the last stage too
IN_TWO_PARTS = ("ScheduleInterleavedZeroBubble", *V_SHAPED)  # backward for inputs, then for weights
SCHEDULES = (*SINGLE, "ScheduleInterleaved1F1B", *IN_TWO_PARTS)
MICRO_BATCHES, ROWS = 4, 8


def stage_numbers(schedule: str, rank: int, ranks: int) -> list[int]:
    """Which stages a rank has."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * ranks - 1 - rank if schedule in V_SHAPED else rank + ranks]


def layers_of(stage: int, stages: int, layers: int) -> list[int]:
    """Which layers a stage has; with fewer layers than stages the outermost stages have none, but an end."""
    if layers < stages:
        first = (stages - layers) // 2
        return [stage - first] if first <= stage < first + layers else []
    return [layer for layer in range(layers) if layer * stages // layers == stage]


def parts_of(sizes: Sizes, schedule: str, rank: int, ranks: int) -> dict[int, Llama]:
    """The parts of the model that a rank has, by the number of their stage."""
    stages = ranks if schedule in SINGLE else 2 * ranks
    return {
        stage: built(sizes, layers=layers_of(stage, stages, sizes.n_layers), first=stage == 0, last=stage == stages - 1)
        for stage in stage_numbers(schedule, rank, ranks)
    }


def run_schedule(parts: dict[int, Llama], schedule: str, group: Any, ids: Tensor, labels: Tensor) -> Outcome:
    """Train the parts that this rank has; `kept_bytes` is the peak, since forward and backward take turns."""
    ranks = dist.get_world_size(group)
    count = ranks if schedule in SINGLE else 2 * ranks
    stages = [PipelineStage(part, number, count, torch.device("cpu"), group=group) for number, part in parts.items()]
    kind = getattr(schedules, schedule)
    runs = kind(stages[0] if schedule in SINGLE else stages, MICRO_BATCHES, loss_fn=cross_entropy)
    inputs = (ids,) if 0 in parts else ()
    ends = count - 1 in parts

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        runs.step(*inputs, **({"target": labels, "losses": losses} if ends else {}))
        return torch.stack(losses).mean() if ends else None

    return outcome(step, nn.ModuleDict({str(number): part for number, part in parts.items()}))


def pipeline(mode: Any, *, schedule: str = "Schedule1F1B", layers: int = 4, dropout: float = 0.0) -> Outcome:
    """Train over all ranks. Where a part holds no block, the note on that is expected, and nothing else."""
    sizes = Sizes(n_layers=layers, dropout=dropout)
    parts = parts_of(sizes, schedule, dist.get_rank(), dist.get_world_size())
    for part in parts.values():
        with warnings.catch_warnings(record=not part.layers):
            put(part, mode, dist.group.WORLD)
    return run_schedule(parts, schedule, None, *batch(sizes, ROWS))


def pipeline_dp(mode: Any, *, schedule: str = "Schedule1F1B") -> Outcome:
    """Train on four ranks: two stages or more, each sharded over two ranks by FSDP2, which have other data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    sizes = Sizes(n_layers=4)
    parts = parts_of(sizes, schedule, mesh.get_local_rank("pp"), 2)
    for part in parts.values():
        put(part, mode)
        for layer in part.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
    ids, labels = batch(sizes, ROWS, seed=mesh.get_local_rank("dp"))
    return run_schedule(parts, schedule, mesh.get_group("pp"), ids, labels)
