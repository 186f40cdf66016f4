"""Exact FLOPs of backward, from no checkpointing over each policy to full: what is saved is not run again.

torch's selective checkpoint passes those of them that use no matcher of ours.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.support.blocks import FULL, Stack, alternate, install, llama_stack, policy, save, selective, tokens, ways
from tests.support.recording import Recorder, backward_ops
from tests.support.training import built

D, HIDDEN, ROWS = 32, 64, 2 * 8
SQUARE = 2 * ROWS * D * D  # one of q, k, v, o
FAT = 2 * ROWS * D * HIDDEN  # one of gate, up, down
FORWARD = 4 * SQUARE + 3 * FAT
BLOCKS = 2

LADDER: dict[str, tuple[Any, int]] = {
    # name: (value, FLOPs of the products that recomputation runs per block)
    "none": ("none", 0),
    "default save": (selective(policy(default="save")), 0),
    "every product": (selective(policy(save("matmul"))), 0),
    "everything by glob": (selective(policy(save("*"))), 0),
    # forward order is q, k, v, o, gate, up, down: run again are k, o, up
    "every second product": (selective(policy(alternate("matmul"))), 2 * SQUARE + FAT),
    "first product": (
        selective(policy(save("matmul", call={"index": [0]}, module="self_attn.q_proj"))),
        3 * SQUARE + 2 * FAT,
    ),
    "mlp": (selective(policy(save("matmul", module="mlp.*"))), 4 * SQUARE),
    "attention linears": (selective(policy(save("aten.mm", module="self_attn.**"))), 2 * FAT),
    "gate": (selective(policy(save("matmul", module="mlp.gate_proj"))), 4 * SQUARE + FAT),
    "wide outputs": (selective(policy(save("matmul", shape=["...", f">={HIDDEN}"]))), 4 * SQUARE),
    "attention": (selective(policy(save("attention"))), 4 * SQUARE + 2 * FAT),
    "attention by glob": (selective(policy(save("aten._scaled_dot_product_*"))), 4 * SQUARE + 2 * FAT),
    # down's value feeds only the residual sum: recomputation stops before it
    "nothing": (selective(policy()), 4 * SQUARE + 2 * FAT),
    "full": (FULL, 4 * SQUARE + 2 * FAT),
}
KEEP_ATTENTION = ("none", "default save", "everything by glob", "attention", "attention by glob")
WAYS = [("none", "apply")] + [
    way
    for way in ways({name: value for name, (value, _) in LADDER.items() if value != "none"})
    if way[1] != "context_fn" or "module" not in str(LADDER[way[0]][0])
]


def backward_flops(model: Stack, given: tuple[Tensor, ...]) -> int:
    """FLOPs of the products in backward; attention is counted apart, by calls."""
    out = model(*given)
    with Recorder() as recorder:
        out.sum().backward()
    model.zero_grad()
    return recorder.product_flops


@pytest.mark.parametrize(("name", "entry"), WAYS)
def test_backward_flops_are_exact(name: str, entry: str) -> None:
    value, again = LADDER[name]
    model = install(built(lambda: llama_stack(BLOCKS, D)), value, entry)
    given = tokens()
    given[0].requires_grad_()
    assert [backward_flops(model, given) for _ in range(3)] == [BLOCKS * (2 * FORWARD + again)] * 3
    ops = backward_ops(model, tokens()).ops.items()
    attention = sum(count for op, count in ops if "scaled_dot_product" in op and "backward" not in op)
    assert attention == (0 if name in KEEP_ATTENTION else BLOCKS)
