"""What a rank keeps of scattered inputs, counted from outside: a share, and nothing after backward."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.stores.scatter import StoredShare
from tests.support.blocks import LlamaLikeBlock, Stack, alternate, policy, save
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder, without_collector
from tests.support.scattering import bytes_held, bytes_left, mlp, scattered
from tests.support.training import assert_same, built, train

WIDTH = 5
ROWS = 7  # an input has 35 elements, which neither 2 nor 4 divide
REGIONS = 4
FLOAT = 4


def share_bytes(ranks: int) -> int:
    return -(-ROWS * WIDTH // ranks) * FLOAT


def chain_of_regions(model: nn.Module, run: Any) -> tuple[Tensor, Tensor, list[StorageWeakRef]]:
    """Regions in a row; the first input, the result, and the storages of all that is passed from one to another."""
    torch.manual_seed(0)  # every rank has the same
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    h = x * 2
    passed = []
    for _ in range(REGIONS):
        passed.append(StorageWeakRef(h.untyped_storage()))
        h = run(model, h)
    return x, h, passed


def kept_by_regions(more: dict[str, Any], warm: bool) -> tuple[int, list[bool], int]:
    """Bytes kept after the forward, which of the regions' inputs are gone then, and bytes left after backward."""
    run = scattered(preserve_rng_state=False, **more)  # generator states are no part of the inputs
    torch.manual_seed(0)  # every rank has the same weights
    model = mlp(WIDTH)
    if warm:
        chain_of_regions(model, run)[1].sum().backward()
        model.zero_grad()
    with without_collector():
        recorder = Recorder()
        with recorder:
            x, out, passed = chain_of_regions(model, run)
        kept = bytes_held(recorder, (x, out))
        gone = [one.expired() for one in passed]
        with recorder:
            out.sum().backward()
        returned = (x, out, x.grad, [one.grad for one in model.parameters()])
        return kept, gone, bytes_left(recorder, returned)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"use_reentrant": True},
        {"keep": "all"},
        {"store": "scattered+host"},
    ],
    ids=str,
)
def test_a_share_is_kept_of_each_input(more, size, warm):
    expected = (REGIONS * share_bytes(size), [True] * REGIONS, 0)
    assert run_ranks(size, kept_by_regions, more, warm) == [expected] * size


def dropped_without_backward() -> tuple[int, bool]:
    run = scattered(preserve_rng_state=False)
    torch.manual_seed(0)  # every rank has the same weights
    model = mlp(WIDTH)
    chain_of_regions(model, run)[1].sum().backward()
    with without_collector():
        recorder = Recorder()
        with recorder:
            out = chain_of_regions(model, run)[1]
            del out
        return bytes_left(recorder), any(isinstance(one, StoredShare) for one in gc.get_objects())


def test_a_dropped_graph_leaves_nothing():
    assert run_ranks(2, dropped_without_backward) == [(0, False)] * 2


BLOCKS = 3
TOKENS = (2, 7, 32)
MODES = {
    "full": {"mode": "full"},
    "selective": {"mode": "selective"},
    "save some products": {"mode": "selective", "policy": policy(alternate("matmul"), save("attention"))},
}


def kept_by_blocks(mode: str, scatters: bool, warm: bool) -> tuple[int, list[bool], list[int], dict[str, Tensor]]:
    """Bytes kept by a model, which of its blocks' inputs are gone, bytes of inputs in the report, and a training."""
    model = built(lambda: Stack(*[LlamaLikeBlock() for _ in range(BLOCKS)]))
    value = MODES[mode] | {"blocks": ["blocks.*"], "preserve_rng_state": False}
    if scatters:
        value |= {"distribute_saved_activations": True}
    sac.apply(model, value, tp_group=dist.group.WORLD)
    passed: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: passed.append(StorageWeakRef(args[0].untyped_storage())))
    torch.manual_seed(0)
    x = torch.randn(TOKENS, requires_grad=True)
    if warm:
        model(x).sum().backward()
        model.zero_grad()
    passed.clear()
    with without_collector():
        recorder = Recorder()
        with recorder:
            out = model(x)
        kept, gone = bytes_held(recorder, out), [one.expired() for one in passed[1:]]
    figures = [kind["input_bytes"] for kind in sac.report(model).to_dict()["kinds"]]
    out.sum().backward()
    model.zero_grad()
    return kept, gone, figures, train(model, make_input=lambda device: (torch.randn(TOKENS),), steps=2)


@pytest.mark.parametrize("warm", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_of_a_model_in_every_mode(mode, warm):
    whole = torch.Size(TOKENS).numel() * FLOAT
    share = whole // 2
    without, with_scatter = (run_ranks(2, kept_by_blocks, mode, scatters, warm) for scatters in (False, True))
    for plain, ours in zip(without, with_scatter, strict=True):
        assert plain[1] == [False] * (BLOCKS - 1)
        assert ours[1] == [True] * (BLOCKS - 1)
        # The first block's input is the test's own. What else is kept is the same.
        assert plain[0] - ours[0] == (BLOCKS - 1) * whole - BLOCKS * share
        assert (plain[2], ours[2]) == ([whole], [share])
        assert_same(plain[3], ours[3])
