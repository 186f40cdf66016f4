"""A model with a policy on it looks, copies, pickles and loads as it did, and is given back as it was.

torch's `checkpoint_wrapper` fails the rows on names and `isinstance`.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from tests.support import custom_ops  # noqa: F401  (registers the ops that are named here)
from tests.support.blocks import (
    FULL,
    FunctionBlock,
    LlamaLikeBlock,
    Stack,
    alternate,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    under_each_engine,
    whole,
    with_dropout,
)
from tests.support.pairs import in_pairs
from tests.support.recording import backward_ops
from tests.support.runs import runs_of
from tests.support.training import assert_same, assert_same_training, built, train

ATTENTION_AND_ALTERNATING = selective(policy(save("attention"), alternate("matmul")))
VALUES = under_each_engine({"full": FULL, "attention and alternating matmuls": ATTENTION_AND_ALTERNATING})
ON_EACH_VALUE = pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())


def dropped_llama() -> nn.Module:
    return with_dropout(llama_stack())


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Every attribute of every module, tensors and children by identity."""
    return {name: dict(vars(module)) for name, module in model.named_modules()}


def flat(model: nn.Module) -> dict[str, Any]:
    """As above with the dictionaries that torch fills in place told apart too."""
    return {
        f"{name}.{key}": (dict(value) if isinstance(value, dict) else value)
        for name, held in attributes(model).items()
        for key, value in held.items()
    }


def products(model: Stack) -> int:
    count = backward_ops(model, tokens()).ops["aten.mm.default"]
    model.zero_grad()
    return count


@ON_EACH_VALUE
def test_names_and_types_are_unchanged(value: Any) -> None:
    model, twin = built(dropped_llama), built(dropped_llama)
    sac.apply(model, value)
    for _ in range(2):
        assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in twin.named_parameters()]
        assert [name for name, _ in model.named_buffers()] == [name for name, _ in twin.named_buffers()]
        assert list(model.state_dict()) == list(twin.state_dict())
        assert [type(module) for module in model.modules()] == [type(module) for module in twin.modules()]
        assert all(isinstance(block, LlamaLikeBlock) for block in model.blocks)
        assert repr(model) == repr(twin)
        train(model)  # and so it stays once it has run


@ON_EACH_VALUE
def test_state_dict_loads_both_ways(value: Any) -> None:
    model, other = sac.apply(built(dropped_llama), value), built(dropped_llama, seed=5)
    other.load_state_dict(model.state_dict(), strict=True)
    assert_same(train(other), train(model))
    model.load_state_dict(built(dropped_llama, seed=9).state_dict(), strict=True)
    assert_same(train(built(dropped_llama, seed=9)), train(model))


@ON_EACH_VALUE
def test_deepcopy_uses_its_own_weights(value: Any) -> None:
    model = sac.apply(built(dropped_llama), value)
    train(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    reference = built(dropped_llama)
    reference.load_state_dict(twin.state_dict())
    model_before = {name: x.clone() for name, x in model.state_dict().items()}
    assert_same(train(reference, steps=2), train(twin, steps=2))
    assert all(torch.equal(x, model_before[name]) for name, x in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@ON_EACH_VALUE
def test_deepcopy_still_recomputes_and_can_be_removed_alone(value: Any) -> None:
    model = sac.apply(built(llama_stack), value)
    expected = products(model)
    twin = copy.deepcopy(model)
    assert products(twin) == expected
    sac.remove(twin)
    assert products(twin) == products(built(llama_stack))
    assert products(model) == expected


@in_pairs(value=VALUES, way=["pickle", "torch.save"], after_a_step={"fresh": False, "after a step": True})
def test_round_trip_through_bytes(value: Any, way: str, after_a_step: bool) -> None:
    model = sac.apply(built(llama_stack), value)
    expected = products(model) if after_a_step else products(sac.apply(built(llama_stack), value))
    if way == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        again = torch.load(file, weights_only=False)
    assert products(again) == expected
    assert_same(train(built(llama_stack), steps=2), train(again, steps=2))
    sac.remove(again)
    assert products(again) == products(built(llama_stack))


@ON_EACH_VALUE
def test_hooks_on_the_region_run_once(value: Any) -> None:
    model = sac.apply(built(dropped_llama), value)
    calls: list[str] = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda *_: calls.append("forward pre"))
    block.register_forward_hook(lambda *_: calls.append("forward"))
    block.register_full_backward_pre_hook(lambda *_: calls.append("backward pre"))
    block.register_full_backward_hook(lambda *_: calls.append("backward"))
    for _ in range(2):
        calls.clear()
        (x,) = tokens()
        out = model(x.requires_grad_())
        assert calls == ["forward pre", "forward"]
        out.sum().backward()
        assert calls == ["forward pre", "forward", "backward pre", "backward"]


@ON_EACH_VALUE
def test_hook_that_changes_the_input_is_not_applied_twice(value: Any) -> None:
    def build() -> nn.Module:
        model = dropped_llama()
        model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,))
        model.blocks[1].register_forward_hook(lambda _, args, out: out + args[0])
        return model

    assert_same(train(built(build), steps=2), train(sac.apply(built(build), value), steps=2))


@ON_EACH_VALUE
@pytest.mark.parametrize("after_a_step", [False, True], ids=["fresh", "after a step"])
def test_remove_gives_the_model_back(value: Any, after_a_step: bool) -> None:
    model = built(dropped_llama)
    before = flat(model)
    sac.apply(model, value)
    if after_a_step:
        backward_ops(model, tokens())
        model.zero_grad()
    sac.remove(model)
    assert flat(model) == before
    assert_same(train(built(dropped_llama)), train(model))


class Doubled:
    """A picklable `forward` that someone else put on a block before us."""

    def __init__(self, block: LlamaLikeBlock) -> None:
        self.block = block

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * LlamaLikeBlock.forward(self.block, x)


@ON_EACH_VALUE
def test_forward_that_stood_on_the_instance_is_used_and_restored(value: Any) -> None:
    def build() -> nn.Module:
        model = llama_stack()
        for block in model.blocks:
            block.forward = Doubled(block)
        return model

    model = built(build)
    theirs = [vars(block)["forward"] for block in model.blocks]
    sac.apply(model, value)
    assert_same(train(built(build)), train(model))
    sac.remove(model)
    assert [vars(block)["forward"] for block in model.blocks] == theirs


def part_then_product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (block.part(x) @ block.a).sin()


def part_then_exponential(block: FunctionBlock, x: Tensor) -> Tensor:
    return block.part(x).exp().sin()


def test_forward_that_stood_on_a_module_saved_as_a_whole_is_used() -> None:
    def build() -> Stack:
        model = Stack(FunctionBlock(part_then_product, part=nn.Linear(8, 8)))
        part = model.blocks[0].part
        part.forward = lambda x: nn.Linear.forward(part, x).exp()
        return model

    assert_same_training(build, selective(policy(whole("part"))), make_input=square)


def test_torchs_hooks_keep_their_place_around_a_module_saved_as_a_whole() -> None:
    """Nothing is missing, so torch need not run the region again, if our hooks still stand before its own."""
    model = Stack(FunctionBlock(part_then_exponential, part=nn.Linear(8, 8)))
    install(model, selective(policy(whole("part"), save("aten.exp"))), "context_fn with module")
    model(*(x.requires_grad_() for x in square())).sum().backward()
    assert runs_of(model.blocks[0]) == 1


@ON_EACH_VALUE
def test_apply_again_after_remove(value: Any) -> None:
    model = built(llama_stack)
    for _ in range(2):
        sac.apply(model, ATTENTION_AND_ALTERNATING)
        sac.remove(model)
    sac.apply(model, value)
    assert products(model) == products(sac.apply(built(llama_stack), value))


REFUSED = {
    "unknown op": selective(policy(save("aten.no_such_op"))),
    "unknown set": selective(policy(save("atention"))),
    "mutating op": selective(policy(save("aten.relu_"))),
    "view": selective(policy(save("aten.view"))),
    "factory": selective(policy(save("aten.zeros_like"))),
    "out-variant custom op": selective(policy(save("sactest::fill_tanh"))),
    "unknown decision": selective(policy({"ops": "matmul", "do": "keep"})),
    "unknown key": selective(policy(save("matmul", modul="mlp"))),
    "no such blocks": {**ATTENTION_AND_ALTERNATING, "blocks": ["layers.*"]},
    "unknown config key": {**ATTENTION_AND_ALTERNATING, "block": ["blocks.*"]},
    "unknown mode": {**ATTENTION_AND_ALTERNATING, "mode": "selectiv"},
    "empty mapping": {},
    "unknown name": "no-such-policy",
    "wrong type": 7,
}


@pytest.mark.parametrize("value", REFUSED.values(), ids=REFUSED.keys())
def test_failing_apply_leaves_the_model_untouched(value: Any) -> None:
    model = built(llama_stack)
    before = flat(model)
    with pytest.raises(sac.SacError) as caught:
        sac.apply(model, value)
    assert isinstance(caught.value, ValueError)
    assert flat(model) == before
    assert_same(train(built(llama_stack)), train(model))
