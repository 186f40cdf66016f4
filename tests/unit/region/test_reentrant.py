"""Reentrant regions: arguments and results of any structure, and backwards as often as the mode allows, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from sac.errors import RegionError
from tests.support.cases import WIDTH, Run, Seen, hidden, layer, seen
from tests.support.recording import Recorder
from tests.support.stored_regions import as_region, plainly, wrong

reentrant = partial(sac.checkpoint, use_reentrant=True)


# -- Arguments and results


@dataclasses.dataclass
class Registered:
    hidden: Tensor
    count: int


pytree.register_pytree_node(
    Registered, lambda one: ([one.hidden, one.count], None), lambda leaves, _: Registered(*leaves)
)


def registered_dataclasses(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda given: Registered(model(given.hidden) * given.count, given.count + 1), Registered(h, 2))
    assert type(out) is Registered
    assert out.count == 3
    return seen(out, x, model)


def arguments_are_returned(run: Run) -> Seen:
    model, (x, h), fixed = layer(), hidden(4, WIDTH), torch.ones(3)
    out, same, _ = run(lambda h, fixed: (model(h), h, fixed), h, fixed)
    assert not fixed.requires_grad
    return seen([out, same], x, model)


def one_result_at_several_places(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Any:
        y = model(h)
        return y, [y, {"again": y}]

    first, (second, third) = run(body, h)
    assert first is second is third["again"]
    return seen([first, second, third], x, model)


def a_buffer_and_a_parameter_are_returned(run: Run) -> Seen:
    buffer, linear, (x, h) = torch.ones(WIDTH), nn.Linear(WIDTH, WIDTH), hidden(4, WIDTH)
    out, weight, transposed, _ = run(lambda h: (h.sin() * buffer, linear.weight, linear.weight.t(), buffer), h)
    assert not buffer.requires_grad
    return seen([out, weight, transposed], x, linear)


def views_of_the_argument(run: Run) -> Seen:
    x, h = hidden(4, WIDTH)
    flat, row = run(lambda h: (h.view(-1)[3:9], h[1]), h)
    return seen([flat * 2, row.exp(), h], x)


def views_of_a_result(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Any:
        y = model(h)
        return y, y.t(), y[1:3], (y * 2).t()

    whole, transposed, rows, other = run(body, h)
    other.mul_(3)  # shares memory with no other result
    return seen([whole, transposed, rows, other], x, model)


def only_a_keyword_needs_a_gradient(run: Run) -> Seen:
    frozen, (x, h) = layer().requires_grad_(False), hidden(4, WIDTH)
    return seen(run(lambda first, *, other: frozen(first) * other, torch.randn(4, WIDTH), other=h), x)


def gradients_in_other_strides(run: Run) -> Seen:
    """What arrives at the argument is transposed: a bias before it adds that up in another order than a copy."""
    linear, (x, h) = nn.Linear(WIDTH, 33), hidden(65, WIDTH)
    out = run(lambda h: h.t().contiguous().softmax(0), linear(h))
    return seen(out, x, linear)


def a_requirement_that_comes_later(run: Run) -> Seen:
    model, x = layer(), torch.randn(4, WIDTH)
    out = run(model, x)
    x.requires_grad_()
    found = seen(out, model)
    assert x.grad is None
    return found


PROGRAMS = [
    registered_dataclasses,
    arguments_are_returned,
    one_result_at_several_places,
    a_buffer_and_a_parameter_are_returned,
    views_of_the_argument,
    views_of_a_result,
    only_a_keyword_needs_a_gradient,
    gradients_in_other_strides,
    a_requirement_that_comes_later,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equal_to_the_plain_call(program: Callable[[Run], Seen]) -> None:
    assert wrong(program, reentrant) == []


class Hiding:
    weight = torch.ones(WIDTH, requires_grad=True)

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.weight


WEIGHT = nn.Parameter(torch.ones(WIDTH))


def test_a_weight_that_nothing_but_the_run_shows_is_trained() -> None:
    """No argument and no module needs a gradient: grad mode in the forward tells."""
    for body, weight in ((lambda h: h * WEIGHT, WEIGHT), (Hiding().scaled, Hiding.weight)):
        for count in (1, 2):
            weight.grad = None
            out, constant = reentrant(lambda h, body=body: (body(h), h * 2), torch.full((WIDTH,), 3.0))
            assert not constant.requires_grad
            out.sum().backward()
            assert torch.equal(weight.grad, torch.full((WIDTH,), 3.0)), count


def test_a_frozen_region_keeps_nothing_and_claims_no_gradient() -> None:
    frozen, x, recorder = layer().requires_grad_(False), torch.randn(4, WIDTH), Recorder()
    for _ in range(2):
        with recorder:
            out, again = reentrant(lambda h: (frozen(h), h), x)
        assert not out.requires_grad
        assert again is x
        assert recorder.live_bytes(besides=out) == 0


# -- What the mode refuses

SHARED_MEMORY: dict[str, Callable[[Tensor], Any]] = {
    "the argument": lambda h: (h.view(-1),),
    "parts": lambda h: ((y := h.sin())[0], y[1]),
    "the whole and a part": lambda h: (y := h.sin(), y[1]),
    "two views of one part": lambda h: ((y := h.sin())[1].view(2, 4), y[1]),
}


@pytest.mark.parametrize("body", SHARED_MEMORY.values(), ids=SHARED_MEMORY)
def test_a_write_to_a_result_that_shares_memory_is_refused(body: Callable[[Tensor], Any]) -> None:
    """A write to one would change the other's value unseen, and the plain call would rewrite their history."""
    for result in reentrant(body, hidden(4, WIDTH)[1]):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            result.mul_(2)


class Unregistered:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def put_into_an_argument(given: dict[str, Tensor]) -> Tensor:
    given["new"] = given["old"].exp()
    return given["new"] * 2


def test_gradients_go_through_what_a_module_remembers() -> None:
    """A tensor with a graph in an attribute gets its gradient; in a container of the module, it is an error."""

    def gradient(run: Any, name: str) -> Tensor:
        torch.manual_seed(0)
        block, scale = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, requires_grad=True)
        block.scale, block.held = scale.cos(), {"scale": scale.sin()}
        block.forward = lambda x: F.linear(x, block.weight) * (block.scale if name == "scale" else block.held["scale"])
        run(block, torch.randn(2, WIDTH, requires_grad=True)).sin().sum().backward()
        assert scale.grad is not None
        return scale.grad

    assert torch.equal(gradient(lambda block, x: block(x), "scale"), gradient(reentrant, "scale"))
    with pytest.raises(RegionError, match="reads a tensor with a graph from a container or object of a module"):
        gradient(reentrant, "held")


def test_tensors_that_autograd_does_not_see_are_refused() -> None:
    _, h = hidden(4, WIDTH)
    with pytest.raises(RegionError, match="the region put a tensor into a container or object"):
        reentrant(lambda h: Unregistered(h.exp()), h)
    given = Unregistered(torch.ones(2))
    assert reentrant(lambda h, given: (h.exp(), given), h, given)[1] is given
    with pytest.raises(RegionError, match="the region put a tensor into a container or object"):
        reentrant(put_into_an_argument, {"old": h})
    assert reentrant(lambda given: given.pop("old").exp(), {"old": h}).requires_grad


@pytest.mark.parametrize("store", ["whole", "host", "contiguous"])
def test_a_second_backward_after_one_that_retained_nothing_is_an_error(store: str) -> None:
    model, (_, h) = layer(), hidden(4, WIDTH)
    out = as_region(store, reentrant=True)(model, h).sum()
    out.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    with pytest.raises(RegionError, match=r"memory had been freed\n    fix: pass retain_graph=True"):
        out.backward()
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(before, model.parameters(), strict=True))


def test_double_backward_is_an_error() -> None:
    model, (x, h) = layer(), hidden(4, WIDTH)
    with pytest.raises(RegionError, match=r"no double backward .*\n    fix: pass use_reentrant=False"):
        reentrant(model, h).sum().backward(create_graph=True)
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


# -- Nested, and interrupted

CHECKPOINTS: dict[str, Run] = {
    "reentrant": reentrant,
    "non-reentrant": sac.checkpoint,
    "torch's reentrant": partial(torch_checkpoint, use_reentrant=True),
    "torch's non-reentrant": partial(torch_checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize(
    ("outer", "inner"), [pair for pair in itertools.product(CHECKPOINTS, repeat=2) if "reentrant" in pair]
)
def test_regions_in_regions(outer: str, inner: str) -> None:
    def program(run: Run) -> Seen:
        """No tensor has more than two uses, so that there is but one order to add its gradients up in."""
        around, inside = (run, run) if run is plainly else (CHECKPOINTS[outer], CHECKPOINTS[inner])
        first, second, third, (x, h) = layer(dropout=0.3), layer(dropout=0.3), layer(dropout=0.3), hidden(4, WIDTH)
        return seen(around(lambda h: third(inside(second, first(h)).relu()), h), x, first, second, third)

    assert wrong(program, reentrant) == []
