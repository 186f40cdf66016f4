"""Context parallel training: torch's `context_parallel`, with its ring attention around the CPU's kernel.

torch 2.13 shards attention over the tokens for the fused kernels of accelerators only: on the CPU it raises that the
kernel has no sharding strategy. All but the kernel is general, so the CPU's is registered here with the others, and
what runs is torch's own: the sharded buffers, the patched attention, the ring in forward and backward.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel as of_torch

from tests.stacks.composition import Outcome, forward_done, outcome
from tests.stacks.model_parallel import put
from tests.stacks.parallel_llama import Sizes, batch, built, cross_entropy

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
TOKENS = 2  # the dimension that is sharded, of [batch, heads, tokens, features]
PRIVATE = "torch.distributed.tensor.experimental._context_parallel._attention"
NAMES = ("custom_ops", "_templated_ring_attention", "_templated_ring_attention_backward")


@contextmanager
def kernel_of_the_cpu() -> Iterator[None]:
    """Let torch's ring attention know the CPU's kernel; skips where the private names of torch 2.13 are missing."""
    try:
        ring = importlib.import_module(PRIVATE)
    except ImportError:
        pytest.skip(f"this torch has no {PRIVATE}")
    if any(not hasattr(ring, name) for name in NAMES):
        pytest.skip(f"{PRIVATE} has other names in this torch")
    handlers = {FORWARD: _forward, BACKWARD: _backward}
    ring.custom_ops.update(handlers)
    try:
        yield
    finally:
        for op in handlers:
            del ring.custom_ops[op]


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    ring, mesh = importlib.import_module(PRIVATE), args[0].device_mesh
    query, key, value = (one.to_local() for one in args[:3])
    is_causal = bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal", False))
    found = ring._templated_ring_attention(mesh.get_group(), TOKENS, FORWARD, query, key, value, is_causal=is_causal)
    return tuple(_sharded(one, mesh) for one in found)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    ring, mesh = importlib.import_module(PRIVATE), args[0].device_mesh
    grad_out, query, key, value, out, logsumexp = (one.to_local() for one in args[:6])
    found = ring._templated_ring_attention_backward(
        mesh.get_group(),
        TOKENS,
        _kernel_backward,
        grad_out=grad_out,
        grad_out_name="grad_out",
        query=query,
        key=key,
        value=value,
        out=out,
        logsumexp=logsumexp,
        is_causal=bool(args[7]),
    )
    return tuple(_sharded(one, mesh) for one in found)


def _kernel_backward(*, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Any:
    return BACKWARD(grad_out, query, key, value, more["out"], more["logsumexp"], 0.0, more["is_causal"])


def _sharded(local: Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(local, mesh, [Shard(TOKENS)], run_check=False)


def context_parallel(mode: Any) -> Outcome:
    """Train a model whose tokens are sharded over all ranks; backward runs inside the context too, as torch asks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sizes = Sizes()
    model = built(sizes)
    put(model, mode)
    ids, labels = batch(sizes)
    buffers = [ids, labels, model.cos, model.sin]

    def step() -> Tensor:
        with kernel_of_the_cpu(), of_torch(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 0, 0]):
            loss = cross_entropy(model(ids), labels)
            forward_done()
            loss.backward()
        return loss

    return outcome(step, model)
