"""`release_input`: the caller's tensor keeps this rank's share until backward, and no op reads it unnoticed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import sac
from sac.errors import ConfigError, RegionError
from sac.full import FullConfig
from tests.support.blocks import LlamaLikeBlock, Stack
from tests.support.ranks import run_ranks
from tests.support.recording import without_collector
from tests.support.scattering import Run, Seen, differences, mlp, plainly, scattered, weights
from tests.support.training import assert_same, built, train

FIX = "\n    fix: pass a tensor that has its memory to itself (a clone), or leave release_input off"


def releasing(**more: Any) -> Run:
    return scattered(release_input=True, **more)


def chain(run: Run) -> Seen:
    """Regions in a row, a view and a tensor that needs no gradient among their inputs."""
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    h = x * 2
    for model in models:
        h = run(model, h)
        h = F.dropout(h, 0.3)
    h.square().sum().backward()
    return {"input": x.grad, **weights(models)}


def leaf(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)
    run(model, x).square().sum().backward()
    return {"input": x.grad, "x": x.detach(), **weights(model)}


def without_gradient(run: Run) -> Seen:
    x = torch.randn(3, 5)
    model = mlp(5)
    run(model, x).square().sum().backward()
    return {"x": x, **weights(model)}


def strided(run: Run) -> Seen:
    x = torch.randn(4, 6, requires_grad=True)
    h = torch.empty_strided((6, 4), (1, 7)).copy_(x.detach().t()).requires_grad_()
    model = mlp(4)
    run(model, h).square().sum().backward()
    return {"x": h.detach(), "strides": torch.tensor(h.stride()), "input": h.grad, **weights(model)}


def often(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    h = x * 2
    model = mlp(5)
    out = run(model, h)
    found = {}
    for turn in range(3):
        out.square().sum().backward(retain_graph=turn < 2)
        found |= {f"{turn} {name}": one for name, one in {"x": h.detach().clone(), **weights(model)}.items()}
    return found | {"input": x.grad}


def returned_and_written(run: Run) -> Seen:
    """The region returns its input, or writes to it: then it is left alone."""
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(2)])
    h = x * 2
    out, same = run(lambda h: (models[0](h), h), h)
    assert same is h
    other = x * 3
    last = run(lambda h: models[1](h + 1) + h.mul_(2), other)
    seen = {"h": h.detach().clone(), "other": other.detach().clone()}
    (out + same + last + other).square().sum().backward()
    return seen | {"input": x.grad, **weights(models)}


def passed_twice(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    h = x * 2
    model = mlp(5)
    run(lambda a, b: model(a) * b.sigmoid(), h, b=h).square().sum().backward()
    return {"input": x.grad, "x": h.detach(), **weights(model)}


def gradient_before_recomputation(run: Run) -> Seen:
    """What the loss needs takes no recomputation: the gradient arrives before the data has been fetched."""
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)
    h = x * 2
    found = {}
    for name, one in {"leaf": x, "activation": h}.items():
        straight, _around = run(lambda h: (h * 1.5, model(h)), one)
        straight.sum().backward(retain_graph=True)
        found[name] = one.detach().clone()
    return found | {"input": x.grad}


def nested(run: Run) -> Seen:
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(4)])
    h = x * 2
    for at in (0, 2):
        h = run(lambda h, at: run(models[at + 1], run(models[at], h)), h, at)
    h.square().sum().backward()
    return {"input": x.grad, **weights(models)}


PROGRAMS = {
    program.__name__: program
    for program in (
        chain,
        leaf,
        without_gradient,
        strided,
        often,
        returned_and_written,
        passed_twice,
        gradient_before_recomputation,
        nested,
    )
}


def on_rank(name: str, more: dict[str, Any]) -> list[str]:
    return differences(PROGRAMS[name], releasing(**more))


STORES = [
    {},
    {"prefetch": 1},
    {"store": "scattered+host"},
    {"store": "host"},
    {"store": "contiguous", "num_checkpoints": 4},
]


@pytest.mark.parametrize("more", STORES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_plain_call(name, more):
    assert run_ranks(2, on_rank, name, more) == [[], []]


@pytest.mark.parametrize("name", ["chain", "leaf", "without_gradient", "strided", "often", "passed_twice"])
def test_the_reentrant_mode(name):
    assert run_ranks(2, on_rank, name, {"use_reentrant": True}) == [[], []]


def what_the_caller_sees() -> list[Any]:
    """Shapes, values and memory of the caller's tensor, step by step."""
    run = releasing()
    model = mlp(5)
    run(model, torch.randn(3, 5, requires_grad=True) * 1).sum().backward()
    h = torch.arange(15.0).view(3, 5).requires_grad_() * 1
    before, full = h._version, StorageWeakRef(h.untyped_storage())
    with without_collector(), torch.no_grad():
        run(model, h)
    seen = [h.tolist()]
    with without_collector():
        out = run(model, h)
        seen += [h.tolist(), full.expired(), h._version > before]
        out.sum().backward()
        seen += [h.tolist(), h._version == before]
    return seen


def test_what_the_caller_sees():
    whole = torch.arange(15.0).view(3, 5).tolist()
    shares = torch.cat([torch.arange(15.0), torch.zeros(1)]).view(2, 8).tolist()
    for rank, seen in enumerate(run_ranks(2, what_the_caller_sees)):
        assert seen == [whole, shares[rank], True, True, whole, True]


def after_forward(store: str) -> list[int]:
    """Megatron-Core's own test of its checkpoint: the shape of the first input's data afterwards."""
    first, second = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    run = releasing(store=store, **({"num_checkpoints": 1} if "contiguous" in store else {}))
    out = run(lambda a, b: (a + b) * (a * 1), first, second)
    shape = list(first.data.shape)
    out.sum().backward()
    assert torch.equal(first.grad, torch.full((4, 4), 3.0))
    assert torch.equal(second.grad, torch.ones(4, 4))
    assert torch.equal(first.data, torch.ones(4, 4))
    assert list(second.data.shape) == [4, 4]
    return shape


@pytest.mark.parametrize("store", ["scattered", "scattered+contiguous"])
def test_a_share_as_in_megatron(store):
    assert run_ranks(2, after_forward, store) == [[8]] * 2


def under_hooks() -> list[int]:
    x = torch.ones(4, 4, requires_grad=True)
    with save_on_cpu():
        out = releasing()(lambda a: a * a.sin(), x)
    shape = list(x.shape)
    out.sum().backward()
    assert torch.equal(x, torch.ones(4, 4))
    return shape


def test_nothing_is_left_where_hooks_take_the_share_away():
    assert run_ranks(2, under_hooks) == [[0], [0]]


def error_of(call: Callable[[], Any], kind: type[Exception] = RegionError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    return "no error"


def never_called(*args: Any) -> Any:
    raise AssertionError("the function ran")


def what_cannot_be_released() -> list[str]:
    run = releasing()
    x = torch.randn(4, 4, requires_grad=True)
    h = x * 2
    with torch.inference_mode():
        inferred = torch.randn(3)
    found = [
        error_of(lambda: run(never_called, h[1:])),
        error_of(lambda: run(never_called, h.view(16))),
        error_of(lambda: run(never_called, h.detach(), h)),
        error_of(lambda: run(never_called, 1, [h], deep={"same": (h.detach(),)})),
        error_of(lambda: run(never_called, inferred)),
    ]
    first = run(mlp(4), h)
    return [*found, error_of(lambda: run(never_called, h)), list(h.shape), first.shape == (4, 4)]


def test_what_cannot_be_released_is_told_at_the_call():
    view = f": it is a view, and releasing it would not free the memory of its base{FIX}"
    shared = f": it shares its memory with another tensor of this call, and releasing it would not free that{FIX}"
    released = (
        ": the region that it was passed to before has released it: only a share of its data is left\n    fix: leave "
        "release_input off where an input is used more than once"
    )
    expected = [
        f"args[0]{view}",
        f"args[0]{view}",
        f"args[0]{shared}",
        f"args[1][0]{shared}",
        f"args[0]: it is an inference tensor, whose data cannot be exchanged{FIX}",
        f"args[0]{released}",
    ]
    for found in run_ranks(2, what_cannot_be_released):
        assert found[:6] == expected
        assert found[6:] == [[8], True]


def other_uses(run: Run) -> Seen:
    """Ops and regions that took the tensor before it was released, and whose backward comes after."""
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(2)])
    h = x * 2
    product = h * h.sigmoid()
    whole = sac.checkpoint(models[0], h) if run is not plainly else models[0](h)
    out = run(models[1], h)
    out.square().sum().backward(retain_graph=True)
    (product * whole).square().sum().backward()
    return {"input": x.grad, **weights(models)}


def other_uses_on_rank() -> list[str]:
    return differences(other_uses, releasing())


def test_what_took_the_tensor_before_is_right_once_it_is_back():
    assert run_ranks(2, other_uses_on_rank) == [[], []]


def views(run: Run) -> Seen:
    """Others hold the memory of the input: views from before and out of the region, an op that saved its result."""
    x = torch.randn(3, 5, requires_grad=True)
    models = nn.ModuleList([mlp(5) for _ in range(3)])
    h = x * 2
    row, flat = h[0], h.view(15)
    first = run(models[0], h)
    other = x * 3
    second, part = run(lambda h: (models[1](h), h[1]), other)
    saved = torch.exp(x)
    third = run(models[2], saved)
    row_again = row * 2
    parts = [first, second, third, row.exp(), flat.sin(), part.exp(), row_again]
    sum(one.square().sum() for one in parts).backward()
    return {"input": x.grad, "h": h.detach(), "other": other.detach(), **weights(models)}


def views_on_rank() -> list[str]:
    return differences(views, releasing())


def test_what_others_hold_is_left_alone():
    assert run_ranks(2, views_on_rank) == [[], []]


def read_too_early() -> list[str]:
    x = torch.randn(3, 5, requires_grad=True)
    model = mlp(5)
    run = releasing()
    run(model, x * 1).sum().backward()
    h = x * 2
    product = h * h
    out = run(model, h)
    found = [list(h.shape), error_of(product.sum().backward, RuntimeError)]
    h = x * 2
    out = run(model, h)
    h.data.add_(1)  # unseen by anyone
    h.add_(1)
    return [*found, error_of(out.sum().backward)]


def test_what_would_compute_with_the_share_raises():
    for shape, product, written in run_ranks(2, read_too_early):
        assert shape == [8]
        assert "has been modified by an inplace operation: [torch.FloatTensor [8]]" in product
        assert "is at version 1; expected version 0 instead" in product
        assert written == (
            "Sequential: its input was changed in place after it had been released, which "
            "changed the data that is kept of it\n"
            "    fix: do not write to a released tensor, or leave release_input off"
        )


def left_to_the_caller() -> list[Any]:
    """The function fails; the graph is dropped; the caller has put other data in."""
    run = releasing()
    model = mlp(5)
    h = torch.randn(3, 5, requires_grad=True) * 1
    before = h.detach().clone()

    def fails(h: Tensor) -> Tensor:
        model(h)
        raise ValueError("on purpose")

    with contextlib.suppress(ValueError):
        run(fails, h)
    found = [torch.equal(h, before)]
    with without_collector():
        run(model, h)  # without backward
    found.append(list(h.shape))
    other = torch.randn(3, 5, requires_grad=True) * 1
    out = run(model, other)
    other.data = torch.zeros(2)
    out.sum().backward()
    return [*found, other.tolist()]


def test_what_is_left_to_the_caller():
    assert run_ranks(2, left_to_the_caller) == [[True, [8], [0.0, 0.0]]] * 2


def distributed() -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))

    def program(run: Run) -> Seen:
        x = distribute_tensor(torch.randn(3, 5), mesh, [Replicate()]).requires_grad_()
        weight = distribute_tensor(torch.randn(5, 5), mesh, [Replicate()]).requires_grad_()
        h = x * 2
        out = run(lambda h: torch.tanh(h @ weight) * h, h)
        if run is not plainly:
            assert h.to_local().shape == (8,)
        out.full_tensor().square().sum().backward()
        assert h.to_local().shape == (3, 5)
        return {"input": x.grad.to_local(), "weight": weight.grad.to_local(), "h": h.to_local().detach()}

    return differences(program, releasing())


def test_distributed_tensors():
    assert run_ranks(2, distributed) == [[], []]


TOKENS = (2, 6, 32)


def selective_mode() -> tuple[list[list[int]], dict[str, Tensor], dict[str, Tensor]]:
    """Shapes of what went from block to block after the forward, and two trainings."""

    def build() -> Stack:
        return Stack(*[LlamaLikeBlock() for _ in range(3)])

    value = {"mode": "selective", "store": "scattered", "release_input": True, "prefetch": 1, "blocks": ["blocks.*"]}
    model = sac.apply(built(build), value, tp_group=dist.group.WORLD)
    seen: list[Tensor] = []
    hooks = [block.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for block in model.blocks]
    out = model(torch.randn(TOKENS))
    shapes = [list(one.shape) for one in seen]
    out.sum().backward()
    assert all(one.shape == TOKENS for one in seen)
    for hook in hooks:
        hook.remove()
    model.zero_grad()
    make = {"make_input": lambda device: (torch.randn(TOKENS),), "steps": 3}
    return shapes, train(built(build), **make), train(model, **make)


def test_selective_mode():
    for shapes, plain, ours in run_ranks(2, selective_mode):
        assert shapes == [[2 * 6 * 32 // 2]] * 3
        assert_same(plain, ours)


def test_it_needs_a_store():
    with pytest.raises(ConfigError) as error:
        sac.checkpoint(torch.sin, torch.ones(3, requires_grad=True), config=FullConfig(release_input=True))
    assert str(error.value).startswith("sac.checkpoint.release_input: ")
