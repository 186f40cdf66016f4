"""The ways to checkpoint one block that `bench_overhead.py` compares."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sac
from tests.semantics.blocks import alternate, policy, save

Step = Callable[[Tensor], Tensor]

POLICY = policy(save("attention"), alternate("matmul"))
BASELINE, TORCH_FULL, STOCK, SAC_FULL = "none", "torch full", "stock SAC", "sac full"
ATTENTION = frozenset({torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default})
MATMULS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default})


def none(block: nn.Module) -> Step:
    return block


def torch_full(block: nn.Module) -> Step:
    return partial(checkpoint, block, use_reentrant=False)


class StockPolicy:
    """Attention and the 1st, 3rd, 5th … matmul, said the way torch's selective checkpointing is told it."""

    def __init__(self) -> None:
        self.matmuls = 0

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op in MATMULS:
            self.matmuls += 1
            return CheckpointPolicy.MUST_SAVE if self.matmuls % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE


def stock_sac(block: nn.Module) -> Step:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts(StockPolicy())

    return partial(checkpoint, block, use_reentrant=False, context_fn=contexts)


def torch_remat(block: nn.Module) -> Step:
    """The block under torch_remat's checkpoint, with its attention module as a region that is saved."""
    import torch_remat as remat

    original = block.self_attn.forward

    def region(x: Tensor) -> Tensor:
        out = remat.region(original, "attention", recompute=False)(x)
        remat.recompute_needs_tensor(out)
        return out

    block.self_attn.forward = region
    return remat.checkpoint(region_name="block")(block)


class Empty(TorchDispatchMode):
    """Does nothing, on every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def sac_apply(block: nn.Module, value: dict[str, Any]) -> Step:
    return sac.apply(nn.Sequential(block), {**value, "blocks": ["0"]})[0]


def sac_context_fn(block: nn.Module) -> Step:
    return partial(checkpoint, block, use_reentrant=False, context_fn=sac.context_fn(POLICY))


WAYS: dict[str, Callable[[nn.Module], Step]] = {
    BASELINE: none,
    TORCH_FULL: torch_full,
    STOCK: stock_sac,
    "torch_remat": torch_remat,
    "empty mode": none,
    SAC_FULL: partial(sac_apply, value={"mode": "full"}),
    "sac selective": partial(sac_apply, value={"mode": "selective", "policy": POLICY}),
    "sac.context_fn": sac_context_fn,
}
AROUND_BOTH_PASSES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {"empty mode": Empty}


def missing() -> dict[str, str]:
    """The ways that cannot run here, and why."""
    try:
        metadata.version("torch_remat")
    except metadata.PackageNotFoundError:
        return {"torch_remat": "the package torch_remat is not installed"}
    return {}
