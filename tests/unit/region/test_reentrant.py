"""Reentrant regions: arguments and results of any structure, gradients bit for bit those of the plain call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.support.cases import WIDTH, Run, Seen, hidden, layer, seen
from tests.support.recording import Recorder
from tests.support.reentrant import error_of, reentrant, wrong


@dataclasses.dataclass
class Registered:
    hidden: Tensor
    count: int


pytree.register_pytree_node(
    Registered, lambda one: ([one.hidden, one.count], None), lambda leaves, _: Registered(*leaves)
)


class Unregistered:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def registered_dataclasses(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda given: Registered(model(given.hidden) * given.count, given.count + 1), Registered(h, 2))
    assert type(out) is Registered
    assert out.count == 3
    return seen(out, x, model)


def an_argument_is_returned(run: Run) -> Seen:
    model, (x, h), fixed = layer(), hidden(4, WIDTH), torch.ones(3)
    out, same, constant = run(lambda h, fixed: (model(h), h, fixed), h, fixed)
    assert same is h
    assert constant is fixed
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


def integers_and_booleans(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out, places, mask = run(lambda h: (model(h), h.argmax(-1), h > 0), h)
    assert not places.requires_grad
    assert not mask.requires_grad
    return seen([out, places, mask], x, model)


def a_captured_buffer_is_returned(run: Run) -> Seen:
    buffer, (x, h) = torch.ones(WIDTH), hidden(4, WIDTH)
    out, _ = run(lambda h: (h.sin() * buffer, buffer), h)
    assert not buffer.requires_grad
    return seen(out, x)


def a_parameter_is_returned(run: Run) -> Seen:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), hidden(4, WIDTH)
    out, weight, transposed = run(lambda h: (h.sin(), linear.weight, linear.weight.t()), h)
    assert weight is linear.weight
    return seen([out, weight, transposed], x, linear)


def a_parameter_as_argument(run: Run) -> Seen:
    weight, (x, h) = nn.Parameter(torch.randn(WIDTH, WIDTH)), hidden(4, WIDTH)
    found = seen(run(lambda h, weight: (h @ weight).tanh(), h, weight), x)
    return found | {"weight": weight.grad}


def views_of_the_argument(run: Run) -> Seen:
    x, h = hidden(4, WIDTH)
    flat, row = run(lambda h: (h.view(-1)[3:9], h[1]), h)
    return seen([flat * 2, row.exp(), h], x)


def a_view_of_a_result(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Any:
        y = model(h)
        return y, y.t(), y[1:3], (y * 2).t()

    whole, transposed, rows, other = run(body, h)
    other.mul_(3)  # shares memory with no other result
    return seen([whole, transposed, rows, other], x, model)


def a_result_is_written_to(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda h: model(h).t(), h)
    out += 1
    return seen(out.mul_(2), x, model)


def grad_mode_inside(run: Run) -> Seen:
    linear, (x, h), scale = nn.Linear(WIDTH, WIDTH), hidden(4, WIDTH), torch.randn(WIDTH, requires_grad=True)

    def body(h: Tensor) -> Tensor:
        h = linear(h)
        with torch.enable_grad():
            return h * scale

    return seen(run(body, h), x, linear, scale)


def no_grad_inside(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = h.abs().amax()
        return model(h / scale)

    return seen(run(body, h), x, model)


def a_part_is_frozen(run: Run) -> Seen:
    frozen, trained, (x, h) = layer().requires_grad_(False), layer(), hidden(4, WIDTH)
    return seen(run(lambda h: trained(frozen(h)), h), x, frozen, trained)


def only_a_keyword_needs_a_gradient(run: Run) -> Seen:
    frozen, (x, h) = layer().requires_grad_(False), hidden(4, WIDTH)
    return seen(run(lambda first, *, other: frozen(first) * other, torch.randn(4, WIDTH), other=h), x)


def gradients_in_other_strides(run: Run) -> Seen:
    """What arrives at the argument is transposed: a bias before it adds that up in another order than a copy."""
    linear, (x, h) = nn.Linear(WIDTH, 33), hidden(65, WIDTH)
    out = run(lambda h: h.t().contiguous().softmax(0), linear(h))
    return seen(out, x, linear)


def an_expanded_argument(run: Run) -> Seen:
    linear, (x, h) = nn.Linear(WIDTH, WIDTH), hidden(1, WIDTH)
    return seen(run(linear, h.expand(5, WIDTH)), x, linear)


def dtypes(run: Run) -> Seen:
    results, sources = [], []
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.complex128):
        x = torch.randn(3, 4, dtype=dtype, requires_grad=True)
        weight = torch.randn(4, 4, dtype=dtype, requires_grad=True)
        out = run(lambda h, weight=weight: (h @ weight).tanh(), x * 1)
        results.append(torch.view_as_real(out) if dtype.is_complex else out)
        sources += [x, weight]
    return seen(results, *sources)


def zero_dimensions(run: Run) -> Seen:
    x = torch.randn((), requires_grad=True)
    return seen([run(torch.exp, x * 2), run(lambda h: h.expand(0, 3), x * 2)], x)


def no_tensor_argument(run: Run) -> Seen:
    weight = nn.Parameter(torch.randn(WIDTH))
    return seen([run(lambda: weight.sin()), run(lambda count: weight * count, 3)], weight)


def a_requirement_that_comes_later(run: Run) -> Seen:
    model, x = layer(), torch.randn(4, WIDTH)
    out = run(model, x)
    x.requires_grad_()
    found = seen(out, model)
    assert x.grad is None
    return found


PROGRAMS = [
    registered_dataclasses,
    an_argument_is_returned,
    one_result_at_several_places,
    integers_and_booleans,
    a_captured_buffer_is_returned,
    a_parameter_is_returned,
    a_parameter_as_argument,
    views_of_the_argument,
    a_view_of_a_result,
    a_result_is_written_to,
    grad_mode_inside,
    no_grad_inside,
    a_part_is_frozen,
    only_a_keyword_needs_a_gradient,
    gradients_in_other_strides,
    an_expanded_argument,
    dtypes,
    zero_dimensions,
    no_tensor_argument,
    a_requirement_that_comes_later,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equal_to_the_plain_call(program):
    assert wrong(program) == []


def test_a_result_claims_a_gradient_only_if_something_is_trained():
    frozen, x = layer().requires_grad_(False), torch.randn(4, WIDTH)
    for _ in range(2):
        out, again = reentrant(lambda h: (frozen(h), h), x)
        assert not out.requires_grad
        assert again is x


WEIGHT = nn.Parameter(torch.ones(WIDTH))


def test_a_weight_that_nothing_but_the_run_shows_is_trained():
    """No argument and no module needs a gradient: grad mode in the forward tells."""
    for body, weight in ((lambda h: h * WEIGHT, WEIGHT), (Hiding().scaled, Hiding.weight)):
        for count in (1, 2):
            weight.grad = None
            out, constant = reentrant(lambda h, body=body: (body(h), h * 2), torch.full((WIDTH,), 3.0))
            assert not constant.requires_grad
            out.sum().backward()
            assert torch.equal(weight.grad, torch.full((WIDTH,), 3.0)), count


class Hiding:
    weight = torch.ones(WIDTH, requires_grad=True)

    def scaled(self, h: Tensor) -> Tensor:
        return h * self.weight


def test_a_frozen_region_keeps_nothing():
    frozen = layer().requires_grad_(False)
    recorder = Recorder()
    with recorder:
        out = reentrant(frozen, torch.randn(4, WIDTH))
    assert recorder.live_bytes(besides=out) == 0


def test_writing_to_a_view_of_the_argument_is_refused():
    """The plain call would rewrite the history of the argument too."""
    _, h = hidden(4, WIDTH)
    out = reentrant(lambda h: h.view(-1), h)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        out.mul_(2)


def test_results_in_objects_that_are_no_pytree():
    _, h = hidden(4, WIDTH)

    def body(h: Tensor) -> Unregistered:
        return Unregistered(h.exp())

    assert error_of(lambda: reentrant(body, h)) == (
        f"{body.__qualname__}: the region returned a Unregistered, and autograd does not see the tensors that it "
        "holds\n"
        "    fix: return tuples, lists, dicts or what is registered as a pytree, or pass use_reentrant=False"
    )
    given = Unregistered(torch.ones(2))
    _, same = reentrant(lambda h, given: (h.exp(), given), h, given)
    assert same is given


def test_results_put_into_an_argument():
    _, h = hidden(4, WIDTH)

    def body(given: dict[str, Tensor]) -> Tensor:
        given["new"] = given["old"].exp()
        return given["new"] * 2

    assert error_of(lambda: reentrant(body, {"old": h})) == (
        f"{body.__qualname__}: the region put a tensor into a container that it was given, and autograd does not see "
        "it there\n"
        "    fix: return the tensor, or pass use_reentrant=False"
    )
    assert reentrant(lambda given: given.pop("old").exp(), {"old": h}).requires_grad
