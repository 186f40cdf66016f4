"""What Python or a kernel writes where no dispatcher looks, in every call or in some calls only, is never missed.

No call proves anything about the next: whether it is written to may hang on a random number, on a value, on a counter.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sac
from sac.engine.settings import ALWAYS, Settings
from sac.errors import RegionError, SacWarning
from tests.support.blocks import FULL, FunctionBlock, Stack, policy, save, selective
from tests.support.replay_kernels import at
from tests.support.training import assert_same, train

STEPS = 5


def by_numpy(tensor: Tensor) -> None:
    values = tensor.detach().numpy()
    values *= 1.5
    values[0] += 1


def by_data(tensor: Tensor) -> None:
    tensor.data.mul_(1.5)


def by_pointer(tensor: Tensor) -> None:
    values = at(tensor)
    values *= 1.5
    values[0] += 1


def that_changes_places(tensor: Tensor) -> None:
    values = tensor.detach().numpy()
    values[:] = values[::-1].copy()


WRITES = {"numpy": by_numpy, "data": by_data, "pointer": by_pointer, "change of places": that_changes_places}

# Whether this call writes. The last three are not known from the ops that run.
WHEN: dict[str, Callable[[FunctionBlock, Tensor], bool]] = {
    "always": lambda block, x: True,
    "by a value": lambda block, x: x.sum().item() > 0,
    "by a value that is read unseen": lambda block, x: float(x.detach().numpy().sum()) > 0,
    "from the second call on": lambda block, x: block.calls > 1,
    "by a random number": lambda block, x: random.random() < 0.5,
}


class Writing:
    """What a block's body writes with, and when."""

    def __init__(self, write: Callable[[Tensor], None], when: Callable[[FunctionBlock, Tensor], bool]) -> None:
        self.write, self.when = write, when

    def __call__(self, block: FunctionBlock, x: Tensor, target: Tensor) -> None:
        if self.when(block, x):
            self.write(target)


def pointwise(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    h = (x @ block.a).sin() + 1
    writes(block, x, h)
    return (h.sin() @ block.b) * h.cos()


def product(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    h = x @ block.a
    writes(block, x, h)
    return (h.sin() @ block.b) + h.cos()


def product_read_before(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    h = x @ block.a
    before = h * 1.5
    writes(block, x, h)
    return before.sin() * h.cos()


def view(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    h = (x @ block.a) * 2
    rows = h[2:4]
    writes(block, x, rows)
    return (h.sin() @ block.b) * rows.sum()


def constant(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    scale = torch.ones(8, 8)
    h = x @ block.a + scale
    writes(block, x, scale)
    return (h * scale).sin() @ block.b


def numbers(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    scale = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]] * 8)
    writes(block, x, scale)
    return ((x @ block.a) * scale).sin() @ block.b


def made_of_a_range(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    scale = torch.arange(8.0).expand(8, 8).contiguous()
    writes(block, x, scale)
    return ((x @ block.a) * scale).sin() @ block.b


def without_gradient(block: FunctionBlock, x: Tensor, writes: Writing) -> Tensor:
    h = (x @ block.a).sin()
    mask = h.detach().abs()
    writes(block, x, mask)
    return (h * mask) @ block.b


TARGETS = (pointwise, product, product_read_before, view, constant, numbers, made_of_a_range, without_gradient)
NOTHING = policy({**save("*", call={"index": 99}), "optional": True})
PRODUCTS = policy({**save("matmul"), "optional": True})
SECOND = policy({**save("matmul", call={"index": 1}), "optional": True})
VALUES = {"nothing": NOTHING, "products": PRODUCTS, "the second": SECOND}
ENGINES = ("auto", "replay", "rerun")


def modes(turn: int) -> dict[str, Any]:
    """Mode full, and each engine with one of the policies; in three turns each has had all of them."""
    named = {engine: [*VALUES][(turn + place) % len(VALUES)] for place, engine in enumerate(ENGINES)}
    chosen = {f"{engine}, {name}": selective(VALUES[name], engine=engine) for engine, name in named.items()}
    return {"full": FULL, **chosen}


def square_input(device: str) -> tuple[Tensor]:
    return (torch.randn(8, 8, device=device),)


def trained(value: Any, body: Callable[..., Tensor], writes: Writing) -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    model = Stack(*(FunctionBlock(lambda block, x: body(block, x * 1, writes)) for _ in range(2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)  # replay gives way
        return train(sac.apply(model, value), steps=STEPS, make_input=square_input)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("body", TARGETS, ids=lambda body: body.__name__)
def test_every_mode_is_as_without_us(body: Callable[..., Tensor], when: str) -> None:
    turn = TARGETS.index(body) + [*WHEN].index(when)
    for number, write in enumerate(WRITES.values() if when == "from the second call on" else (by_numpy,)):
        writes = Writing(write, WHEN[when])
        expected = trained("none", body, writes)
        for mode, value in modes(turn + number).items():
            try:
                assert_same(expected, trained(value, body, writes))
            except AssertionError as error:
                raise AssertionError(f"{mode}, {write.__name__}: {error}") from error


def test_without_comparing_they_are_missed() -> None:
    """`verify: never` is the user's word that nothing writes unseen."""
    writes = Writing(by_numpy, WHEN["from the second call on"])
    expected = trained("none", pointwise, writes)
    for verify in ("never", "first"):
        with pytest.raises(AssertionError):
            assert_same(expected, trained(selective(PRODUCTS, verify=verify), pointwise, writes))


def test_comparing_in_every_call_is_the_default() -> None:
    assert Settings().verify == ALWAYS


def chosen(block: FunctionBlock, x: Tensor) -> Tensor:
    """What topk returns is overwritten, by other numbers the second time."""
    h = x @ block.a
    values, places = h.topk(3)
    places.numpy()[:] = (places.numpy() + 1) % 8
    return h.gather(1, places) * values.sin()


def test_a_choice_that_is_overwritten_is_made_again_if_it_is_the_same() -> None:
    for value in (FULL, *(selective(NOTHING, engine=engine) for engine in ("auto", "rerun"))):
        seen = []
        for each in ("none", value):
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", SacWarning)
                seen.append(train(sac.apply(Stack(FunctionBlock(chosen)), each), steps=3, make_input=square_input))
        assert_same(*seen)


RUNS = (1 + number for number in range(99))  # a generator is not put back


class Tie(nn.Module):
    """A router that chooses anew each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        values = h.detach().numpy()
        values[:] = np.roll(values, next(RUNS), 1)
        places = h.topk(3).indices
        places.numpy()[:] = (places.numpy() + 1) % 8
        return h.gather(1, places).sin()


def test_a_choice_that_is_overwritten_and_not_the_same_again_is_an_error() -> None:
    model = sac.apply(Stack(Tie()), FULL)
    out = model(torch.randn(8, 8))
    with pytest.raises(RegionError) as caught:
        out.sum().backward()
    assert str(caught.value) == (
        "blocks.0: the result of aten.topk.default in forward was overwritten, not by an op but by NumPy or a "
        "kernel on raw pointers, and recomputation returns another result\n"
        "    fix: write to a copy of it"
    )


class Slope(nn.Module):
    """Takes a gradient inside its forward, after NumPy has written to a tensor that an earlier op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.load = torch.zeros(8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:  # the comparison in the first call shows nothing of the others
            self.load.numpy()[0] += 1
        h = torch.relu(self.first(x - self.load.tanh()))
        (slope,) = torch.autograd.grad(self.second(h).sin().sum(), h, create_graph=True)
        if self.calls == 3:
            self.load.numpy()[0] += 1
        return h + slope


@pytest.mark.parametrize("engine", ["auto", "replay", "rerun"])
def test_what_numpy_wrote_around_a_gradient_inside(engine: str) -> None:
    assert_same_steps(Stack(Slope()), engine, 4)


def assert_same_steps(model: nn.Module, engine: str, steps: int) -> None:
    """Train a model without sac, and a copy of it with sac that verifies first calls only."""
    plain = copy.deepcopy(model)
    sac.apply(model, selective(policy(save("matmul")), engine=engine, verify="first"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        for _ in range(steps):
            x = torch.randn(4, 8)
            assert_same(*(_gradients_and_load(one, x) for one in (plain, model)))


def _gradients_and_load(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return gradients | {"load": model.blocks[0].load.clone()}


class Mixed(nn.Module):
    """An op and NumPy write to the same small tensor in one call: ``order`` says how, from the third call on."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.load = torch.zeros(8)
        self.order = order
        self.calls = 0

    def write(self, how: str) -> None:
        if how == "n":
            if self.calls > 2:
                self.load.numpy()[0] += 1
        elif how == "d":
            self.load.data.add_(1)
        else:
            with torch.no_grad():
                self.load.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        factor = self.load.cos() if self.order.startswith("r") else 1.0
        for how in self.order.removeprefix("r"):
            self.write(how)
        return x + self.second(torch.relu(self.first(x * factor * (self.load * 1).cos())))


@pytest.mark.parametrize("engine", ["auto", "replay", "rerun"])
@pytest.mark.parametrize("order", ["dn", "nd", "on", "no", "dnd", "ono", "rnd", "rno", "rn"])
def test_what_numpy_and_an_op_wrote_to_one_tensor(order: str, engine: str) -> None:
    assert_same_steps(Stack(Mixed(order), Mixed(order)), engine, 5)


class Loads(nn.Module):
    """NumPy writes to buffers of these numbers of elements, or to attributes, in every call."""

    def __init__(self, sizes: tuple[int, ...], kind: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.loads = [torch.zeros(size) for size in sizes]
        for place, load in enumerate(self.loads if kind == "buffer" else ()):
            self.register_buffer(f"load{place}", load)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0
        for load in self.loads:
            load.numpy()[:] += 0.5
            factor = factor * (1 + load.mean())
        return x + self.second((self.first(x) * factor).tanh())


@pytest.mark.parametrize(
    "value", [FULL, *(selective(PRODUCTS, engine=engine) for engine in ENGINES)], ids=["full", *ENGINES]
)
@pytest.mark.parametrize("sizes", [(4,), (400,), (4, 400), (1 << 14,)], ids=str)
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_what_numpy_wrote_to_tensors_of_up_to_64_kib(value: Any, sizes: tuple[int, ...], kind: str) -> None:
    """In the smallest case the bytes are always compared, in the others where the call is recorded."""

    def trained(value: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        model = sac.apply(Stack(Loads(sizes, kind), Loads(sizes, kind)), value)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacWarning)  # replay gives way
            return train(model, steps=3, make_input=square_input)

    assert_same(trained("none"), trained(value))
