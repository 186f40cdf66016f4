"""The ways to checkpoint blocks that `bench_overhead.py` and `bench_gpu.py` compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sac
from tests.support.blocks import LlamaLikeBlock, alternate, policy, save

Step = Callable[[Tensor], Tensor]

POLICY = policy(save("attention"), alternate("matmul"))
ATTENTION_MODULE = policy({"module": "self_attn", "do": "save"})
BASELINE, TORCH_FULL, STOCK, REMAT, EMPTY = "none", "torch full", "stock SAC", "torch_remat", "empty mode"
SAC_FULL, RERUN, REPLAY, CONTEXT_FN = "sac full", "sac rerun", "sac replay", "sac.context_fn"
WHOLE_MODULE = "sac whole module"

ATEN = torch.ops.aten
ATTENTION = frozenset({
    ATEN._scaled_dot_product_flash_attention_for_cpu.default, ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_efficient_attention.default, ATEN._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip
ROUTING = frozenset({ATEN.topk.default, ATEN.nonzero.default})  # sac keeps them under every policy
MATMULS = frozenset({ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default})


def chain(steps: list[Step]) -> Step:
    """One after the other."""

    def run(x: Tensor) -> Tensor:
        for step in steps:
            x = step(x)
        return x

    return run


def none(blocks: nn.Sequential) -> Step:
    return chain(list(blocks))


def torch_full(blocks: nn.Sequential) -> Step:
    return chain([partial(checkpoint, block, use_reentrant=False) for block in blocks])


class StockPolicy:
    """What `POLICY` says, in the form that torch's selective checkpointing takes: attention, and every other matmul.

    torch 2.11 and 2.12 ask in recomputation too, and count from the start there.
    """

    def __init__(self) -> None:
        self.matmuls = [0, 0]

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op in ATTENTION or op in ROUTING:
            return CheckpointPolicy.MUST_SAVE
        if op in MATMULS:
            self.matmuls[context.is_recompute] += 1
            is_odd = self.matmuls[context.is_recompute] % 2
            return CheckpointPolicy.MUST_SAVE if is_odd else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE


def stock_contexts() -> Any:
    return create_selective_checkpoint_contexts(StockPolicy())


def stock_sac(blocks: nn.Sequential) -> Step:
    return chain([partial(checkpoint, block, use_reentrant=False, context_fn=stock_contexts) for block in blocks])


def torch_remat(blocks: nn.Sequential) -> Step:
    """Each block under torch_remat's checkpoint, with its attention module as a region that is saved."""
    import torch_remat as remat

    def saved(forward: Step, x: Tensor) -> Tensor:
        out = remat.region(forward, "attention", recompute=False)(x)
        remat.recompute_needs_tensor(out)
        return out

    for block in blocks:
        block.self_attn.forward = partial(saved, block.self_attn.forward)
    return chain([remat.checkpoint(region_name=f"block {index}")(block) for index, block in enumerate(blocks)])


class Empty(TorchDispatchMode):
    """Does nothing, on every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def sac_apply(blocks: nn.Sequential, value: dict[str, Any]) -> Step:
    return chain(list(sac.apply(blocks, {**value, "blocks": ["*"]})))


def sac_context_fn(blocks: nn.Sequential) -> Step:
    contexts = sac.context_fn(POLICY)
    return chain([partial(checkpoint, block, use_reentrant=False, context_fn=contexts) for block in blocks])


WAYS: dict[str, Callable[[nn.Sequential], Step]] = {
    BASELINE: none,
    TORCH_FULL: torch_full,
    REMAT: torch_remat,
    EMPTY: none,
    STOCK: stock_sac,
    SAC_FULL: partial(sac_apply, value={"mode": "full"}),
    RERUN: partial(sac_apply, value={"mode": "selective", "policy": POLICY, "engine": "rerun"}),
    REPLAY: partial(sac_apply, value={"mode": "selective", "policy": POLICY, "engine": "replay"}),
    CONTEXT_FN: sac_context_fn,
    WHOLE_MODULE: partial(sac_apply, value={"mode": "selective", "policy": ATTENTION_MODULE}),
}
AROUND_BOTH_PASSES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {EMPTY: Empty}


def cannot_run() -> dict[str, str]:
    """The ways that cannot run here, and why: a package that is not installed, a policy that is refused."""
    reasons = {}
    for mode, put in WAYS.items():
        try:
            put(nn.Sequential(LlamaLikeBlock()))
        except (ModuleNotFoundError, sac.SacError) as error:
            reasons[mode] = f"cannot run: {str(error).splitlines()[0]}"
    return reasons
