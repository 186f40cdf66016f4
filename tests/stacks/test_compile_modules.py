"""Rules that name modules under torch.compile, by whichever way the block comes to be compiled.

Under compilation no module of a block runs; which one an op came from is read off the graph that Dynamo hands on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import (
    FULL,
    LlamaLikeBlock,
    Stack,
    install,
    llama_stack,
    policy,
    save,
    selective,
    tokens,
)
from tests.support.compiling import nothing, train_compiled
from tests.support.training import assert_same, built

GATE = selective(policy(save("matmul", module="mlp.gate_proj")))
PER_BLOCK = 14  # matrix products in the backward of one block; `full` runs six again


def by_compile(block: nn.Module, backend: Any) -> None:
    block.compile(backend=backend, fullgraph=True)


def by_forward(block: nn.Module, backend: Any) -> None:
    block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)


def each_block(way: Callable[..., None]) -> Callable[[nn.Module, Any], None]:
    def compile_blocks(model: nn.Module, backend: Any) -> None:
        for block in model.blocks:
            way(block, backend)

    return compile_blocks


VALUES = {"full": (FULL, 6), "every product": (selective(policy(save("matmul"))), 0), "one linear": (GATE, 5)}
ONE_BY_ONE = each_block(by_compile)
FORWARD_BY_FORWARD = each_block(by_forward)


@functools.cache
def without_us(way: Callable[[nn.Module, Any], Any] | None = None) -> dict[str, Tensor]:
    return train_compiled(llama_stack, nothing, compile_it=way)[0]


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (ONE_BY_ONE, "every product"),
        (ONE_BY_ONE, "one linear"),
        (FORWARD_BY_FORWARD, "full"),
        (FORWARD_BY_FORWARD, "one linear"),
    ],
    ids=["block, every product", "block, one linear", "forward, full", "forward, one linear"],
)
def test_blocks_compiled_after_apply(way: Callable[[nn.Module, Any], None], name: str) -> None:
    value, again = VALUES[name]
    ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=way)
    assert log.products() == [PER_BLOCK + again] * len(log.backward)
    assert log.backward
    assert_same(without_us(way), ours)


def test_blocks_compiled_before_apply() -> None:
    """Of the other values see test_compiled_orders."""

    def compile_then_apply(model: nn.Module, backend: Any) -> None:
        ONE_BY_ONE(model, backend)
        sac.apply(model, GATE)

    ours, log = train_compiled(llama_stack, nothing, compile_it=compile_then_apply)
    assert log.products() == [PER_BLOCK + 5] * len(log.backward)
    assert log.backward
    assert_same(without_us(ONE_BY_ONE), ours)


def test_blocks_of_two_tables_are_compiled_apart() -> None:
    value = selective(policy(save("matmul", layers={"first": 1})))
    ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=ONE_BY_ONE)
    assert sorted(log.products()) == [PER_BLOCK, PER_BLOCK + 6]
    assert_same(without_us(ONE_BY_ONE), ours)


def test_alike_blocks_are_compiled_once() -> None:
    """As without us; past `recompile_limit` (8) Dynamo gives up on the ninth block."""
    _, plain = train_compiled(lambda: llama_stack(10), nothing, compile_it=ONE_BY_ONE)
    _, log = train_compiled(lambda: llama_stack(10), lambda m: sac.apply(m, GATE), compile_it=ONE_BY_ONE)
    assert len(plain.forward) == 1
    assert len(log.forward) == 1


def test_compiled_forward_below_a_region_is_run_again_as_a_whole() -> None:
    """Here the region is around what is compiled: eager, exact, and its ops are those of the compiled graphs."""

    def compile_then_apply(model: nn.Module, backend: Any) -> None:
        FORWARD_BY_FORWARD(model, backend)
        sac.apply(model, FULL)

    reference, _ = train_compiled(llama_stack, nothing, compile_it=FORWARD_BY_FORWARD, steps=2)
    ours, log = train_compiled(llama_stack, nothing, compile_it=compile_then_apply, steps=2)
    assert log.products() == [PER_BLOCK] * len(log.backward)
    assert_same(reference, ours)


SUBMODULE_VALUES = {
    "full": FULL,
    "every product": selective(policy(save("matmul"))),
    "one linear": selective(policy(save("matmul", module="self_attn.k_proj"))),
}


@functools.cache
def with_compiled_mlps() -> dict[str, Tensor]:
    return train_compiled(llama_stack, nothing, compile_it=compile_mlps, steps=3)[0]


def compile_mlps(model: nn.Module, backend: Any) -> None:
    for block in model.blocks:
        block.mlp.compile(backend=backend, fullgraph=True)


@pytest.mark.parametrize(
    ("first", "name"),
    [("compile", "full"), ("apply", "every product"), ("apply", "one linear"), ("compile", "one linear")],
)
def test_compiled_submodule_in_an_eager_region(first: str, name: str) -> None:
    def compile_and_apply(model: nn.Module, backend: Any) -> None:
        if first == "apply":
            sac.apply(model, SUBMODULE_VALUES[name])
        compile_mlps(model, backend)
        if first == "compile":
            sac.apply(model, SUBMODULE_VALUES[name])

    ours, _ = train_compiled(llama_stack, nothing, compile_it=compile_and_apply, steps=3)
    assert_same(with_compiled_mlps(), ours)


class Inside(nn.Module):
    """A model that holds the stack, so that the blocks lie deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama_stack()
        self.head = nn.Linear(32, 32)
        self.aliases = [block.mlp for block in self.inner.blocks]  # a second way to the same modules

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


def test_block_below_the_compiled_model() -> None:
    reference, plain = train_compiled(Inside, nothing)
    for entry in ("apply", "context_fn with module"):
        ours, log = train_compiled(Inside, lambda model, entry=entry: install(model.inner, GATE, entry))
        assert [plain.products(), log.products()] == [[30], [30 + 11]]  # the head reads the last block's last product
        assert_same(reference, ours)


class ChecksItself(LlamaLikeBlock):
    """Calls torch's checkpoint on a part of itself, with what `sac.context_fn` gave."""

    contexts: Callable[[], Any] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.contexts is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=self.contexts)

    def inner(self, x: Tensor) -> Tensor:
        return LlamaLikeBlock.forward(self, x)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
def test_context_fn_inside_the_block(whole: bool) -> None:
    def build() -> nn.Module:
        return Stack(ChecksItself(), ChecksItself())

    def put(model: nn.Module) -> None:
        for block in model.blocks:
            block.contexts = sac.context_fn(GATE["policy"], module=block)

    way = None if whole else ONE_BY_ONE
    reference, _ = train_compiled(build, nothing, compile_it=way)
    ours, log = train_compiled(build, put, compile_it=way)
    assert sum(log.products()) == 2 * (PER_BLOCK + 5)
    assert_same(reference, ours)


def test_context_fn_without_module() -> None:
    value = selective(policy(save("matmul")))
    ours, log = train_compiled(llama_stack, lambda model: install(model, value, "context_fn"))
    assert log.products() == [2 * PER_BLOCK]
    assert_same(without_us(), ours)


def test_model_that_is_one_block() -> None:
    value = {"mode": "selective", "policy": GATE["policy"]}
    reference, _ = train_compiled(LlamaLikeBlock, nothing)
    ours, log = train_compiled(LlamaLikeBlock, lambda model: sac.apply(model, value))
    assert log.products() == [PER_BLOCK + 5]
    assert_same(reference, ours)


def test_model_called_by_a_compiled_function() -> None:
    def as_function(model: nn.Module, backend: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            return 1.0 * model(x)

        return torch.compile(call, backend=backend, fullgraph=True)

    reference, _ = train_compiled(llama_stack, nothing, compile_it=as_function)
    ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, GATE), compile_it=as_function)
    assert log.products() == [2 * (PER_BLOCK + 5)]
    assert_same(reference, ours)


def test_rule_on_a_module_cannot_see_into_a_compiled_block() -> None:
    torch._dynamo.reset()
    model = built(llama_stack)
    FORWARD_BY_FORWARD(model, "aot_eager")
    sac.apply(model, {**GATE, "strict": True})
    with pytest.raises(sac.SacError) as caught:
        model(*tokens())
    assert str(caught.value) == (
        'activation_checkpointing.policy.rules[0]: rule "rule-0" matched no op in any region of the model\n'
        "    fix: `sac trace` lists the ops there are; mark the rule `optional: true` if it may match nothing"
    )
