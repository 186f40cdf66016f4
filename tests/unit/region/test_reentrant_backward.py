"""Backward of reentrant regions: how often, from where, nested, interrupted, seen by hooks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

from sac.engine.reentrant import _OTHER_MODE
from sac.full import FullConfig
from tests.support.cases import WIDTH, Run, Seen, hidden, layer, loss_of, seen
from tests.support.reentrant import (
    error_of,
    non_reentrant,
    reentrant,
    seeded,
    torch_non_reentrant,
    torch_reentrant,
    wrong,
)
from tests.support.runs import Noted

STORES = ("whole", "host", "contiguous")


def storing(store: str) -> FullConfig:
    return FullConfig(store=store, num_checkpoints=4 if store == "contiguous" else None)


# How often


@pytest.mark.parametrize("store", STORES)
def test_a_retained_graph_is_run_as_often_as_asked(store):
    def program(run: Run) -> Seen:
        model, (x, h) = layer(dropout=0.3), hidden(4, WIDTH)
        loss = loss_of([run(model, h)])
        for _ in range(3):
            loss.backward(retain_graph=True)
        loss.backward()
        return {"x": x.grad} | {name: one.grad for name, one in model.named_parameters()}

    config = storing(store)
    assert wrong(program, lambda *args: reentrant(*args, config=config)) == []


@pytest.mark.parametrize("store", STORES)
def test_a_second_backward_after_one_that_retained_nothing(store):
    model, (_, h) = layer(), hidden(4, WIDTH)
    out = reentrant(model, h, config=storing(store)).sum()
    out.backward()
    before = [parameter.grad.clone() for parameter in model.parameters()]
    assert error_of(out.backward) == (
        "Sequential: backward came here again after this region's memory had been freed\n"
        "    fix: pass retain_graph=True to the backward call before this one"
    )
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(before, model.parameters(), strict=True))


# What the mode does not allow


def test_double_backward():
    model, (x, h) = layer(), hidden(4, WIDTH)
    out = reentrant(model, h).sum()
    assert error_of(lambda: out.backward(create_graph=True)) == (
        "Sequential: a reentrant region has no double backward (this one was called with create_graph=True)\n"
        "    fix: pass use_reentrant=False"
    )
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


# Nested

MODES = {
    "reentrant": reentrant,
    "non-reentrant": non_reentrant,
    "torch's reentrant": torch_reentrant,
    "torch's non-reentrant": torch_non_reentrant,
}


def pair(outer: Run, inner: Run) -> Seen:
    """No tensor has more than two uses, so that there is but one order to add its gradients up in."""
    first, second, third, (x, h) = layer(dropout=0.3), layer(dropout=0.3), layer(dropout=0.3), hidden(4, WIDTH)
    return seen(outer(lambda h: third(inner(second, first(h)).relu()), h), x, first, second, third)


@pytest.mark.parametrize(
    ("outer", "inner"), [pair for pair in itertools.product(MODES, repeat=2) if "reentrant" in pair]
)
def test_regions_in_regions(outer, inner):
    plain = seeded(lambda run: pair(run, run), lambda function, *args: function(*args))
    for _ in range(3):
        ours = seeded(lambda _: pair(MODES[outer], MODES[inner]), reentrant)
        assert all(torch.equal(plain[name], ours[name]) for name in plain)


# Interrupted


class Interruption(Exception):
    pass


@pytest.mark.parametrize("store", STORES)
def test_backward_can_be_tried_again_after_an_exception_in_the_inner_backward(store):
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.clone()

        @staticmethod
        def backward(ctx, grad):
            if fails:
                fails.clear()
                raise Interruption
            return grad

    fails = Noted()

    def program(run: Run) -> Seen:
        model, (x, h) = layer(), hidden(4, WIDTH)
        out = run(lambda h: model(F.dropout(Failing.apply(h), 0.4)), h)
        before = torch.get_rng_state()
        if run is not plain:
            with pytest.raises(Interruption):
                out.sum().backward(retain_graph=True)
            assert torch.equal(before, torch.get_rng_state())
            assert not torch.is_autocast_enabled("cpu")
            model.zero_grad()  # an inner backward that fails has been through a part of the region
        out.sum().backward()
        return {"x": x.grad} | {name: one.grad for name, one in model.named_parameters()}

    def plain(function, *args):
        return function(*args)

    config = storing(store)
    right = seeded(program, plain)
    fails.append(True)
    ours = seeded(program, lambda *args: reentrant(*args, config=config))
    assert all(torch.equal(right[name], ours[name]) for name in right)


# Functions that do not repeat themselves


class Changing:
    """Runs the bodies one after the other, and the last one from then on."""

    def __init__(self, *bodies):
        self.bodies = Noted(*bodies)

    def __call__(self, h):
        return self.bodies.pop(0)(h) if len(self.bodies) > 1 else self.bodies[0](h)


REPEAT = f"    fix: {_OTHER_MODE}"


@pytest.mark.parametrize(
    ("first", "then", "found"),
    [
        (torch.sin, lambda h: h.sin()[:2], "result 0 was float32[4, 8] on cpu in forward and is float32[2, 8] on cpu"),
        (torch.sin, torch.Tensor.double, "result 0 was float32[4, 8] on cpu in forward and is float64[4, 8] on cpu"),
        (lambda h: (h.sin(), h.cos()), torch.sin, "result 1 was float32[4, 8] on cpu in forward and is not a tensor"),
    ],
)
def test_another_result_in_recomputation(first, then, found):
    x, h = hidden(4, WIDTH)
    *_, out = torch.utils._pytree.tree_leaves(reentrant(Changing(first, then), h))
    assert error_of(out.sum().backward) == f"Changing: {found} in recomputation\n{REPEAT}"
    assert x.grad is None
