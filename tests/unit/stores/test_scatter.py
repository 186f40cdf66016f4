"""Inputs scattered over a group: gradients on every rank are those of the plain call, and a rank keeps a share only."""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sac.stores.store import StoredTensor
from tests.support.cases import Run, Seen, hidden, layer, seen
from tests.support.pairs import in_pairs
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder, without_collector
from tests.support.runs import Noted
from tests.support.stored_regions import OVER_RANKS, as_region, plainly, wrong

WIDTH, ROWS = 5, 7  # an input has 35 elements, which neither 2 nor 4 divide
FLOAT = 4


def scattered(store: str = "scattered", **more: Any) -> Run:
    return as_region(store, group=dist.group.WORLD, **more)


def chain(run: Run, models: nn.ModuleList, h: Tensor) -> Tensor:
    for model in models:
        h = run(model, h)
    return h


def three_models() -> nn.ModuleList:
    return nn.ModuleList([layer(WIDTH) for _ in range(3)])


# -- Programs


def under_hooks(run: Run) -> Seen:
    models, (x, h) = three_models(), hidden(ROWS, WIDTH)
    with save_on_cpu():
        out = chain(run, models, h)
    return seen(out, x, models)


def parts_of_backward(run: Run) -> Seen:
    models, (x, h) = three_models(), hidden(ROWS, WIDTH)
    loss = chain(run, models, h).square().sum()
    late = torch.autograd.grad(loss, models[2].parameters(), retain_graph=True)
    first = torch.autograd.grad(loss, x, retain_graph=True)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    found = {f"part {i}": one for i, one in enumerate([*late, *first])}
    return found | seen(slope, x, models)


def retried(run: Run) -> Seen:
    """Recomputation fails once; what is left of the graph works."""
    models, (x, h), fails = three_models(), hidden(ROWS, WIDTH), Noted()

    def may_fail(h: Tensor) -> Tensor:
        if fails:
            raise ValueError(fails.pop())
        return models[1](h)

    out = run(models[2], run(may_fail, run(models[0], h)))
    if run is not plainly:
        fails.append("once")
        with pytest.raises(ValueError, match="once"):
            out.sum().backward(retain_graph=True)
        models.zero_grad()
        x.grad = None
    return seen(out, x, models)


PROGRAMS = {one.__name__: one for one in (under_hooks, parts_of_backward, retried)}
MORE: list[dict[str, Any]] = [{}, {"keep": "all"}, {"store": "scattered+host"}]


def wrong_on_rank(name: str, more: dict[str, Any]) -> list[str]:
    return wrong(PROGRAMS[name], scattered(**more))


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("more", MORE, ids=str)
def test_two_ranks(more, name):
    assert run_ranks(2, wrong_on_rank, name, more) == [[], []]


def of_shape(shape: tuple[int, ...], kind: torch.dtype, run: Run) -> Seen:
    x, weight = (torch.randn(shape, dtype=kind, requires_grad=True) for _ in range(2))
    run(lambda h: torch.tanh(h * weight) * h, x * 1.5).abs().float().sum().backward()
    return {"input": x.grad, "weight": weight.grad}


def shapes_and_kinds() -> list[str]:
    return [
        f"{kind} {shape}: {name}"
        for shape in [(1,), (7,), (8,), (3, 5), (), (0, 4)]
        for kind in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)
        for name in wrong(partial(of_shape, shape, kind), scattered())
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_elements_and_any_dtype(size):
    assert run_ranks(size, shapes_and_kinds) == [[]] * size


# -- What a rank keeps, counted from outside


def bytes_held(recorder: Recorder, besides: Any = ()) -> int:
    """Live bytes when they no longer fall: gloo's own threads release what was sent a little later."""
    held = recorder.live_bytes(besides=besides)
    for _ in range(20):
        if not held:
            break
        time.sleep(0.01)
        held = min(held, recorder.live_bytes(besides=besides))
    return held


def kept_by_regions(more: dict[str, Any], warm: bool) -> tuple[int, list[bool], int, bool]:
    """Bytes kept after the forward, which of the regions' inputs are gone then, and what is left after backward."""
    run = scattered(draws=False, **more)  # generator states are no part of the inputs
    models = three_models()
    if warm:
        chain(run, models, hidden(ROWS, WIDTH)[1]).sum().backward()
        chain(run, models, hidden(ROWS, WIDTH)[1])  # and one whose graph is dropped
        models.zero_grad()
    with without_collector():
        recorder, passed = Recorder(), []
        with recorder:
            x, h = hidden(ROWS, WIDTH)
            for model in models:
                passed.append(StorageWeakRef(h.untyped_storage()))
                h = run(model, h)
        kept = bytes_held(recorder, (x, h))
        gone = [one.expired() for one in passed]
        with recorder:
            h.sum().backward()
        left = bytes_held(recorder, (x, h, x.grad, [one.grad for one in models.parameters()]))
        return kept, gone, left, any(isinstance(one, StoredTensor) for one in gc.get_objects())


@in_pairs(more=[*MORE, {"reentrant": True}], size=[2, 4], warm={"first call": False, "later call": True})
def test_a_share_is_kept_of_each_input_and_nothing_after_backward(more, size, warm):
    share = -(-ROWS * WIDTH // size) * FLOAT
    assert run_ranks(size, kept_by_regions, more, warm) == [(3 * share, [True] * 3, 0, False)] * size


# -- Groups: of one rank, and a mesh of DTensors; models on ranks are in tests/stacks


def two_calls(run: Run) -> Seen:
    model, (x, h) = layer(WIDTH), hidden(ROWS, WIDTH)
    return seen(run(model, run(model, h)), x, model)


def group_of_one() -> list[list[str]]:
    own = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    return [wrong(two_calls, as_region(store, group=own)) for store in OVER_RANKS]


def test_a_group_of_one_rank_has_nothing_to_scatter():
    assert run_ranks(2, group_of_one) == [[[], [], []]] * 2


def distributed_tensors(placements: list[Any], reentrant: bool) -> tuple[list[str], int]:
    """A DTensor on a mesh of (dp, tp): what differs, and the shares that are kept of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    kept = []

    def program(run: Run) -> Seen:
        x = distribute_tensor(torch.randn(4, 6), mesh, placements).requires_grad_()
        weight = distribute_tensor(torch.randn(6, 6), mesh, [Replicate(), Replicate()]).requires_grad_()
        result = run(lambda h: torch.tanh(h @ weight), x * 2)
        if run is not plainly:
            kept.append(sum(isinstance(one, StoredTensor) for one in gc.get_objects()))
        result.full_tensor().square().sum().backward()
        return {"input": x.grad.full_tensor(), "weight": weight.grad.full_tensor(), "result": result.full_tensor()}

    return wrong(program, as_region("scattered", reentrant, mesh["tp"])), kept[-1]


@pytest.mark.parametrize(
    ("placements", "shares"),
    [([Replicate(), Replicate()], 1), ([Shard(0), Replicate()], 0), ([Replicate(), Shard(0)], 0)],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_distributed_tensors(placements, shares, reentrant):
    """Over a mesh of one dimension; what is split over its own mesh is not scattered."""
    assert run_ranks(4, distributed_tensors, placements, reentrant) == [([], shares)] * 4
