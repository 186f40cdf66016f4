"""FSDP2 and tensor parallelism with activation checkpointing, a budget, and a training that is taken up again.

    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpointing selective
    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpointing full --steps 10 --state out/state
    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpointing full --steps 20 --state out/state

A plan for a budget is made by one process, which stands for a rank, and is an ordinary policy:

    python examples/fsdp2_tensor_parallel.py --budget 50% --ranks 4 --checkpointing out/planned.yaml
    torchrun --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpointing out/planned.yaml

The order is that of torchtitan: tensor parallelism, `sac.apply`, `fully_shard`. Without GPUs the ranks use gloo.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import sac
from sac.planner.fakes import fake_ranks

TEXT = Path(__file__).parent / "text.txt"
TP = 2  # ranks that share a layer
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(), "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, head: int = 16) -> None:
        super().__init__()
        self.head = head
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; x has the shape (batch, tokens, width), the same on all ranks of a layer."""
        h = self.norm_1(x)
        parts = (part(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value))
        attended = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    """A language model over bytes."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each next byte; tokens has the shape (batch, tokens)."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def parallelize(model: nn.Module, mesh: DeviceMesh, value: object = "none") -> nn.Module:
    """Cut the layers over "tp", turn checkpointing on, and shard what each rank has over "dp"."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        parallelize_module(block, mesh["tp"], LAYER)
    sac.apply(model, value)
    for block in blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def mesh_of(world: int, device: str = DEVICE) -> DeviceMesh:
    """Return the ranks in rows of ``TP``."""
    return init_device_mesh(device, (world // TP, TP), mesh_dim_names=("dp", "tp"))


def batch_of(step: int, part: int, rows: int = 2, length: int = 64) -> Tensor:
    """Return the bytes of a step's batch, of which each row of ranks reads a part."""
    text = torch.tensor(list(TEXT.read_bytes()))
    starts = torch.randint(len(text) - length, (rows,), generator=torch.Generator().manual_seed(1000 * step + part))
    return torch.stack([text[start : start + length] for start in starts.tolist()]).to(DEVICE)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and return this rank's losses of the steps that this run has made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpointing", default="selective", help="none, full, selective, a policy's name or file")
    parser.add_argument("--budget", help="write the policy of --checkpointing for this peak of one step, and end")
    parser.add_argument("--ranks", type=int, default=4, help="for --budget: the number of ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--state", type=Path, help="go on from this folder if it exists, and write it at the end")
    arguments = parser.parse_args(argv)
    if arguments.budget:
        with fake_ranks(arguments.ranks):  # a process group that sends nothing
            policy = sac.plan(
                Transformer(), (batch_of(0, 0).cpu(),), arguments.budget, optimizer="adamw",
                parallelize=lambda copy: parallelize(copy, mesh_of(arguments.ranks, "cpu")),
            )  # fmt: skip
        print(policy.table())
        policy.save(arguments.checkpointing)
        return []

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group()
    torch.manual_seed(0)  # the same weights on all ranks
    model, mesh = Transformer().to(DEVICE), mesh_of(dist.get_world_size())
    parallelize(model, mesh, arguments.checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first = 0
    if arguments.state and arguments.state.exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=arguments.state)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]
    losses = []
    for step in range(first, arguments.steps):
        loss = model(batch_of(step, mesh["dp"].get_local_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    if arguments.state:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": arguments.steps}, checkpoint_id=arguments.state)
    if dist.get_rank() == 0:
        print(sac.report(model))
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
