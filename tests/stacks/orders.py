"""What is done to a model before it trains, step by step, so that tests can put `sac.apply` anywhere among it.

What compiles hands Dynamo's graphs to the backend that runs them as they are: an order decides what Dynamo gets to see.
What AOTAutograd makes of a graph with regions in it, in each order, is in test_compiled_orders.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import Outcome, differences, forward_done, outcome
from tests.support.blocks import LlamaLikeBlock, Stack, llama_stack

Step = Callable[[nn.Module], nn.Module]
APPLY = "apply"
WIDTH = 32


def compile_whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


def compile_blocks(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        block.compile(backend="eager")
    return model


def wrap_compiled_blocks(model: nn.Module) -> nn.Module:
    """Put each block into the wrapper that `torch.compile` returns."""
    owner = next(module for module in model.modules() if isinstance(module, Stack))
    for index, block in enumerate(owner.blocks):
        owner.blocks[index] = torch.compile(block, backend="eager")
    return model


def shard(model: nn.Module) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block)
    return fully_shard(model)


def shard_flat(model: nn.Module) -> nn.Module:
    each = ModuleWrapPolicy({LlamaLikeBlock})
    return FullyShardedDataParallel(model, auto_wrap_policy=each, device_id=torch.device("cpu"), use_orig_params=True)


def parallelize(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {
        **{f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": RowwiseParallel(),
    }
    for block in blocks_of(model):
        parallelize_module(block, mesh, plan)
    return model


def adapt(model: nn.Module) -> nn.Module:
    import peft

    torch.manual_seed(8)
    config = peft.LoraConfig(target_modules=["up_proj", "q_proj"], r=2, lora_alpha=4, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def load(model: nn.Module) -> nn.Module:
    state = {name: value.clone() * 1.01 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


STEPS: dict[str, Step] = {
    "compile": compile_whole,
    "compile blocks": compile_blocks,
    "wrap compiled blocks": wrap_compiled_blocks,
    "DDP": DistributedDataParallel,
    "fully_shard": shard,
    "FSDP1": shard_flat,
    "parallelize_module": parallelize,
    "get_peft_model": adapt,
    "to(bfloat16)": lambda model: model.to(torch.bfloat16),
    "to(float64)": lambda model: model.to(torch.float64),
    "load_state_dict": load,
    "deepcopy": copy.deepcopy,
}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LlamaLikeBlock)]


def outcome_of(order: Sequence[str], value: Any) -> Outcome:
    """Build a model, do the steps in this order, train, and measure. `value` None leaves `APPLY` out."""
    torch._dynamo.reset()
    torch.manual_seed(1)
    model: nn.Module = llama_stack(2, d=WIDTH)
    for name in order:
        if name != APPLY:
            model = STEPS[name](model)
        elif value is not None:
            model = sac.apply(model, value)
    torch.manual_seed(2)
    x = torch.randn(2, 16, WIDTH, dtype=next(model.parameters()).dtype)

    def step() -> Tensor:
        loss = model(x).square().mean()
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model, compiled=any("compile" in name for name in order))


@functools.cache
def without_us(plain: tuple[str, ...]) -> Outcome:
    """What comes of these steps without us, which is the same wherever ours is to stand among them."""
    return outcome_of(plain, None)


def compare(orders: Sequence[Sequence[str]], value: Any) -> dict[str, str]:
    """What came of each order, against the same one without sac: `works`, or what is wrong. To be run in ranks too."""
    found = {}
    for order in orders:
        reference = without_us(tuple(name for name in order if name != APPLY))
        found[" > ".join(order)] = verdict(outcome_of(order, value), reference)
    return found


def verdict(ours: Outcome, reference: Outcome) -> str:
    differ = differences(ours, reference)
    if differ:
        return f"{len(differ)} differ: {differ[0]}"
    if ours.flops <= reference.flops:
        return "nothing is recomputed"
    return "works" if ours.kept_bytes < reference.kept_bytes else "nothing less is kept"
