"""Copies of every sort of tensor, and models that are copied while copies of inputs wait."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import sac
from sac.full import FullConfig
from tests.support.blocks import (
    llama_stack,
    square,
    tokens,
)
from tests.support.ranks import run_ranks
from tests.support.runs import Noted
from tests.support.stores import (
    MODES,
    every_store,
)
from tests.support.training import built

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
@every_store
def test_every_dtype_comes_back(dtype, store):
    memory = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
    flat = memory.view(dtype)
    keeping = FullConfig(**store).buffer or sac.config.OnHost()
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
@every_store
def test_every_layout_comes_back(made, store):
    x = made()
    expected = x.clone()
    seen = Noted()

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


def distributed_input_on_rank(store: dict[str, Any]) -> list[str]:
    """Names of gradients that are wrong on this rank, for an input and a weight that lie over two ranks."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    config, wrong = FullConfig(**store), []
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(torch.randn(4, 6), mesh, [placement]).requires_grad_()
        w = distribute_tensor(torch.randn(6, 6), mesh, [Replicate()]).requires_grad_()
        expected = torch.autograd.grad(((x * 1) @ w).sin().sum(), [x, w])
        for turn in range(2):
            out = sac.checkpoint(lambda h, w=w: (h @ w).sin(), x * 1, config=config)
            found = torch.autograd.grad(out.sum(), [x, w])
            if not all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in zip(expected, found, strict=True)):
                wrong.append(f"{placement} turn {turn}")
    return wrong


@every_store
def test_distributed_tensors(store):
    assert run_ranks(2, distributed_input_on_rank, store) == [[], []]


# Copies of a model


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("mode", ["full", "selective"])
@every_store
def test_copy_of_a_model(way, mode, store):
    model = sac.apply(built(llama_stack), MODES[mode](**store))
    [x] = tokens()
    pending = model(x.requires_grad_())
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    twin(x).sum().backward()
    pending.sum().backward()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@every_store
def test_config_is_pickled_without_what_it_holds(store):
    value = FullConfig(**store)
    [x] = square()
    pending = sac.checkpoint(torch.sin, x.requires_grad_(), config=value)
    stream = io.BytesIO()
    pickle.dump(value, stream)
    assert stream.tell() < 1024
    assert pickle.loads(stream.getvalue()) == value
    pending.sum().backward()
