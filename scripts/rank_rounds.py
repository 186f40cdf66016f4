"""One rank of `bench_ranks.py`: it builds each case in every way, compares gradients, and runs rounds when it is asked.

It runs as a program, whose `PYTHONPATH` says which sac it imports; models and ways are those of this checkout. What it
is asked and what it answers are keys of a store of the parent's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import sac  # before the next line, after which this checkout's would be found

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from bench_rounds import CPU_TIME, Runner, time_rounds, warmed_up
from overhead_ways import BASELINE, POLICY, REPLAY, RERUN, SAC_FULL, STOCK, TORCH_FULL, stock_contexts
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.stacks.model_parallel import layer_plan
from tests.stacks.parallel_llama import Llama, Sizes, built

RANKS = 2
LIMIT = timedelta(hours=1)
BATCH, TOKENS = 2, 8


def sac_apply(model: Llama, value: dict[str, Any]) -> None:
    sac.apply(model, {**value, "blocks": ["layers.*"]})


def torch_checkpoint(model: Llama, **options: Any) -> None:
    """Where `sac.apply` puts its own: around the forward of each layer, inside the hooks of FSDP2."""
    for layer in model.layers.values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, **options)


WAYS: dict[str, Callable[[Llama], None]] = {
    BASELINE: lambda model: None,
    TORCH_FULL: torch_checkpoint,
    STOCK: partial(torch_checkpoint, context_fn=stock_contexts),
    SAC_FULL: partial(sac_apply, value={"mode": "full"}),
    RERUN: partial(sac_apply, value={"mode": "selective", "policy": POLICY, "engine": "rerun"}),
    REPLAY: partial(sac_apply, value={"mode": "selective", "policy": POLICY, "engine": "replay"}),
}


@dataclass(frozen=True, slots=True)
class Case:
    """How the layers are parallelised, and how many rounds are run at once."""

    key: str
    label: str
    rounds: int
    warm_up: int


CASES = {
    "tp": "plain tensors, DTensor weights: colwise and rowwise linear layers",
    "dtensor": "DTensors all the way: the same, norms in shards of the sequence",
    "fsdp2": "fully_shard on each layer and on the model",
}
SIZES = Sizes()
LABEL = (
    f"{SIZES.n_layers} layers, d={SIZES.width}, {SIZES.heads} heads, MLP {SIZES.hidden}, batch {BATCH}, {TOKENS} tokens"
)


def build(key: str, way: str, mesh: DeviceMesh) -> Runner:
    """The layers of a Llama, parallelised, then checkpointed, then sharded, as trainers do it; each way has its own."""
    model = built(SIZES, first=False, last=False)
    generator = torch.Generator().manual_seed(dist.get_rank() if key == "fsdp2" else 0)
    x, weights = (torch.randn(BATCH, TOKENS, SIZES.width, generator=generator) for _ in range(2))
    if key == "tp":
        make_tensor_parallel(model, mesh, "replicated")
    if key == "dtensor":
        make_tensor_parallel(model, mesh, "dtensor")
        model.cos, model.sin = (distribute_tensor(one, mesh, [Replicate()]) for one in (model.cos, model.sin))
        x, weights = (distribute_tensor(one, mesh, [Shard(1)]) for one in (x, weights))
    WAYS[way](model)
    if key == "fsdp2":
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return Runner(model, model.parameters(), x, weights, CPU_TIME)


def make_tensor_parallel(model: Llama, mesh: DeviceMesh, kind: str) -> None:
    for layer in model.layers.values():
        parallelize_module(layer, mesh, layer_plan(kind))


class Rank:
    """Answers what the parent asks of it: to build a case, then to run some rounds of it."""

    def __init__(self) -> None:
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.runners: dict[str, Runner] = {}

    def build(self, case: Case) -> dict[str, Any]:
        """By way: a step's matrix products and collectives, and whether the gradients are those of the plain layers."""
        self.runners = {way: build(case.key, way, self.mesh) for way in WAYS}
        found, reference = {}, None
        for way, runner in self.runners.items():
            counted, gradients, equal = warmed_up(runner, case.warm_up, reference)
            reference = reference or gradients
            collectives = "{} + {}".format(*counted.collectives)
            found[way] = {"matmuls": counted.matmuls, "collectives": collectives, "gradients_equal": equal}
        return found

    def rounds(self, case: Case) -> dict[str, list[float]]:
        """By way: CPU seconds of the steps of this process."""
        times = time_rounds(case, self.runners, lambda _: None)
        return {way: [each.step for each in found] for way, found in times.items()}


def main(port: int, name: str, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.PrefixStore(name, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT))
    group = dist.PrefixStore("group", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=RANKS, timeout=LIMIT)
    ranks_own = Rank()
    for number in range(sys.maxsize):
        asked = json.loads(store.get(f"ask {number}"))
        if asked["what"] == "end":
            break
        answer = getattr(ranks_own, asked["what"])(Case(**asked["case"]))
        store.set(f"answer {number} {rank}", json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
