"""Data parallel and sharded training of a small model: what each of DDP, FSDP1 and FSDP2 gives in one mode.

`ddp(mode)`, `fsdp1(mode)` and `fsdp2(mode)` run in every rank of a process group and return an `Outcome`:
`run_ranks(2, fsdp2, "full")`. A mode is a config value.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.stacks.composition import Outcome, forward_done, outcome
from tests.stacks.decoders import BLOCK_OF, TOKENS, WIDTH, Decoder, decoder

RATE = 0.05


def put(model: nn.Module, mode: Any) -> None:
    """Put a mode on the model, a config value; what is scattered is scattered over all ranks."""
    sac.apply(model, mode, tp_group=dist.group.WORLD)


class Batches:
    """Inputs of the micro-batches, the same in every run; `same_data`: on every rank too."""

    def __init__(self, *, same_data: bool) -> None:
        self.generator = torch.Generator().manual_seed(0 if same_data else 1 + dist.get_rank())

    def next(self) -> Tensor:
        """The next one, [2, tokens, width]."""
        return torch.randn(2, TOKENS, WIDTH, generator=self.generator)


def trained(
    model: nn.Module,
    *,
    micro_batches: int = 1,
    same_data: bool = False,
    before_micro_batch: Callable[[bool], Any] = lambda last: None,
    around_micro_batch: Callable[[bool], Any] = lambda last: contextlib.nullcontext(),
    steps: int = 2,
) -> Outcome:
    """Train with SGD. The functions are told whether the micro-batch is the last of its step."""
    batches = Batches(same_data=same_data)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], RATE)

    def step() -> Tensor:
        total = torch.zeros(())
        for index in range(micro_batches):
            last = index == micro_batches - 1
            before_micro_batch(last)
            with around_micro_batch(last):
                loss = model(batches.next()).float().square().mean()
                if last:
                    forward_done()
                loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    return outcome(step, model, steps=steps)


def wrapped(mode: Any, model: nn.Module, wrap: Callable[[nn.Module], Any], order: str, **training: Any) -> Outcome:
    """Train a model in what `wrap` puts around it; micro-batches but the last exchange no gradients."""
    if order == "before":
        put(model, mode)
    parallel = wrap(model)
    if order == "after":
        put(parallel, mode)

    def around(last: bool) -> Any:
        return contextlib.nullcontext() if last else parallel.no_sync()

    return trained(parallel, around_micro_batch=around, **training)


def ddp(
    mode: Any,
    *,
    block: str = "dense",
    order: str = "before",
    frozen: Sequence[str] = (),
    micro_batches: int = 1,
    same_data: bool = False,
    **of_ddp: Any,
) -> Outcome:
    """Train under DistributedDataParallel; `order`: the mode is put on before it or after."""
    wrap = functools.partial(DistributedDataParallel, **of_ddp)
    # A static graph has its buckets rebuilt in the third step, by a buffer that gloo's thread may be the last to hold.
    steps = 3 if of_ddp.get("static_graph") else 2
    training = {"micro_batches": micro_batches, "same_data": same_data, "steps": steps}
    return wrapped(mode, decoder(block, frozen), wrap, order, **training)


def fsdp1(
    mode: Any,
    *,
    block: str = "dense",
    order: str = "after",
    frozen: Sequence[str] = (),
    micro_batches: int = 1,
    same_data: bool = False,
    bf16: bool = False,
    nested: bool = False,
    **of_fsdp: Any,
) -> Outcome:
    """Train under FullyShardedDataParallel, a unit per block; `order`: the mode is put on before it or after."""
    units = {BLOCK_OF[block], nn.Sequential} if nested else {BLOCK_OF[block]}
    precision = MixedPrecision(torch.bfloat16, torch.float32) if bf16 else None
    wrap = functools.partial(shard_fsdp1, units=units, mixed_precision=precision, **of_fsdp)
    return wrapped(mode, decoder(block, frozen), wrap, order, micro_batches=micro_batches, same_data=same_data)


def fsdp2(
    mode: Any,
    *,
    block: str = "dense",
    order: str = "before",
    frozen: Sequence[str] = (),
    micro_batches: int = 1,
    same_data: bool = False,
    bf16: bool = False,
    offload: bool = False,
    nested: bool = False,
    prefetch: bool = False,
    unshard_first: bool = False,
    reshard_in_between: bool = True,
    reshard_after_forward: bool | int = True,
) -> Outcome:
    """Train under `fully_shard`, a unit per block; `order`: the mode is put on before it or after.

    `nested`: each expert is a unit too. `prefetch`: units name those to gather ahead. `unshard_first`: the nested units
    (or the blocks) are gathered by hand before forward. `reshard_in_between`: without it only the last micro-batch
    reshards, and gradients are reduced once.
    """
    model = decoder(block, frozen)
    if order == "before":
        put(model, mode)
    shard_fsdp2(
        model,
        *units_of(model, nested),
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        reshard_after_forward=reshard_after_forward,
    )
    if order == "after":
        put(model, mode)
    if prefetch:
        blocks: list[Any] = list(model.blocks)
        for one, after in itertools.pairwise(blocks):
            one.set_modules_to_forward_prefetch([after])
            after.set_modules_to_backward_prefetch([one])

    def before(last: bool) -> None:
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
        if not reshard_in_between:
            model.set_reshard_after_backward(last)  # type: ignore[operator]
        if unshard_first:
            for unit in units_of(model, nested):
                unit.unshard()

    return trained(model, micro_batches=micro_batches, same_data=same_data, before_micro_batch=before)


def units_of(model: Decoder, nested: bool) -> list[Any]:
    """The units below the root, inner ones first."""
    return [*(one for block in model.blocks for one in (block.experts if nested else ())), *model.blocks]


def shard_fsdp1(model: nn.Module, units: set[type[nn.Module]], **options: Any) -> Any:
    """Shard the modules of these classes and the rest over all ranks."""
    policy = ModuleWrapPolicy(units)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def shard_fsdp2(model: nn.Module, *units: nn.Module, **options: Any) -> Any:
    """Shard these modules, inner ones first, and the rest over all ranks."""
    for unit in (*units, model):
        fully_shard(unit, **options)
    return model
