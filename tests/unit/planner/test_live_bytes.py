"""The ledger counts each storage once, from the end of the op that made it to its own end."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from sac.memory_timeline import measure_memory
from sac.planner.fakes import fake_mode
from sac.planner.live_bytes import KernelWorkspace, Ledger
from sac.tensors import STORAGE_WATCHERS, cloned


@pytest.fixture(params=["real", "fake"])
def x(request: pytest.FixtureRequest) -> Tensor:
    """Ten floats, forty bytes."""
    return torch.zeros(10) if request.param == "real" else fake_mode().from_tensor(torch.zeros(10))


def test_results_count_and_arguments_do_not(x: Tensor) -> None:
    with Ledger() as ledger:
        y = x + 1
        assert ledger.live == 40
        z = y.double()
        assert ledger.live == 40 + 80
        del y
        assert (ledger.live, ledger.peak) == (80, 120)
        del z
        assert ledger.live == 0


def test_what_is_noted_counts_once(x: Tensor) -> None:
    with Ledger() as ledger:
        ledger.note(x)
        ledger.note(x[2:])
        assert ledger.live == 40


def test_views_and_writes_in_place_are_not_new(x: Tensor) -> None:
    with Ledger() as ledger:
        y = x * 2
        held = y.view(2, 5), y[3:], y.detach(), y.unsqueeze(0).expand(4, 10)
        y.add_(1)
        torch.add(x, x, out=y)
        assert ledger.live == 40
        del y
        assert ledger.live == 40  # its views hold it
        del held
        assert ledger.live == 0


@pytest.mark.parametrize("place", [(), (3, (2, 2), (2, 1))], ids=["whole", "a part"])
def test_a_storage_into_which_a_tensor_is_put_is_not_held(x: Tensor, place: Any) -> None:
    with Ledger(workspace=KernelWorkspace()) as ledger:
        y = x * 2
        z = x.new_empty(0).set_(y.untyped_storage(), *place)
        assert ledger.live == 40
        assert z.shape == (place[1] if place else (10,))
        assert z.untyped_storage()._cdata == y.untyped_storage()._cdata
        assert type(z) is type(x)
        assert z.device == x.device
        del y
        assert ledger.live == 40
        del z
        assert ledger.live == 0


def test_each_of_several_results_counts_once(x: Tensor) -> None:
    with Ledger() as ledger:
        values, indices = x.topk(3)
        assert ledger.live == 3 * 4 + 3 * 8
        halves = (x * 1).chunk(2)  # two views of one storage
        assert ledger.live == 36 + 40
        del halves, values, indices
        assert ledger.live == 0


def test_a_list_of_results_counts(x: Tensor) -> None:
    with Ledger() as ledger:
        sums = torch._foreach_add([x, x], 1)
        assert ledger.live == 80
        del sums
        assert ledger.live == 0


def test_a_storage_counts_as_a_whole_and_empty_ones_not_at_all(x: Tensor) -> None:
    with Ledger() as ledger:
        part = torch.cat([x, x])[:3]
        assert ledger.live == 80
        empty = x.new_empty(0)
        assert ledger.live == 80
        del part, empty
        assert ledger.live == 0


def test_sizes_are_rounded_up_to_the_allocators_block(x: Tensor) -> None:
    with Ledger(512) as ledger:
        y, z = x + 1, x.new_zeros(129)
        assert ledger.live == 512 + 1024
        del y, z
        assert ledger.live == 0


def test_the_peak_may_be_set_anew(x: Tensor) -> None:
    with Ledger() as ledger:
        y = x + 1
        del y
        ledger.peak = ledger.live
        z = x.new_ones(1)
        assert ledger.peak == 4
        del z


def test_copies_that_no_mode_sees_count() -> None:
    x = torch.zeros(10)
    with Ledger() as ledger:
        copied = cloned(x)
        assert ledger.live == 40
        del copied
        assert ledger.live == 0


def test_what_lies_on_the_host_counts_only_there() -> None:
    x = torch.zeros(10)
    with Ledger(on_host=False) as ledger:
        copied = cloned(x)
        assert ledger.live == 0
        del copied


@pytest.mark.parametrize("make", [lambda x: x * 0.5, lambda x: 0.5 * x, lambda x: x / 3.0])
def test_a_number_that_autograd_saves_counts_as_a_double(make: Any) -> None:
    x = torch.zeros(10, requires_grad=True)
    with Ledger() as ledger:
        y = make(x)
        assert ledger.live == 40 + 8
        del y
        assert ledger.live == 0
    assert measure_memory(lambda: make(x)).end_bytes == 48


@pytest.mark.parametrize(
    "make", [lambda x: x * x, lambda x: x + 0.5, lambda x: torch.ones(10) * 0.5, lambda x: x.mul(x)]
)
def test_no_number_counts_where_autograd_saves_none(make: Any) -> None:
    x = torch.zeros(10, requires_grad=True)
    with Ledger() as ledger:
        y = make(x)
        assert ledger.live == 40
        del y
    assert measure_memory(lambda: make(x)).end_bytes == 40


def test_a_number_does_not_count_on_a_device() -> None:
    x = torch.zeros(10, requires_grad=True)
    with Ledger(on_host=False) as ledger:
        y = x * 0.5
        assert ledger.live == 40
        del y


def test_a_sparse_result_is_no_trouble() -> None:
    with Ledger() as ledger:
        y = torch.eye(3).to_sparse()
        assert ledger.live >= 0
        del y


def test_a_random_op_without_data_moves_the_generator_as_with_data() -> None:
    """So what looks at generators sees that numbers were drawn."""
    x = fake_mode().from_tensor(torch.zeros(10))
    state = torch.get_rng_state()
    for op, draws in (
        (lambda: torch.nn.functional.dropout(x, 0.5), True),
        (lambda: torch.native_dropout(x, 0.5, True), True),
        (lambda: torch.native_dropout(x, 0.5, False), False),
        (lambda: torch.native_dropout(x, 0.0, True), False),
        (lambda: torch.rand_like(x), True),
        (lambda: x + 1, False),
    ):
        torch.set_rng_state(state)
        with Ledger():
            op()
        assert torch.equal(torch.get_rng_state(), state) != draws
    torch.set_rng_state(state)


def test_the_gradient_of_an_index_takes_what_it_takes_without_a_mode() -> None:
    """Under a mode autograd copies the zeros that it writes to; the ledger writes to them."""
    x = torch.zeros(100, requires_grad=True)
    index = torch.tensor([1, 1, 5])

    def step() -> None:
        x[index].sum().backward()
        x.grad = None

    with Ledger(workspace=KernelWorkspace()) as ledger:
        step()
    step()
    assert ledger.peak == measure_memory(step).peak_bytes


def test_index_put_of_the_user_is_left_alone() -> None:
    zeros = torch.zeros(4)
    with Ledger():
        out = torch.zeros(4).index_put((torch.tensor([1]),), torch.ones(1), accumulate=True)
        other = zeros.index_put((torch.tensor([1]),), torch.ones(1), accumulate=True)
    assert out.tolist() == other.tolist() == [0, 1, 0, 0]
    assert zeros.tolist() == [0, 0, 0, 0]


def test_grouped_products_of_every_dtype_have_a_shape() -> None:
    mode = fake_mode()
    left, right = mode.from_tensor(torch.zeros(8, 16)), mode.from_tensor(torch.zeros(2, 16, 32))
    ends = mode.from_tensor(torch.tensor([4, 8], dtype=torch.int32))
    with Ledger() as ledger:
        out = torch.ops.aten._grouped_mm.default(left, right, ends)
        assert (out.shape, out.dtype, ledger.live) == ((8, 32), torch.float32, 8 * 32 * 4)


def test_results_are_those_without_a_ledger() -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def run() -> list[Tensor]:
        y = (x @ x).softmax(-1)
        z = y[:, :2].clone().mul_(0.5) / 3
        [gradient] = torch.autograd.grad(z.square().sum(), x)
        return [y, z, gradient]

    with Ledger(workspace=KernelWorkspace()):
        watched = run()
    assert all(torch.equal(one, other) for one, other in zip(watched, run(), strict=True))


def stacks() -> tuple[Any, ...]:
    return _get_current_dispatch_mode_stack(), _get_current_function_mode_stack(), [*STORAGE_WATCHERS]


def test_nothing_watches_after_an_error() -> None:
    before = stacks()
    ledger = Ledger(workspace=KernelWorkspace())
    x = torch.zeros(3)
    with pytest.raises(RuntimeError, match="must match the size"), ledger:
        x + torch.zeros(4)
    assert stacks() == before == ([], [], [])
    live = ledger.live
    y = torch.zeros(100) * 2
    assert ledger.live == live
    del y


def test_one_ledger_in_another() -> None:
    with Ledger() as outer:
        assert len(STORAGE_WATCHERS) == 1
        x = torch.zeros(10)
        with Ledger() as inner:
            y = x + 1
        assert inner.live == outer.live - 40 == 40
        del y
        assert (inner.live, outer.live) == (0, 40)
    assert stacks() == ([], [], [])


def test_what_outlives_the_ledger_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python only prints an error of a callback that tells of an end."""
    troubles: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", troubles.append)
    ledger = Ledger()
    with ledger:
        x, y = torch.zeros(10), torch.zeros(20)
    assert ledger.live == 120
    del y
    assert ledger.live == 40
    gone = weakref.ref(ledger)
    del ledger
    gc.collect()
    assert gone() is None
    del x
    assert troubles == []


def test_a_view_of_what_nobody_noted_counts_from_then_on() -> None:
    """A loss function may hold targets, say: they are allocated, but no input, so they are not known."""
    x = torch.zeros(10)
    with Ledger() as ledger:
        y = x + 1
        assert ledger.live == 40
        z = x[1:]
        assert ledger.live == 80
        del y, z
        assert ledger.live == 40
