"""Rules that name modules under torch.compile, by whichever way the block comes to be compiled.

Under compilation no module of a block runs; which one an op came from is read off the graph that Dynamo hands on.
"""

from __future__ import annotations

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


@pytest.mark.parametrize(("value", "again"), VALUES.values(), ids=VALUES.keys())
@pytest.mark.parametrize("way", [by_compile, by_forward])
def test_blocks_compiled_after_apply(way: Callable[..., None], value: Any, again: int) -> None:
    reference, _ = train_compiled(llama_stack, nothing, compile_it=each_block(way))
    ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=each_block(way))
    assert log.products() == [PER_BLOCK + again] * len(log.backward)
    assert log.backward
    assert_same(reference, ours)


@pytest.mark.parametrize(("value", "again"), VALUES.values(), ids=VALUES.keys())
def test_blocks_compiled_before_apply(value: Any, again: int) -> None:
    def compile_then_apply(model: nn.Module, backend: Any) -> None:
        each_block(by_compile)(model, backend)
        sac.apply(model, value)

    reference, _ = train_compiled(llama_stack, nothing, compile_it=each_block(by_compile))
    ours, log = train_compiled(llama_stack, nothing, compile_it=compile_then_apply)
    assert log.products() == [PER_BLOCK + again] * len(log.backward)
    assert_same(reference, ours)


def test_blocks_of_two_tables_are_compiled_apart() -> None:
    value = selective(policy(save("matmul", layers={"first": 1})))
    reference, _ = train_compiled(llama_stack, nothing, compile_it=each_block(by_compile))
    ours, log = train_compiled(llama_stack, lambda m: sac.apply(m, value), compile_it=each_block(by_compile))
    assert sorted(log.products()) == [PER_BLOCK, PER_BLOCK + 6]
    assert_same(reference, ours)


def test_alike_blocks_are_compiled_once() -> None:
    """As without us; past `recompile_limit` (8) Dynamo gives up on the ninth block."""
    _, plain = train_compiled(lambda: llama_stack(10), nothing, compile_it=each_block(by_compile))
    _, log = train_compiled(lambda: llama_stack(10), lambda m: sac.apply(m, GATE), compile_it=each_block(by_compile))
    assert len(plain.forward) == 1
    assert len(log.forward) == 1


def test_compiled_forward_below_a_region_is_run_again_as_a_whole() -> None:
    """Here the region is around what is compiled: eager, exact, and its ops are those of the compiled graphs."""

    def compile_then_apply(model: nn.Module, backend: Any) -> None:
        each_block(by_forward)(model, backend)
        sac.apply(model, FULL)

    reference, _ = train_compiled(llama_stack, nothing, compile_it=each_block(by_forward), steps=2)
    ours, log = train_compiled(llama_stack, nothing, compile_it=compile_then_apply, steps=2)
    assert log.products() == [PER_BLOCK] * len(log.backward)
    assert_same(reference, ours)


SUBMODULE_VALUES = {
    "full": FULL,
    "every product": selective(policy(save("matmul"))),
    "one linear": selective(policy(save("matmul", module="self_attn.k_proj"))),
}


@pytest.mark.parametrize("value", SUBMODULE_VALUES.values(), ids=SUBMODULE_VALUES.keys())
@pytest.mark.parametrize("first", ["apply", "compile"])
def test_compiled_submodule_in_an_eager_region(first: str, value: Any) -> None:
    def compile_mlps(model: nn.Module, backend: Any) -> None:
        if first == "apply":
            sac.apply(model, value)
        for block in model.blocks:
            block.mlp.compile(backend=backend, fullgraph=True)
        if first == "compile":
            sac.apply(model, value)

    def compile_only(model: nn.Module, backend: Any) -> None:
        for block in model.blocks:
            block.mlp.compile(backend=backend, fullgraph=True)

    reference, _ = train_compiled(llama_stack, nothing, compile_it=compile_only, steps=3)
    ours, _ = train_compiled(llama_stack, nothing, compile_it=compile_mlps, steps=3)
    assert_same(reference, ours)


class Inside(nn.Module):
    """A model that holds the stack, so that the blocks lie deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama_stack()
        self.head = nn.Linear(32, 32)
        self.aliases = [block.mlp for block in self.inner.blocks]  # a second way to the same modules

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.mark.parametrize("entry", ["apply", "context_fn with module"])
def test_block_below_the_compiled_model(entry: str) -> None:
    reference, plain = train_compiled(Inside, nothing)
    ours, log = train_compiled(Inside, lambda model: install(model.inner, GATE, entry))
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

    way = None if whole else each_block(by_compile)
    reference, _ = train_compiled(build, nothing, compile_it=way)
    ours, log = train_compiled(build, put, compile_it=way)
    assert sum(log.products()) == 2 * (PER_BLOCK + 5)
    assert_same(reference, ours)


def test_context_fn_without_module() -> None:
    value = selective(policy(save("matmul")))
    reference, _ = train_compiled(llama_stack, nothing)
    ours, log = train_compiled(llama_stack, lambda model: install(model, value, "context_fn"))
    assert log.products() == [2 * PER_BLOCK]
    assert_same(reference, ours)


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
    each_block(by_forward)(model, "aot_eager")
    sac.apply(model, {**GATE, "strict": True})
    with pytest.raises(sac.SacError) as caught:
        model(*tokens())
    assert str(caught.value) == (
        'activation_checkpointing.policy.rules[0]: rule "rule-0" matched no op in any region of the model\n'
        "    fix: `sac trace` lists the ops there are; mark the rule `optional: true` if it may match nothing"
    )
