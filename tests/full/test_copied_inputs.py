"""What holds for every store that keeps a copy of its own: in host memory, in a slot of one buffer, in both."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.full import FullConfig
from tests.full.cases import WIDTH, hidden, layer, loss_of
from tests.full.test_matrix import as_region, plainly
from tests.semantics.blocks import (
    FunctionBlock,
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
from tests.semantics.recording import Recorder, without_collector
from tests.semantics.training import assert_same_training, built

STORES: dict[str, dict[str, Any]] = {
    "host": {"store": "host"},
    "contiguous": {"store": "contiguous", "num_checkpoints": 2},
    "contiguous+host": {"store": "contiguous+host", "num_checkpoints": 2},
}
MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "full": lambda **more: {"mode": "full", "blocks": ["blocks.*"], **more},
    "selective": lambda **more: selective(policy(save("attention", optional=True), alternate("matmul")), **more),
    "all products": lambda **more: selective(policy(save("matmul")), **more),
    "everything": lambda **more: selective(policy(default="save"), **more),
}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STORES[request.param]


def region_by(face: str, store: dict[str, Any]) -> Callable[[nn.Module], Callable[..., Any]]:
    """What makes a module of its own a region, by one of the faces."""
    if face in ("checkpoint", "reentrant"):
        ours = {"config": FullConfig(**store), "use_reentrant": face == "reentrant"}
        return lambda block: lambda *args, **kwargs: sac.checkpoint(block, *args, **ours, **kwargs)
    return lambda block: sac.apply(Stack(block), MODES[face](**store)).blocks[0]


@pytest.fixture(params=["checkpoint", "full", "selective"])
def call(request: pytest.FixtureRequest, store: dict[str, Any]) -> Callable[..., Any]:
    return region_by(request.param, store)


@pytest.fixture(params=["checkpoint", "reentrant", "full", "selective"])
def any_call(request: pytest.FixtureRequest, store: dict[str, Any]) -> Callable[..., Any]:
    """One that may be reentrant: it takes a plain backward only."""
    return region_by(request.param, store)


def gradients(out: Tensor, sources: list[Tensor]) -> list[Tensor]:
    """What a plain backward gives; it leaves no gradient behind."""
    out.sum().backward()
    found = [source.grad for source in sources]
    for source in sources:
        source.grad = None
    return found


# Training


@pytest.mark.parametrize("mode", MODES)
def test_training_is_the_same(mode, store):
    def build() -> Stack:
        return with_dropout(llama_stack(), 0.2, 0.1)

    assert_same_training(build, MODES[mode](**store), steps=3)


@pytest.mark.parametrize("mode", MODES)
def test_training_on_inputs_without_gradient(mode, store):
    assert_same_training(llama_stack, MODES[mode](**store), steps=2, input_needs_grad=[False])


def two_inputs(block: FunctionBlock, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ block.a).sin() * y, (y @ block.b).relu() + x


@pytest.mark.parametrize("keep", ["first", "all", lambda position, tensor: position == 1])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_which_inputs_are_kept(mode, keep, store):
    def build() -> Stack:
        return Stack(FunctionBlock(two_inputs), FunctionBlock(two_inputs))

    def inputs(device: str) -> tuple[Tensor, ...]:
        return (*square(device), *square(device))

    value = (
        MODES[mode](**store, keep=keep)
        if "num_checkpoints" not in store
        else MODES[mode](**{**store, "num_checkpoints": 4}, keep=keep)
    )
    assert_same_training(build, value, steps=2, make_input=inputs)


def test_what_is_not_floating_point_is_kept_on_request(store):
    model, table = layer(), nn.Embedding(16, WIDTH)
    seen = []

    def keep(position: int, tensor: Tensor) -> bool:
        seen.append((position, tensor.dtype))
        return tensor.dtype == torch.int64

    ids = torch.arange(6)
    out = sac.checkpoint(lambda ids: model(table(ids)), ids, config=FullConfig(**store, keep=keep))
    ids.zero_()
    out.sum().backward()
    assert seen == [(0, torch.int64)]
    assert all(table.weight.grad[row].count_nonzero() for row in range(6))


# Writes


def writes_to_input(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x.mul_(2).add_(1) @ block.a).sin() @ block.b


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[:], lambda x: x.t()], ids=["whole", "view", "transposed"])
def test_region_that_writes_to_its_input(any_call, view):
    def grads(run: Callable[..., Any], block: FunctionBlock) -> list[Tensor]:
        torch.manual_seed(5)
        x = torch.randn(8, 8, requires_grad=True)
        loss_of([run(view(x * 1))]).backward()
        found = [x.grad.clone(), block.a.grad.clone(), block.b.grad.clone()]
        block.zero_grad()
        return found

    torch.manual_seed(1)
    block = FunctionBlock(writes_to_input)
    plain = copy.deepcopy(block)
    expected = grads(plain, plain)
    run = any_call(block)
    for _ in range(3):
        assert all(map(torch.equal, expected, grads(run, block)))


def product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def test_caller_writes_between_forward_and_backward(any_call):
    block = FunctionBlock(product)
    x = torch.randn(8, 8)
    expected = gradients(product(block, x), [block.a, block.b])
    run = any_call(block)
    for _ in range(3):
        h = x.clone()
        out = run(h)
        h.fill_(float("nan"))
        assert all(map(torch.equal, expected, gradients(out, [block.a, block.b])))


def test_the_callers_tensor_is_left_alone(any_call):
    block = FunctionBlock(product)
    run = any_call(block)
    for _ in range(2):
        x = torch.randn(8, 8, requires_grad=True)
        before, version, address = x.detach().clone(), x._version, x.data_ptr()
        run(x).sum().backward()
        assert torch.equal(x, before)
        assert (x._version, x.data_ptr(), x.stride()) == (version, address, before.stride())


# Memory


def test_the_callers_tensor_is_free_to_go(any_call):
    run = any_call(FunctionBlock(product))
    leaf = torch.randn(8, 8, requires_grad=True)
    with without_collector():
        for _ in range(3):
            x = leaf.exp().add(1)  # no op outside of the region saves it
            tensor, storage = weakref.ref(x), StorageWeakRef(x.untyped_storage())
            out = run(x)
            del x
            assert tensor() is None
            assert storage.expired()
            out.sum().backward()


def test_every_kept_byte_is_counted_and_goes(store):
    value = FullConfig(**store)
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    slots = value.num_checkpoints or 1
    with without_collector():
        for turn in range(4):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            made_now = turn == 0 or "contiguous" not in value.stores  # the buffer is made once
            assert recorder.live_bytes(besides=out) == made_now * 256 * (slots if "contiguous" in value.stores else 1)
            with recorder:
                out.sum().backward()
            del out
            leaf.grad = block.a.grad = block.b.grad = None
            assert recorder.live_bytes() == (256 * slots if turn == 0 and "contiguous" in value.stores else 0)


def test_graph_that_is_dropped_without_backward(store):
    value = FullConfig(**{**store, "num_checkpoints": 1} if "num_checkpoints" in store else store)
    block, leaf = FunctionBlock(product), torch.randn(8, 8, requires_grad=True)
    with without_collector():
        for _ in range(3):
            recorder = Recorder()
            with recorder:
                out = sac.checkpoint(block, leaf * 1, config=value)
            del out
            assert recorder.live_bytes() <= (256 if value.buffer is not None else 0)


# Backward as often as autograd allows


def test_two_backwards(call):
    block = FunctionBlock(product)
    leaf = torch.randn(8, 8, requires_grad=True)
    expected = torch.autograd.grad(product(block, leaf * 1).sum(), [leaf, block.a, block.b])
    out = call(block)(leaf * 1).sum()
    for retain in (True, True, False):
        found = torch.autograd.grad(out, [leaf, block.a, block.b], retain_graph=retain)
        assert all(map(torch.equal, expected, found))


def test_double_backward(call):
    block = FunctionBlock(product)
    leaf = torch.randn(8, 8, requires_grad=True)

    def curvature(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        [slope] = torch.autograd.grad(run(leaf * 1).square().sum(), leaf, create_graph=True)
        return torch.autograd.grad(slope.sin().sum(), [leaf, block.a, block.b])

    expected = curvature(lambda x: product(block, x))
    assert all(map(torch.equal, expected, curvature(call(block))))


def two_heads(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    return x @ block.a, x @ block.b


def test_what_one_backward_leaves_for_a_later_one_is_not_overwritten(store):
    """The first backward runs the region again, and gives the slot back; the second reads what it left."""
    value = FullConfig(**{**store, "num_checkpoints": 1} if "num_checkpoints" in store else store)
    block, x = FunctionBlock(two_heads), torch.randn(8, 8)
    for _ in range(3):
        left, right = sac.checkpoint(block, x.clone(), config=value)
        [first] = torch.autograd.grad(left.sum(), [block.a])
        other = sac.checkpoint(block, torch.full((8, 8), 1000.0), config=value)  # the same slot, another input
        [second] = torch.autograd.grad(right.sum(), [block.b])
        assert torch.equal(first, x.t() @ torch.ones(8, 8))
        assert torch.equal(second, x.t() @ torch.ones(8, 8))
        del other


def test_backward_that_fails_can_be_run_again(any_call):
    block = FunctionBlock(product)
    block.fails = False

    def fails_on_request(block: Any, x: Tensor) -> Tensor:
        if block.fails:
            raise ValueError("out of luck")
        return product(block, x)

    leaf = torch.randn(8, 8, requires_grad=True)
    sources = [leaf, block.a, block.b]
    expected = gradients(product(block, leaf * 1), sources)
    block.body = fails_on_request
    run = any_call(block)
    for _ in range(3):
        out = run(leaf * 1)
        block.fails = True
        with pytest.raises(ValueError, match="out of luck"):
            out.sum().backward()
        block.fails = False
        assert all(map(torch.equal, expected, gradients(out, sources)))


def test_forward_that_fails_can_be_run_again(store):
    value = FullConfig(**{**store, "num_checkpoints": 1} if "num_checkpoints" in store else store)
    x = torch.randn(8, requires_grad=True)

    def fails(h: Tensor) -> Tensor:
        h = h.sin()
        raise ValueError("out of luck")

    with without_collector():
        for _ in range(3):
            with pytest.raises(ValueError, match="out of luck"):
                sac.checkpoint(fails, x * 1, config=value)
        sac.checkpoint(torch.sin, x * 1, config=value).sum().backward()
    assert torch.equal(x.grad, x.cos())


# Regions in regions, and hooks around them


@pytest.mark.parametrize("outer_too", [False, True])
def test_nested_regions(store, outer_too):
    inner_config = FullConfig(**store)
    outer_config = FullConfig(**store) if outer_too else None
    inner, outer, leaf = layer(dropout=0.3), layer(dropout=0.3), torch.randn(4, WIDTH, requires_grad=True)

    def grads(run_inner: Any, run_outer: Any) -> list[Tensor]:
        torch.manual_seed(7)

        def body(h: Tensor) -> Tensor:
            for _ in range(3):
                h = run_inner(inner, outer(h)) + h
            return h

        sources = [leaf, *inner.parameters(), *outer.parameters()]
        out = run_outer(body, run_outer(body, leaf * 1))
        return [*torch.autograd.grad(loss_of([out]), sources), torch.get_rng_state()]

    expected = grads(plainly, plainly)
    for _ in range(3):
        found = grads(
            lambda function, h: sac.checkpoint(function, h, config=inner_config),
            lambda function, h: sac.checkpoint(function, h, config=outer_config),
        )
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_under_save_on_cpu(mode, store):
    assert_same_training(llama_stack, MODES[mode](**store), steps=2, around_forward=torch.autograd.graph.save_on_cpu)


def test_region_of_torch_around(store):
    from torch.utils.checkpoint import checkpoint

    value = FullConfig(**store)
    model, leaf = layer(dropout=0.3), torch.randn(4, WIDTH, requires_grad=True)

    def grads(run: Any) -> list[Tensor]:
        torch.manual_seed(7)
        out = checkpoint(lambda h: run(model, run(model, h) + h), leaf * 1, use_reentrant=False)
        return list(torch.autograd.grad(loss_of([out]), [leaf, *model.parameters()]))

    expected = grads(plainly)
    for _ in range(3):
        found = grads(lambda function, h: sac.checkpoint(function, h, config=value))
        assert all(map(torch.equal, expected, found))


# Where nothing is to be kept


def test_no_grad_and_frozen_regions_keep_nothing(store):
    value = FullConfig(**{**store, "num_checkpoints": 1} if "num_checkpoints" in store else store)
    model = layer().requires_grad_(False)
    recorder = Recorder()
    with without_collector():
        with recorder:
            with torch.no_grad():
                outputs = [sac.checkpoint(model, torch.randn(4, WIDTH), config=value) for _ in range(3)]
            assert recorder.live_bytes(besides=outputs) == 0
            outputs += [sac.checkpoint(model, torch.randn(4, WIDTH), config=value) for _ in range(3)]
        assert recorder.live_bytes(besides=outputs) <= (128 if value.buffer is not None else 0)


# Every sort of tensor


def can_be_copied(dtype: torch.dtype) -> bool:
    """Quantized types need more than their numbers; for some of the small integers torch has no kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls some experimental
        try:
            torch.zeros(4, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype).clone()
        except (RuntimeError, NotImplementedError):
            return False
    return True


DTYPES = [
    one
    for one in {id(x): x for x in vars(torch).values()}.values()
    if isinstance(one, torch.dtype) and can_be_copied(one)
]


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_comes_back(dtype, store):
    memory = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    flat = memory.view(dtype)
    keeping = FullConfig(**store).buffer or sac.full.full_config.Host()
    placed = keeping.put(flat, lambda: "x")
    assert (placed.fetch().dtype, placed.fetch().shape) == (dtype, flat.shape)
    assert torch.equal(placed.fetch().view(torch.uint8), memory)


@pytest.mark.parametrize(
    "made",
    [
        lambda: torch.randn(0, 4),
        lambda: torch.randn(()),
        lambda: torch.randn(4, 6).t(),
        lambda: torch.randn(4, 6)[::2, 1::3],
        lambda: torch.randn(1, 6).expand(4, 6),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, dtype=torch.complex64).conj(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag,
        lambda: torch.randn(8, dtype=torch.float64)[3:],
    ],
    ids=["empty", "scalar", "transposed", "strided", "expanded", "channels last", "conjugate", "negative", "offset"],
)
def test_every_layout_comes_back(made, store):
    x = made()
    expected = x.clone()
    seen: list[Tensor] = []

    def look(h: Tensor, w: Tensor) -> Tensor:
        seen.append(h)
        return h * w

    weight = torch.ones((), requires_grad=True)
    out = sac.checkpoint(look, x, weight, config=FullConfig(**store))
    if not x.is_neg() and not x.is_conj() and 0 not in x.stride():
        x.zero_()
    torch.view_as_real(out).sum().backward() if out.is_complex() else out.sum().backward()
    first, second = seen
    assert torch.equal(second, expected)
    assert (second.stride(), second.is_conj(), second.is_neg()) == (first.stride(), first.is_conj(), first.is_neg())


# Copies of a model


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_copy_of_a_model(way, mode, store):
    model = sac.apply(built(llama_stack), MODES[mode](**store))
    [x] = tokens()
    pending = model(x.requires_grad_())
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(x).sum().backward()
    pending.sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


def test_config_is_pickled_without_what_it_holds(store):
    value = FullConfig(**store)
    [x] = square()
    pending = sac.checkpoint(torch.sin, x.requires_grad_(), config=value)
    stream = io.BytesIO()
    pickle.dump(value, stream)
    assert stream.tell() < 1024
    assert pickle.loads(stream.getvalue()) == value
    pending.sum().backward()


def test_two_forwards_then_two_backwards():
    for name in STORES:
        run = as_region(name, False)
        model, (x, h) = layer(dropout=0.3), hidden(4, WIDTH)
        torch.manual_seed(1)
        expected = torch.autograd.grad(loss_of([model(h), model(h * 2)]), [x, *model.parameters()], retain_graph=True)
        torch.manual_seed(1)
        outputs = [run(model, h), run(model, h * 2)]
        found = torch.autograd.grad(loss_of(outputs), [x, *model.parameters()], retain_graph=True)
        assert all(map(torch.equal, expected, found))
    gc.collect()
