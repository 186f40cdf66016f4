"""sac.apply, then torch.compile of the whole model: one graph, the same gradients, and the policy in the partition.

The oracle is the compiled model without us. What the partitioner was told is counted in the backward graph: each of the
two blocks has seven matrix products, of which `full` runs six again (nothing in backward reads the last one's result).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.reporting import decisions_of
from tests.support.blocks import (
    FULL,
    Stack,
    alternate,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    with_dropout,
)
from tests.support.compiling import Compiled, count, nothing, skip_if_results_are_not_told, train_compiled
from tests.support.training import assert_nearly_same, assert_same, built, new_tensors_in

PLAIN = 28  # matrix products in the backward of two blocks: two per product of the forward

# Of other values see test_compiled_orders and test_compile_modules.
VALUES: dict[str, tuple[Any, int]] = {
    "save one linear of three alike": (selective(policy(save("matmul", module="self_attn.k_proj"))), 10),
    "save the products of one child": (selective(policy(save("matmul", module="self_attn.**"))), 4),
    "save in the first block": (selective(policy(save("matmul", layers={"first": 1}))), 6),
    "save by shape": (selective(policy(save("matmul", shape=["_", 64]))), 8),
    "save the first call": (selective(policy(save("aten.mm", call={"index": 0}, module="mlp.gate_proj"))), 10),
    "save by default": (selective(policy(default="save")), 0),
}


@functools.cache
def without_us() -> tuple[dict[str, Tensor], Compiled]:
    return train_compiled(llama_stack, nothing)


@pytest.mark.parametrize(("value", "again"), VALUES.values(), ids=VALUES.keys())
def test_decisions_reach_the_partitioner(value: Any, again: int) -> None:
    skip_if_results_are_not_told(value)
    reference, plain = without_us()
    ours, log = train_compiled(llama_stack, lambda model: sac.apply(model, value))
    assert plain.products() == [PLAIN]
    assert log.products() == [PLAIN + again]
    assert len(log.forward) == 1
    assert_same(reference, ours)


def eager_rows(value: Any) -> set[tuple[str, int, str]]:
    """What the eager engine decides for each matrix product."""
    model = sac.apply(built(llama_stack), value)
    model(*tokens()).sum().backward()
    return {(row.module, row.call, row.decision) for row in decisions_of(model) if row.op == "aten.mm.default"}


def test_eager_and_compiled_decide_alike() -> None:
    rows = eager_rows(selective(policy(alternate("matmul"))))
    saved = {module for module, _, decision in rows if decision == "save"}
    assert saved == {"self_attn.q_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.down_proj"}
    _, by_turn = train_compiled(llama_stack, lambda m: sac.apply(m, selective(policy(alternate("matmul")))))
    named = selective(policy(save("matmul", module="{" + ",".join(sorted(saved)) + "}")))
    _, by_name = train_compiled(llama_stack, lambda m: sac.apply(m, named))
    saved_by = [[node.name for node in log.forward[0].graph.nodes if node.op == "output"] for log in (by_turn, by_name)]
    assert saved_by[0] == saved_by[1]
    assert by_turn.products() == by_name.products() == [PLAIN + 6]


def test_dropout_draws_as_it_did() -> None:
    def build() -> nn.Module:
        return with_dropout(llama_stack(), 0.3)

    reference, _ = train_compiled(build, nothing, steps=2)
    for value in (FULL, selective(policy(save("matmul")))):
        ours, _ = train_compiled(build, lambda model, value=value: sac.apply(model, value), steps=2)
        assert_same(reference, ours)


class TwoWeights(nn.Module):
    """A block of two square weights; Dynamo allows no counter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(8, 8) / 8**0.5) for _ in range(2))


class Routed(TwoWeights):
    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = (x @ self.a).softmax(-1).topk(2)
        return (x @ self.b).gather(1, chosen) * weights


def test_routing_is_not_run_again_in_full() -> None:
    topk = torch.ops.aten.topk.default

    def build() -> nn.Module:
        return Stack(Routed())

    reference, _ = train_compiled(build, nothing, make_input=square)
    ours, log = train_compiled(build, lambda model: sac.apply(model, FULL), make_input=square)
    assert count(log.forward[0], topk) == 1
    assert count(log.backward[0], topk) == 0
    assert log.products() == [6]  # and both products before it are
    assert_same(reference, ours)


class Written(TwoWeights):
    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.a
        y.relu_()
        z = y @ self.b
        z.add_(1.0)
        return z.sigmoid() * y


def test_saved_value_may_be_written_to() -> None:
    def build() -> nn.Module:
        return Stack(Written(), Written())

    reference, _ = train_compiled(build, nothing, make_input=square)
    for value in (FULL, selective(policy(save("matmul")))):
        ours, _ = train_compiled(build, lambda model, value=value: sac.apply(model, value), make_input=square)
        assert_same(reference, ours)


def test_remove_after_compile_is_seen() -> None:
    torch._dynamo.reset()
    log = Compiled()
    model = sac.apply(built(llama_stack), FULL)
    compiled = torch.compile(model, backend=log.backend, fullgraph=True)
    compiled(*tokens()).sum().backward()
    sac.remove(model)
    compiled(*tokens()).sum().backward()
    assert log.products() == [PLAIN + 12, PLAIN]


def test_forward_without_grad_compiles_to_the_plain_one() -> None:
    torch._dynamo.reset()
    model, plain = sac.apply(built(llama_stack), FULL), built(llama_stack)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = tokens()
    with torch.no_grad():
        assert torch.equal(compiled(*x), plain(*x))


def test_inductor() -> None:
    """Other backends are handed the same graphs. Without CUDA graphs to make, this mode of it is inductor as ever."""
    value = selective(policy(save("attention"), alternate("matmul")))

    def one_block() -> nn.Module:
        return llama_stack(1)

    def with_inductor(model: nn.Module, backend: Any) -> Any:
        return torch.compile(model, mode="reduce-overhead", fullgraph=True)

    with new_tensors_in(torch.float64):
        reference, _ = train_compiled(one_block, nothing, compile_it=with_inductor)
        ours, _ = train_compiled(one_block, lambda m: sac.apply(m, value), compile_it=with_inductor)
    assert_nearly_same(reference, ours)
