"""Stores that keep a copy of the input: the caller's tensor is free, every byte is counted, and errors lose nothing."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.errors import SacWarning
from sac.full import FullConfig
from tests.dangers.test_04_versions_and_views import VIEWS
from tests.support.blocks import FULL, FunctionBlock, Stack, alternate, llama_stack, policy, save, selective, tokens
from tests.support.cases import Run, Seen, seen
from tests.support.recording import Recorder, without_collector
from tests.support.stored_regions import as_region, wrong
from tests.support.training import assert_same_training, built

STORES: dict[str, dict[str, Any]] = {
    "host": {"store": "host"},
    "contiguous": {"store": "contiguous", "num_checkpoints": 2},
}
SELECTIVE = selective(policy(save("attention", optional=True), alternate("matmul")))
every_store = pytest.mark.parametrize("store", STORES)


def product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


# -- The caller's tensor


def calls(store: str, block: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """The ways in which the block is called as a region with this store; all share its weights."""
    given = STORES[store]
    values = [{**FULL, **given}, *({**SELECTIVE, "engine": engine, **given} for engine in ("rerun", "replay"))]
    by_function = [partial(as_region(store, reentrant), block) for reentrant in (False, True)]
    return [*by_function, *(sac.apply(Stack(copy.copy(block)), value).blocks[0] for value in values)]


@every_store
def test_the_callers_tensor_is_his_own(store):
    """He may drop it, or write to it, between forward and backward; we never do."""
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(product(block, leaf.exp()).sum(), [leaf, block.a, block.b])
    for run in calls(store, block):
        with without_collector():
            for _ in range(3):
                leaf.grad = block.a.grad = block.b.grad = None
                x = leaf.exp()
                before, version, address = x.detach().clone(), x._version, x.data_ptr()
                run(x).sum().backward()
                assert torch.equal(x, before)
                assert (x._version, x.data_ptr()) == (version, address)
                assert all(map(torch.equal, expected, [leaf.grad, block.a.grad, block.b.grad]))
                x = leaf.detach().exp().add(1)
                tensor, storage = weakref.ref(x), StorageWeakRef(x.untyped_storage())
                out = run(x)
                x.fill_(float("nan"))
                del x
                assert tensor() is None
                assert storage.expired()
                del out


@every_store
def test_two_backwards_of_a_region_that_writes_to_its_input(store):
    """The first recomputation leaves the kept copy as it was."""
    found = []
    for value in ("none", {**FULL, **STORES[store]}):
        leaf = torch.linspace(-1, 1, 8, requires_grad=True)
        model = sac.apply(Stack(FunctionBlock(lambda block, x: x.mul_(0.5).sin())), value)
        out = model(leaf * 1.5).square().sum()
        out.backward(retain_graph=True)
        out.backward()
        found.append(leaf.grad)
    assert torch.equal(*found)


@every_store
def test_every_kept_byte_is_counted_and_goes(store):
    value = FullConfig(**STORES[store])
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    held = 256 * (value.num_checkpoints or 1)
    with without_collector():
        for turn in range(3):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            made_now = turn == 0 or "contiguous" not in store  # the buffer is made once
            assert recorder.live_bytes(besides=out) == made_now * held
            with recorder:
                out.sum().backward()
            del out
            leaf.grad = block.a.grad = block.b.grad = None
            assert recorder.live_bytes() == (held if turn == 0 and "contiguous" in store else 0)


# -- Errors, graphs and copies of the model


def one_slot(store: str) -> FullConfig:
    return FullConfig(**{**STORES[store], **({"num_checkpoints": 1} if "contiguous" in store else {})})


@every_store
def test_a_slot_is_free_after_an_error_and_without_grad(store):
    value, x = one_slot(store), torch.randn(8, requires_grad=True)

    def fails(h: Tensor) -> Tensor:
        raise ValueError("out of luck")

    with without_collector():
        for _ in range(3):
            with pytest.raises(ValueError, match="out of luck"):
                sac.checkpoint(fails, x * 1, config=value)
            with torch.no_grad():
                sac.checkpoint(torch.sin, x * 1, config=value)
        sac.checkpoint(torch.sin, x * 1, config=value).sum().backward()
    assert torch.equal(x.grad, x.cos())


@every_store
def test_what_one_backward_leaves_for_a_later_one_is_not_overwritten(store):
    """The first backward runs the region again, and gives the slot back; the second reads what it left."""
    value, x = one_slot(store), torch.randn(8, 8)
    block = FunctionBlock(lambda block, x: (x @ block.a, x @ block.b))
    left, right = sac.checkpoint(block, x.clone(), config=value)
    [first] = torch.autograd.grad(left.sum(), [block.a])
    other = sac.checkpoint(block, torch.full((8, 8), 1000.0), config=value)  # the same slot, another input
    [second] = torch.autograd.grad(right.sum(), [block.b])
    assert torch.equal(first, x.t() @ torch.ones(8, 8))
    assert torch.equal(second, first)
    del other


@pytest.mark.parametrize("mode", [FULL, SELECTIVE], ids=["full", "selective"])
@every_store
def test_hooks_around_the_region_decide(mode, store):
    value = {**mode, **STORES[store]}
    assert_same_training(llama_stack, value, steps=2, around_forward=torch.autograd.graph.save_on_cpu)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_store
def test_copy_of_a_model_with_a_pending_backward(again, store):
    model = sac.apply(built(llama_stack), {**FULL, **STORES[store]})
    [x] = tokens()
    pending = model(x.requires_grad_())
    twin: Any = again(model)
    twin(x).sum().backward()
    pending.sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


# -- Inputs that share memory


@pytest.mark.parametrize("keep", ["first", "all"])
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_views_of_one_tensor(reentrant, name, keep):
    def program(run: Run) -> Seen:
        linear, x = nn.Linear(8, 8), torch.randn(8, 8, requires_grad=True)
        views = VIEWS[name](x * 2)
        return seen(run(lambda a, b: linear(linear(a.relu())).sigmoid() * linear(b) + b.exp(), *views), x, linear)

    assert wrong(program, as_region("host", reentrant, keep=keep)) == []


def test_a_first_write_to_memory_that_two_inputs_share():
    """Copies of the two would not show it; the next call knows that the region writes."""
    linear, writes = nn.Linear(5, 5), torch.zeros(1, dtype=torch.bool)

    def function(a: Tensor, b: Tensor) -> Tensor:
        out = linear(a + 1).sin()
        if writes.tolist()[0]:  # which no op shows
            a.mul_(2)
        return out * b.exp().sum()

    def program(run: Run) -> Seen:
        linear.zero_grad()
        x = torch.randn(4, 5, requires_grad=True)
        h = x * 0.5
        run(function, h, h[1:]).square().sum().backward()
        return {"x": x.grad, "weight": linear.weight.grad.clone()}

    run = as_region("host", keep="all")
    assert wrong(program, run) == []
    writes.fill_(True)
    with pytest.warns(SacWarning, match=r"this call changed an input \(float32\[4, 5\]\) in place") as said:
        assert wrong(program, run) == []
    assert len(said) == 1
