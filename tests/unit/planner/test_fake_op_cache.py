"""What is made from an earlier result is what torch would have made, for any sizes, strides and dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import tree_leaves

from sac.engine.tracker import BareMode
from sac.planner.fake_op_cache import CAN_MAKE_FAKES, FakeOpCache
from sac.planner.fakes import fake_mode
from sac.planner.live_bytes import Ledger

MODE = fake_mode()


class Quick(BareMode):
    """Every op by ``FakeOpCache``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = FakeOpCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.fakes.run(func, args, kwargs or {})


def facts(out: Any) -> list[Any]:
    """All that can be asked of a result, but what it holds."""
    found = []
    for one in tree_leaves(out):
        if not isinstance(one, Tensor):
            found.append(one)
            continue
        assert type(one) is FakeTensor
        # Where a dimension has one element its stride means nothing, and torch's fake views differ from its kernels'.
        strides = [stride for size, stride in zip(one.shape, one.stride(), strict=True) if size != 1]
        found.append(
            {
                "geometry": (one.shape, strides, one.storage_offset(), one.is_contiguous(), one._is_view()),
                "kind": (one.dtype, one.layout, one.is_conj(), one.is_neg(), one.is_inference()),
                "place": (one.device, one.fake_device, one.fake_mode is MODE, one.untyped_storage().nbytes()),
                "gradient": (one.requires_grad, type(one.grad_fn).__name__),
            }
        )
    return found


def storages(out: Any, *given: Tensor) -> list[int]:
    """Which results lie in the memory of which arguments, or of one another."""
    known = [one.untyped_storage()._cdata for one in given]
    places = []
    for one in tree_leaves(out):
        if isinstance(one, Tensor):
            key = one.untyped_storage()._cdata
            if key not in known:
                known.append(key)
            places.append(known.index(key))
    return places


def assert_alike(op: Callable[..., Any], *given: Tensor) -> None:
    expected = op(*given)
    with Quick():
        found = [op(*given) for _ in range(3)]  # the first is torch's, the others are made from it
    for out in found:
        assert facts(out) == facts(expected)
        assert storages(out, *given) == storages(expected, *given)


DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
SIZES = st.integers(1, 6)


@st.composite
def tensors(draw: st.DrawFn, dims: int = 3) -> Tensor:
    """A fake tensor of any strides: transposed, cut, expanded, with an offset."""
    shape = [draw(SIZES) for _ in range(dims)]
    real = torch.empty([size + 2 for size in shape], dtype=draw(DTYPES))
    kind = draw(st.sampled_from(["plain", "cut", "transposed", "expanded", "stepped"]))
    if kind == "plain":
        real = torch.empty(shape, dtype=real.dtype)
    elif kind == "transposed":
        real = real.transpose(draw(st.integers(0, dims - 1)), draw(st.integers(0, dims - 1)))
    elif kind == "expanded":
        real = torch.empty([1, *shape[1:]], dtype=real.dtype).expand(shape)
    elif kind == "stepped":
        real = real[..., ::2]
    else:
        real = real[1:, ..., 1:]
    fake: Tensor = MODE.from_tensor(real)
    return fake.requires_grad_(draw(st.booleans()))


UNARY: dict[str, Callable[[Tensor], Any]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(),
    "mean of a dim": lambda x: x.mean(1, keepdim=True),
    "number": lambda x: x * 0.5 + 1,
    "power": lambda x: x**2,
    "cast": lambda x: x.to(torch.float16),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "like": lambda x: torch.empty_like(x),
    "new": lambda x: x.new_zeros(3, 4),
    "comparison": lambda x: x > 0,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(3, -1, -1, -1),
    "select": lambda x: x[0],
    "slice": lambda x: x[..., 1:],
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "flatten": lambda x: x.flatten(1),
    "detach": lambda x: x.detach(),
    "chunk": lambda x: x.chunk(2, -1),
    "unbind": lambda x: x.unbind(0),
    "max": lambda x: x.max(-1),
    "topk": lambda x: x.topk(1, -1),
    "sort": lambda x: x.sort(-1),
    "variance": lambda x: torch.var_mean(x, -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "native layer norm": lambda x: torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True),
    "list": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x.clone()]),
    "foreach": lambda x: torch._foreach_mul([x.detach(), x.detach()], 2),
    "in place": lambda x: x.clone().add_(1),
    "in place of a view": lambda x: x.clone().transpose(0, 1).mul_(2),
    "masked": lambda x: x.masked_fill(x > 0, 0.0),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "einsum": lambda x: torch.einsum("abc,abd->acd", x, x),
    "complex": lambda x: torch.view_as_complex(torch.stack([x.float(), x.float()], -1)).conj(),
    "negative view": lambda x: torch._neg_view(x),
    "item-free index": lambda x: x[:, torch.tensor([0, 0])],
    "cumulative": lambda x: x.cumsum(1),
    "a list of one": lambda x: x.chunk(1),
}


quickly = settings(deadline=None, max_examples=25)


@pytest.mark.parametrize("name", UNARY)
@quickly
@given(tensors())
def test_ops_of_one_tensor(name: str, x: Tensor) -> None:
    assert_alike(UNARY[name], x)


@quickly
@given(tensors(), tensors(), st.sampled_from([torch.add, torch.mul, torch.sub, torch.maximum]))
def test_sums_and_products_with_any_strides(x: Tensor, y: Tensor, op: Callable[..., Any]) -> None:
    y = y[:1, :1, :1]
    assert_alike(op, x, y)
    assert_alike(op, y, x)


@quickly
@given(tensors(), st.integers(1, 4))
def test_matrix_products(x: Tensor, wide: int) -> None:
    weight = MODE.from_tensor(torch.empty(wide, x.shape[-1], dtype=x.dtype)).requires_grad_()
    assert_alike(F.linear, x, weight)
    assert_alike(lambda one, other: torch.bmm(one, other.transpose(1, 2)), x, x)


@quickly
@given(tensors(4))
def test_attention(x: Tensor) -> None:
    assert_alike(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), x)


@quickly
@given(tensors(), st.sampled_from([*UNARY]))
def test_gradients(x: Tensor, name: str) -> None:
    x = x.detach().requires_grad_()

    def gradient(x: Tensor) -> Any:
        leaf = next(iter(tree_leaves(UNARY[name](x))))
        if not (isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()):
            return None
        return torch.autograd.grad(leaf.sum(), x)

    expected = gradient(x)
    with Quick():
        found = [gradient(x) for _ in range(3)]
    for out in found:
        assert facts(out) == facts(expected)


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ops that torch made a fake result of, from now on."""
    calls: list[Any] = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(func)
        return dispatch(mode, func, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)
    return calls


@pytest.mark.skipif(not CAN_MAKE_FAKES, reason="this torch lacks what quick results are made with")
def test_torch_is_asked_once_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = asked(monkeypatch)
    x = MODE.from_tensor(torch.zeros(4, 4))
    with Quick():
        for _ in range(5):
            torch.relu(x)
            x.transpose(0, 1)
    assert calls.count(torch.ops.aten.relu.default) == 1
    assert calls.count(torch.ops.aten.transpose.int) == 1


@pytest.mark.skipif(not CAN_MAKE_FAKES, reason="this torch lacks what quick results are made with")
@pytest.mark.parametrize(
    "other",
    [
        lambda x: torch.relu(MODE.from_tensor(torch.zeros(4, 5))),
        lambda x: torch.relu(x.t()),
        lambda x: torch.relu(x.double()),
    ],
)
def test_another_geometry_is_another_call(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = MODE.from_tensor(torch.zeros(4, 6))
    with Quick():
        torch.relu(x)
        calls = asked(monkeypatch)
        other(x)
    assert torch.ops.aten.relu.default in calls


def test_a_number_and_a_whole_number_are_not_the_same() -> None:
    x = MODE.from_tensor(torch.zeros(3, dtype=torch.int64))
    with Quick():
        assert [(x + one).dtype for one in (1, 1.0, True, 1, 1.0)] == [
            torch.int64, torch.float32, torch.int64, torch.int64, torch.float32,
        ]  # fmt: skip


def test_ops_with_data_are_run() -> None:
    with Quick():
        for _ in range(2):
            assert torch.tensor([1.0, 2.0]).mul(2).tolist() == [2, 4]


def test_what_depends_on_the_random_state_is_no_constant() -> None:
    with Quick():
        assert not torch.equal(torch.rand(8), torch.rand(8))


def test_two_results_are_two_tensors() -> None:
    x = MODE.from_tensor(torch.zeros(4))
    with Quick():
        first, second, third = (torch.relu(x) for _ in range(3))
    assert len({one.untyped_storage()._cdata for one in (first, second, third)}) == 3
    second.requires_grad_()
    assert not third.requires_grad


def test_data_is_still_refused() -> None:
    x = MODE.from_tensor(torch.zeros(4))
    with Quick():
        torch.relu(x)
        y = torch.relu(x)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        y.data_ptr()
    with pytest.raises(DataDependentOutputException):
        y[0].item()


def test_a_view_of_a_conjugate_is_one_after_a_view_of_the_same_geometry_that_is_none() -> None:
    x = MODE.from_tensor(torch.zeros(4, 6, dtype=torch.complex64))
    with Quick():
        for _ in range(2):
            assert not x.view(6, 4).is_conj()
            assert x.conj().view(6, 4).is_conj()
            assert torch._neg_view(x).view(6, 4).is_neg()


def test_a_view_leaves_a_storage_that_was_emptied_as_it_is() -> None:
    x = MODE.from_tensor(torch.zeros(4, 6))
    with Quick():
        x.t(), x.t()
        x.untyped_storage().resize_(0)
        y = x.t()
    assert y.shape == (6, 4)
    assert y.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert x.untyped_storage().nbytes() == 0


def test_a_view_is_not_learnt_from_one_of_another_argument() -> None:
    x, y = (MODE.from_tensor(torch.zeros(4, 6)) for _ in range(2))
    with Quick():
        for _ in range(2):
            assert storages(x[1:], x, y) == [0]
            assert storages(y[1:], x, y) == [1]


@pytest.mark.skipif(not CAN_MAKE_FAKES, reason="this torch lacks what quick results are made with")
@pytest.mark.parametrize("wrap", [lambda one: one, nn.Parameter])
def test_tensors_with_data_beside_fake_ones_count_by_their_geometry(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = MODE.from_tensor(torch.zeros(4, 6))
    with Quick():
        expected = facts(torch.mm(x, wrap(torch.zeros(6, 2))).detach())
        calls = asked(monkeypatch)
        for weight in (torch.zeros(6, 2), torch.ones(6, 2)):
            assert facts(torch.mm(x, wrap(weight)).detach()) == expected
        assert torch.ops.aten.mm.default not in calls
        assert torch.mm(x, wrap(torch.zeros(6, 3))).shape == (4, 3)
        assert torch.mm(x, MODE.from_tensor(torch.zeros(6, 2))).shape == (4, 2)
    assert calls.count(torch.ops.aten.mm.default) == 2


def test_a_single_number_with_data_goes_torchs_way() -> None:
    x = MODE.from_tensor(torch.zeros(4, dtype=torch.int64))
    with Quick():
        for _ in range(2):
            assert (x + torch.tensor(1)).dtype is torch.int64
            assert (x + torch.tensor(1.0)).dtype is torch.float32
            assert (x + torch.ones(1)).dtype is torch.float32


@pytest.mark.parametrize("index", [torch.tensor([True, False, True, False]), torch.tensor([True] * 4)])
def test_data_that_decides_on_the_shape_is_still_asked_for(index: Tensor) -> None:
    x = MODE.from_tensor(torch.zeros(4))
    with Quick():
        for _ in range(2):
            with pytest.raises(DynamicOutputShapeException):
                x[index]


def test_a_ledger_may_share_results_with_the_next() -> None:
    fakes = FakeOpCache()
    x = MODE.from_tensor(torch.zeros(10))
    for _ in range(2):
        with Ledger(fakes=fakes) as ledger:
            y = torch.relu(x)
            assert ledger.live == 40
            del y
            assert ledger.live == 0
