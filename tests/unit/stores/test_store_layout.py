"""A tensor laid flat comes back as it was: every bit, every stride. A small part of a result is kept alone."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from sac.stores.layout import Layout

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int64,
)


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every bit pattern counts, NaNs too; a bool holds 0 and 1 only."""
    if dtype == torch.bool:
        return torch.rand(shape) > 0.5
    return torch.randint(0, 256, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(shape)


def bits(x: Tensor) -> Tensor:
    return torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8)


def assert_back(x: Tensor) -> None:
    before = bits(x).clone()
    layout, flat = Layout.of(x)
    assert flat.stride() == (1,)
    back = layout.restore(flat.clone())
    assert (back.shape, back.dtype, back.stride()) == (x.shape, x.dtype, x.stride())
    assert (back.is_conj(), back.is_neg()) == (x.is_conj(), x.is_neg())
    assert back.numel() == 0 or back.data_ptr() % 64 == x.data_ptr() % 64
    assert torch.equal(bits(back), before)
    assert torch.equal(bits(x), before), "the caller's tensor was written to"


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """Some tensor that a program makes by slicing, permuting, and expanding; no two elements of it overlap in part."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    x = filled(*shape, dtype=draw(st.sampled_from(DTYPES)))
    for dimension, size in enumerate(shape):
        start, step = draw(st.integers(0, size)), draw(st.integers(1, 3))
        x = x[(slice(None),) * dimension + (slice(start, None, step),)]
    x = x.permute(draw(st.permutations(range(x.dim()))))
    if draw(st.booleans()):
        place = draw(st.integers(0, x.dim()))
        x = x.unsqueeze(place)
        x = x.expand([draw(st.integers(0, 3)) if i == place else size for i, size in enumerate(x.shape)])
    if x.is_complex() and draw(st.booleans()):
        x = x.conj()
    if x.dtype == torch.complex64 and draw(st.booleans()):
        x = x.imag  # of a lazily conjugated tensor: lazily negated
    return x


@given(strided())
@settings(max_examples=150, deadline=None)
def test_every_tensor_comes_back_and_no_element_is_kept_twice(x):
    assert_back(x)
    distinct = math.prod(1 if step == 0 and size > 1 else size for size, step in zip(x.shape, x.stride(), strict=True))
    assert Layout.of(x)[1].numel() == distinct


@given(st.lists(st.integers(1, 3), max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_strides_of_any_sort_come_back_or_do_not_fit(shape, data):
    steps = [data.draw(st.integers(0, 5)) for _ in shape]
    x = filled(64).as_strided(shape, steps, 3)
    if Layout.fits(x):
        assert_back(x)
    else:  # some step is less than what a smaller step spans
        pairs = itertools.permutations(zip(steps, shape, strict=True), 2)
        assert any(0 < step <= other * (size - 1) for (step, _), (other, size) in pairs)


@pytest.mark.parametrize(
    "x",
    [filled(2, 3, 4, 5).to(memory_format=torch.channels_last), filled(6, 4).t(), filled(8, 4)[2:6], filled(2, 1, 3)],
    ids=["channels last", "transposed", "rows", "one in the middle"],
)
def test_what_lies_dense_is_not_copied(x):
    layout, flat = Layout.of(x)
    assert flat.data_ptr() == x.data_ptr() == layout.restore(flat).data_ptr()
    assert_back(x)


def test_what_fits():
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    wrapped = TwoTensor(torch.ones(2), torch.ones(2))
    for x in (torch.ones(2), torch.ones(2, device="meta"), filled(10).unfold(0, 2, 2)):
        assert Layout.fits(x)
    for x in (torch.ones(2, 2).to_sparse(), torch.nn.Parameter(torch.ones(2)), jagged, wrapped):
        assert not Layout.fits(x)
    assert not Layout.fits(filled(10).unfold(0, 4, 2))  # windows that overlap
