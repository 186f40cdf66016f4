"""Reentrant regions that write to their arguments: exact, or one clear error with the data as it was before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sac.full import FullConfig
from tests.support.cases import WIDTH, Run, Seen, hidden, layer, seen
from tests.support.reentrant import error_of, plainly, reentrant, seeded, wrong


def an_activation(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda h: model(h.mul_(2).add_(1)), h)
    return seen([out, h * 3], x, model)


def an_activation_and_no_result(run: Run) -> Seen:
    x, h = hidden(4, WIDTH)

    def body(h: Tensor) -> None:
        h.mul_(h.sigmoid())

    assert run(body, h) is None
    return seen(h * 3, x)


def an_activation_that_is_returned(run: Run) -> Seen:
    x, h = hidden(4, WIDTH)
    out = run(lambda h: h.mul_(h.sigmoid()), h)
    assert out is h
    return seen(out * 3, x)


def an_activation_of_which_a_view_is_returned(run: Run) -> Seen:
    x, h = hidden(4, WIDTH)
    out = run(lambda h: h.mul_(3).view(-1)[3:9], h)
    out.mul_(5)  # seen through h
    return seen([out * 2, h], x)


def a_view_that_the_region_wrote_to(run: Run) -> Seen:
    """The base, other views of it and the view itself all have the new history."""
    model, (x, h) = layer(), hidden(8, WIDTH)
    rows = h[2:6]
    out = run(lambda rows: model(rows.mul_(2)), rows)
    return seen([out, h], x, model)


def through_a_view_of_its_own(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def body(h: Tensor) -> Tensor:
        h[1:3].mul_(2)
        h.view(-1)[::3].add_(1)
        return model(h)

    return seen([run(body, h), h], x, model)


def two_views_that_do_not_overlap(run: Run) -> Seen:
    x, h = hidden(8, WIDTH)
    left, right = h[:, :4], h[:, 4:]
    return seen([run(lambda left, right: left.mul_(2) * right.exp(), left, right), h], x)


def one_tensor_as_two_arguments(run: Run) -> Seen:
    (x, h), frozen, weight = hidden(4, WIDTH), torch.randn(4, WIDTH), torch.randn(WIDTH, requires_grad=True)

    def body(one: Tensor, other: Tensor) -> Tensor:
        assert one is other
        return one.mul_(2) * other.sin() * weight

    return seen([run(body, h, h), run(body, frozen, frozen), h], x, weight)


def a_tensor_that_needed_no_gradient(run: Run) -> Seen:
    """What is written with grad mode on gets a history, what is written without does not."""
    model, (x, h) = layer(), hidden(4, WIDTH)
    cache, statistics = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)

    def body(h: Tensor, cache: Tensor, statistics: Tensor) -> Tensor:
        cache.copy_(h * 2)
        with torch.no_grad():
            statistics.add_(h)
        return model(h) * cache + statistics

    out = run(body, h, cache, statistics)
    assert cache.requires_grad
    assert not statistics.requires_grad
    return seen([out, cache], x, model) | {"statistics": statistics}


def with_nothing_but_a_captured_weight(run: Run) -> Seen:
    weight, h = torch.randn(WIDTH, requires_grad=True), torch.randn(4, WIDTH)
    frozen = layer().requires_grad_(False)
    out = run(lambda h: frozen(h.mul_(weight)), h)
    assert h.requires_grad
    return seen([out, h], weight)


def without_anything_trained(run: Run) -> Seen:
    h, frozen = torch.randn(4, WIDTH), layer().requires_grad_(False)
    out = run(lambda h: frozen(h.add_(1)), h)
    assert not out.requires_grad
    assert not h.requires_grad
    return {"out": out, "h": h}


def integers(run: Run) -> Seen:
    model, (x, h), count = layer(), hidden(4, WIDTH), torch.zeros(2, dtype=torch.int64)
    out = run(lambda h, count: model(h) * (count.add_(1).sum() + 1), h, count)
    return seen(out, x, model) | {"count": count}


def in_a_dict(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    state = {"hidden": h, "scale": 2.0}
    out = run(lambda state: model(state["hidden"].mul_(state["scale"])), state)
    return seen([out, state["hidden"]], x, model)


def twice_backward(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = run(lambda h: model(h.mul_(2)), h).square().sum() + h.sum()
    out.backward(retain_graph=True)
    out.backward()
    return {"x": x.grad} | {name: one.grad for name, one in model.named_parameters()}


def in_a_region_of_a_region(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)

    def outer(h: Tensor) -> Tensor:
        h = h * 2
        out = run(lambda h: model(h.mul_(3)), h)
        return out * h

    return seen(run(outer, h), x, model)


def a_view_of_what_nothing_trains(run: Run) -> Seen:
    """The view and the caller's tensor are one for autograd, whatever the region was given in its place."""
    h, weight = torch.randn(8), torch.randn(4, requires_grad=True)
    run(lambda h: h[2:6], h).mul_(weight)
    return seen(h * 2, weight)


def odd_views_of_what_nothing_trains(run: Run) -> Seen:
    h = torch.randn(3, dtype=torch.complex64)
    conjugated, imaginary, parts = run(lambda h: (h.conj(), h.imag, torch.view_as_real(h)), h)
    parts.mul_(2)
    return {"conjugated": conjugated.resolve_conj(), "imaginary": imaginary, "h": h}


PROGRAMS = [
    a_view_of_what_nothing_trains,
    odd_views_of_what_nothing_trains,
    an_activation,
    an_activation_and_no_result,
    an_activation_that_is_returned,
    an_activation_of_which_a_view_is_returned,
    a_view_that_the_region_wrote_to,
    through_a_view_of_its_own,
    two_views_that_do_not_overlap,
    one_tensor_as_two_arguments,
    a_tensor_that_needed_no_gradient,
    with_nothing_but_a_captured_weight,
    without_anything_trained,
    integers,
    in_a_dict,
    twice_backward,
    in_a_region_of_a_region,
]


@pytest.mark.parametrize("store", ["whole", "host"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equal_to_the_plain_call(program, store):
    config = FullConfig(store=store, keep="all")
    assert wrong(program, lambda *args, **kwargs: reentrant(*args, config=config, **kwargs)) == []


def written_after(run: Run) -> Tensor:
    model, x = layer(), torch.randn(64, WIDTH)  # more than what is copied in any case
    out = run(lambda h: model(h.sin()), x)
    x.fill_(100.0)
    out.sum().backward()
    return model[1].weight.grad


def test_the_caller_may_write_where_a_copy_is_kept():
    config = FullConfig(store="host")
    ours = seeded(written_after, lambda *args: reentrant(*args, config=config))
    assert torch.equal(ours, seeded(written_after, plainly))
    assert "was changed in place after the forward" in error_of(lambda: written_after(reentrant))


LEAF = (
    "{}: the region wrote in place to its input 0 (float32[4]), which lies in a leaf that requires grad\n"
    "    fix: clone the input inside the region before writing to it"
)


@pytest.mark.parametrize("part", [slice(None), slice(1, 5)])
@pytest.mark.parametrize("store", ["whole", "host"])
def test_a_leaf_is_left_as_it_was(store, part):
    """Autograd refuses to write to a leaf; without grad mode it does not."""
    leaf = torch.randn(4 if part == slice(None) else 8, requires_grad=True)
    before = leaf.detach().clone()

    def body(h: Tensor) -> Tensor:
        return h.mul_(2).sum()

    given = leaf if part == slice(None) else leaf[part]
    config = FullConfig(store=store)
    assert error_of(lambda: reentrant(body, given, config=config)) == LEAF.format(body.__qualname__)
    assert torch.equal(leaf, before)
    with pytest.raises(RuntimeError, match="is being used in an in-place operation"):
        body(given)


@pytest.mark.parametrize("store", ["whole", "host"])
def test_arguments_that_share_what_is_written(store):
    """Which of the histories of two arguments changes, no node can tell."""
    x, h = hidden(8)
    before = h.detach().clone()

    def body(one: Tensor, other: Tensor) -> Tensor:
        return one.mul_(2) * other

    message = (
        f"{body.__qualname__}: the region wrote in place to memory that its inputs 0 and 1 share\n"
        "    fix: clone the input inside the region before writing to it"
    )
    config = FullConfig(store=store, keep="all")
    for one, other in ((h[:6], h[2:]), (h, h.view(8))):
        assert error_of(lambda one=one, other=other: reentrant(body, one, other, config=config)) == message
        assert torch.equal(h, before)
    h.sum().backward()
    assert torch.equal(x.grad, torch.full((8,), 1.5))


@pytest.mark.parametrize("view", [torch.conj, torch.view_as_real])
def test_an_odd_view_of_what_was_written(view):
    h = torch.randn(3, dtype=torch.complex64, requires_grad=True) * 1

    def body(h: Tensor) -> Tensor:
        return view(h.mul_(2))

    assert error_of(lambda: reentrant(body, h)) == (
        f"{body.__qualname__}: the region wrote to its input 0 and returned a view of it that is conjugated or of "
        "another dtype\n"
        "    fix: return a clone of it, or pass use_reentrant=False"
    )


class Later(nn.Module):
    """What is in `mode` is not looked at to tell whether two calls are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mode = {"writes": False}

    def forward(self, h: Tensor) -> Tensor:
        return self.linear(h.mul_(2) if self.mode["writes"] else h)


def test_a_write_that_no_earlier_call_has_shown():
    model, (_, h) = Later(), hidden(4, WIDTH)
    for _ in range(2):
        reentrant(model, h)
    model.mode["writes"] = True
    assert error_of(lambda: reentrant(model, h)) == (
        "Later: the region wrote to its input 0 (float32[4, 8]) in place, unseen by the recorder\n"
        "    fix: clone the input inside the region before writing to it"
    )
    found = []
    for run in (reentrant, plainly):  # from now on it is looked
        x = torch.ones(4, WIDTH, requires_grad=True)
        run(model, x * 3).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
