"""What the rerun engine does in C++ without a trip into Python, and programs for which that could go wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sac
from sac.recompute import rerun
from sac.recompute.rerun import ForwardMode, RecomputeMode, RerunState
from sac.recompute.value_ids import ValueIds
from sac.region import module_state
from sac.region.frame import RecomputeProgress
from sac.region.module_state import Spare
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective, square
from tests.support.native_engine import LIBRARY, assert_same_with_library, needs_library, with_library
from tests.support.training import assert_same, built, train

pytestmark = needs_library
WHOLE, PRODUCTS = {"module": "sub", "do": "save"}, save("matmul")


def calls_of(owner: Any, name: str, build: Callable[[], Stack], value: Any, *, native: bool) -> int:
    """How often a method is called in the fourth step."""
    with with_library(native):
        model = sac.apply(built(build), value)
        for _ in range(4):
            train(model, steps=1, make_input=square)
        with mock.patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)) as method:
            train(model, steps=1, make_input=square)
        return method.call_count


def routes(block: FunctionBlock, x: Tensor) -> Tensor:
    """Reads what it saves and a tensor from outside, and ends with a write into what it has made."""
    weights, chosen = (x @ block.a + OUTSIDE).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for expert in range(3):
        row, slot = (chosen % 3 == expert).nonzero(as_tuple=True)
        out.index_add_(0, row, (x[row] @ block.b).sin() * weights[row, slot, None] * OUTSIDE[row, slot, None])
    return out


OUTSIDE = torch.linspace(0.5, 1, 64).view(8, 8)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RerunState, "note_reads"),
        (ValueIds, "of"),
        (ValueIds, "name_input_again"),
        (ValueIds, "note_saved"),
        (RecomputeProgress, "stop_before"),
        (ForwardMode, "__torch_dispatch__"),
        (RecomputeMode, "__torch_dispatch__"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_mixture_of_experts_needs_no_python(owner: Any, name: str) -> None:
    build = lambda: Stack(FunctionBlock(routes), FunctionBlock(routes))  # noqa: E731
    assert calls_of(owner, name, build, FULL, native=False) > 0
    if name != "stop_before":  # the class of the library has it too
        assert calls_of(owner, name, build, FULL, native=True) == 0


def test_saved_results_are_compared_in_the_library() -> None:
    build = lambda: Stack(FunctionBlock(routes))  # noqa: E731
    assert calls_of(rerun, "find_different", build, FULL, native=False) == 1
    assert calls_of(rerun, "find_different", build, FULL, native=True) == 0


def test_a_saved_result_is_overwritten_in_some_steps() -> None:
    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        h = x @ block.a
        if block.calls % 2:
            h.detach().numpy()[1] = 0.5  # no op, and no version moves
        return (h * 2).sin() @ block.b

    value = selective(policy(PRODUCTS), engine="rerun")
    assert_same_with_library(lambda: Stack(FunctionBlock(function)), value, ops=None, steps=5)


class Sub(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.fc, self.scale, self.calls = body, nn.Linear(8, 8), 1.0, 0
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.body is not unchanged:
            self.calls += 1
        return self.body(self, self.fc(x))


class Block(nn.Module):
    def __init__(self, body: Callable[..., Tensor], inside: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.sub, self.down = body, Sub(inside), nn.Linear(8, 8)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, x).sin()).cos()


def plainly(block: Block, x: Tensor) -> Tensor:
    return block.sub(x) * 2


def unchanged(sub: Sub, y: Tensor) -> Tensor:
    return y.tanh().exp().softmax(-1) + 1


def adds_to_what_it_made(block: Block, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out.add_(block.sub(x))
    return out.mul_(2)


def adds_to_the_result(block: Block, x: Tensor) -> Tensor:
    out = block.sub(x)
    return out.mul_(2) + out


def adds_to_the_buffer(block: Block, x: Tensor) -> Tensor:
    out = block.sub(x)
    with torch.no_grad():
        block.total.add_(out.mean(0))
    return out * block.total.clone()


def writes_to_its_buffer(sub: Sub, y: Tensor) -> Tensor:
    with torch.no_grad():
        sub.seen.mul_(0.5).add_(y.mean(0))
    return y * sub.seen.clone()


def writes_to_its_argument(sub: Sub, y: Tensor) -> Tensor:
    y.mul_(0.5)
    return y.relu_() + 1


def changes_its_state(sub: Sub, y: Tensor) -> Tensor:
    if sub.calls % 3 == 0:
        sub.scale *= 1.5
    return y * sub.scale


def draws(sub: Sub, y: Tensor) -> Tensor:
    return F.dropout(y, 0.3) if sub.calls % 2 else y


def is_normalised(sub: Sub, y: Tensor) -> Tensor:
    return F.batch_norm(y, sub.seen, torch.ones(8), training=True) + 1


def returns_a_buffer(sub: Sub, y: Tensor) -> Tensor:
    return sub.seen + 0 * y if sub.calls % 2 else y


INSIDE = [unchanged, writes_to_its_buffer, writes_to_its_argument, changes_its_state, draws, is_normalised]


@pytest.mark.parametrize("rules", [(WHOLE,), (WHOLE, PRODUCTS)], ids=["module alone", "module and products"])
@pytest.mark.parametrize("body", [plainly, adds_to_what_it_made, adds_to_the_result, adds_to_the_buffer])
@pytest.mark.parametrize("inside", [*INSIDE, returns_a_buffer], ids=lambda one: one.__name__)
def test_saved_modules(inside: Callable[..., Tensor], body: Callable[..., Tensor], rules: tuple[Any, ...]) -> None:
    value = selective(policy(*rules), engine="rerun")
    assert_same_with_library(lambda: Stack(Block(body, inside), Block(body, inside)), value, ops=None, steps=6)


def test_ops_inside_of_a_saved_module_need_no_python() -> None:
    build = lambda: Stack(Block(adds_to_what_it_made, unchanged))  # noqa: E731
    value = selective(policy(WHOLE, PRODUCTS), engine="rerun")
    assert calls_of(ForwardMode, "__torch_dispatch__", build, value, native=False) > 8
    assert calls_of(ForwardMode, "__torch_dispatch__", build, value, native=True) == 0


def test_what_is_outside_is_another_tensor_in_each_step() -> None:
    """Its storage may lie where that of the step before lay."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        table = torch.from_numpy(OUTSIDE.numpy() * (1 + block.calls)).clone() if block.calls % 2 else OUTSIDE
        held.append(table)
        y = (x @ block.a).sin() * held[-1] + table.t()
        del held[0]
        return y @ block.b

    held: list[Tensor] = [OUTSIDE]
    for value in (FULL, selective(policy(PRODUCTS), engine="rerun")):
        assert_same_with_library(lambda: Stack(FunctionBlock(function)), value, ops=None, steps=6)


def test_what_is_outside_is_written_to() -> None:
    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        y = (x @ block.a).sin() + table
        with torch.no_grad():
            table.add_(0.25)
        return (y + table).topk(8, sorted=False).values @ block.b

    for value in (FULL, selective(policy(PRODUCTS), engine="rerun")):
        table = OUTSIDE.clone()
        seen = []
        for native in (True, False):
            with with_library(native):
                table.copy_(OUTSIDE)
                model = built(lambda: Stack(FunctionBlock(function)))
                seen.append(train(sac.apply(model, value), make_input=square))
        table.copy_(OUTSIDE)
        assert_same(seen[0], seen[1])
        assert_same(train(built(lambda: Stack(FunctionBlock(function))), make_input=square), seen[0])


def test_a_table_of_call_sites_lies_where_another_lay() -> None:
    """What a thread remembers of a table's sites is of no use for the next table, whose rules may be other ones."""
    reports: dict[int, list[Any]] = {}
    for turn in range(12):
        rules = [save("matmul"), save("aten.sin"), {**save("attention"), "optional": True}][turn % 3]
        value = selective(policy(rules), engine="rerun")
        with with_library():
            model = sac.apply(built(lambda: Stack(FunctionBlock(routes))), value)
            train(model, steps=3, make_input=square)
            reports.setdefault(turn % 3, []).append(sac.report(model).to_dict())
        del model
        gc.collect()
    assert all(one == found[0] for found in reports.values() for one in found)
    assert reports[0][0] != reports[1][0] != reports[2][0]


def resized(one: Tensor) -> None:
    one.resize_(32)


def moved(one: Tensor) -> None:
    one.data = torch.ones(8)


def set_by_numpy(one: Tensor) -> None:
    one.numpy()[3] = 7


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "not": lambda one: None,
    "read": lambda one: one.sin(),
    "written": lambda one: one.mul_(2),
    "written and restored": lambda one: one.mul_(2).mul_(0.5),
    "moved": moved,
    "resized": resized,
    "by numpy": set_by_numpy,
    "by numpy with another bit": lambda one: one.numpy().__setitem__(0, -0.0),
}
TENSORS: dict[str, Callable[[], Tensor]] = {
    "plain": lambda: torch.zeros(8),
    "part": lambda: torch.zeros(16)[4:12],
    "parameter": lambda: nn.Parameter(torch.zeros(8), requires_grad=False),
    "subclass": lambda: torch.zeros(8).as_subclass(Other),
    "empty": lambda: torch.zeros(8)[:0],
    "large": lambda: torch.zeros(1 << 15)[:8],
}


class Other(Tensor):
    pass


POSSIBLE = [(kind, one) for kind in TENSORS for one in CHANGES if not (kind == "empty" and one.startswith("by numpy"))]


@pytest.mark.parametrize("most", [0, 1 << 16])
@pytest.mark.parametrize(("kind", "change"), POSSIBLE)
def test_a_spare_tensor_was_changed(kind: str, change: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for native in (LIBRARY, None):
        monkeypatch.setattr(module_state, "library", lambda native=native: native)
        one = TENSORS[kind]()
        spare = Spare(one, most)
        CHANGES[change](one)
        answers.append(spare.was_changed)
    assert answers[0] == answers[1]
