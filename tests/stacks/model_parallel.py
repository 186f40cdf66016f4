"""Model parallel training of a small Llama: what each stack gives in one mode, as an `Outcome` of one rank.

Each function runs in every rank of a process group: `run_ranks(2, tensor_parallel, "full")`. A mode is a config
value, or "torch full". Pipelines are in `pipelines.py`, context parallel attention in `ring_attention.py`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as of_torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import sac
from tests.stacks.composition import Outcome, forward_done, outcome, train
from tests.stacks.parallel_llama import DecoderLayer, Llama, Sizes, batch, built, cross_entropy


def put(model: nn.Module, mode: Any, tp_group: Any = None, block: type[nn.Module] = DecoderLayer) -> None:
    """Put a mode on the model: a config value, or torch's full checkpoint of every `block`."""
    if mode == "torch full":
        of_torch.apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, block))
    else:
        sac.apply(model, mode, tp_group=tp_group)


def _all(names: str, style: Callable[[], Any]) -> dict[str, Any]:
    return {name: style() for name in names.split()}


COLWISE = "self_attn.q_proj self_attn.k_proj self_attn.v_proj mlp.gate_proj mlp.up_proj"
ROWWISE = "self_attn.o_proj mlp.down_proj"
NORMS = "input_layernorm post_attention_layernorm"


def layer_plan(kind: str) -> dict[str, Any]:
    """What `parallelize_module` is given for a decoder layer.

    `replicated`: between layers every rank has the whole hidden state. `sequence`: its share of the tokens, as a plain
    tensor. `dtensor`: the same as a DTensor, and DTensors all the way.
    """
    if kind == "replicated":
        return _all(COLWISE, ColwiseParallel) | _all(ROWWISE, RowwiseParallel)
    local = kind == "sequence"
    whole, heads = Replicate(), Shard(1)
    angles = None if local else whole
    plan = {
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), angles, angles),
            desired_input_layouts=(whole, angles, angles),
            use_local_output=local,
        ),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(whole,), use_local_output=local),
        **_all(NORMS, SequenceParallel),
        **_all(COLWISE, functools.partial(ColwiseParallel, use_local_output=local)),
        **_all(ROWWISE, functools.partial(RowwiseParallel, output_layouts=Shard(1), use_local_output=local)),
    }
    if not local:  # torch 2.13 has no sharding rule for attention on the CPU
        plan["self_attn.core"] = PrepareModuleInputOutput(
            input_layouts=(heads,) * 3,
            desired_input_layouts=(heads,) * 3,
            use_local_input=True,
            output_layouts=(heads,),
            desired_output_layouts=(heads,),
            use_local_output=False,
        )
    return plan


def make_parallel(model: Llama, mesh: DeviceMesh, kind: str) -> None:
    """Shard the model over a mesh of one dimension; see `layer_plan`."""
    for layer in model.layers.values():
        parallelize_module(layer, mesh, layer_plan(kind))
    if kind == "replicated":
        return
    local = kind == "sequence"
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=local),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    if not local:
        model.cos, model.sin = (distribute_tensor(one, mesh, [Replicate()]) for one in (model.cos, model.sin))


def trained(model: Llama, kind: str, ids: Tensor, labels: Tensor) -> Outcome:
    """Train on one batch; the loss of sequence-parallel kinds is computed in shards of the vocabulary."""

    def step() -> Tensor:
        with loss_parallel() if kind != "replicated" else contextlib.nullcontext():
            loss = cross_entropy(model(ids), labels)
            forward_done()
            loss.backward()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return outcome(step, model)


def tensor_parallel(mode: Any, *, kind: str = "replicated", order: str = "after", dropout: float = 0.0) -> Outcome:
    """Train a model that `parallelize_module` has sharded; `order`: the mode is put on before that or after."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sizes = Sizes(dropout=dropout)
    model = built(sizes)
    if order == "before":
        put(model, mode, mesh)
    make_parallel(model, mesh, kind)
    if order == "after":
        put(model, mode, mesh)
    return trained(model, kind, *batch(sizes))


def fsdp_tp(mode: Any, *, kind: str = "replicated", order: str = "between") -> Outcome:
    """Train on four ranks: two of tensor parallelism, two of FSDP2. `order`: before both, "between" them, or after."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sizes = Sizes()
    model = built(sizes)
    if order == "before":
        put(model, mode, mesh["tp"])
    make_parallel(model, mesh["tp"], kind)
    if order == "between":
        put(model, mode, mesh["tp"])
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if order == "after":
        put(model, mode, mesh["tp"])
    return trained(model, kind, *batch(sizes, seed=mesh.get_local_rank("dp")))


class RoutedExperts(nn.Module):
    """One expert per rank: tokens go where the router says by an uneven all-to-all, and come back by another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, dist.get_world_size(), bias=False)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        group, x_ND = dist.group.WORLD, x_BTD.flatten(0, 1)
        weight_N1, expert_N1 = self.router(x_ND).softmax(-1).topk(1)
        order_N = expert_N1.flatten().argsort(stable=True)
        sent = torch.bincount(expert_N1.flatten(), minlength=dist.get_world_size())
        received = funcol.all_to_all_single(sent, None, None, group)
        gives, gets = sent.tolist(), received.tolist()
        there_MD = funcol.all_to_all_single_autograd(x_ND[order_N], gets, gives, group)
        mapped_MD = self.down(nn.functional.gelu(self.up(there_MD)))
        back_ND = funcol.all_to_all_single_autograd(mapped_MD, gives, gets, group)
        return x_BTD + (torch.empty_like(x_ND).index_copy(0, order_N, back_ND) * weight_N1).view_as(x_BTD)


def experts(mode: Any) -> Outcome:
    """Train two blocks with one expert per rank."""
    torch.manual_seed(7 + dist.get_rank())
    model = nn.Sequential(RoutedExperts(32), RoutedExperts(32))
    put(model, mode, block=RoutedExperts)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    return train(model, lambda model: model(x).square().mean())
