"""Backward of reentrant regions: how often, from where, nested, interrupted, seen by hooks."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
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


def test_two_losses_from_two_results():
    def program(run: Run) -> Seen:
        model, (x, h) = layer(), hidden(4, WIDTH)
        first, second = run(lambda h: (model(h), h.exp()), h)
        first.sum().backward(retain_graph=True)
        second.square().sum().backward()
        return {"x": x.grad} | {name: one.grad for name, one in model.named_parameters()}

    assert wrong(program) == []


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


def test_gradients_of_some_leaves_only():
    model, (x, h) = layer(), hidden(4, WIDTH)
    message = (
        "Sequential: neither torch.autograd.grad nor backward(inputs=...) can go through a reentrant region\n"
        "    fix: call backward() without inputs, or pass use_reentrant=False"
    )
    out = reentrant(model, h).sum()
    assert error_of(lambda: torch.autograd.grad(out, x)) == message
    assert error_of(lambda: torch.autograd.grad(out, [x, *model.parameters()], allow_unused=True)) == message
    assert error_of(lambda: out.backward(inputs=[x])) == message
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(out, list(model.parameters()))  # no way to them leads through the node
    assert x.grad is None
    assert all(parameter.grad is None for parameter in model.parameters())


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


@pytest.mark.parametrize("inner", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("outer", ["reentrant", "non-reentrant"])
def test_a_retained_graph_of_regions_in_regions(outer, inner):
    def program(run: Run) -> Seen:
        inside, around = (MODES[inner], MODES[outer]) if run is reentrant else (run, run)
        first, second, (x, h) = layer(dropout=0.3), layer(dropout=0.3), hidden(4, WIDTH)
        loss = loss_of([around(lambda h: second(inside(first, h)), h)])
        loss.backward(retain_graph=True)
        loss.backward()
        return {"x": x.grad} | {name: one.grad for name, one in [*first.named_parameters(), *second.named_parameters()]}

    assert wrong(program) == []


def test_three_deep():
    def program(run: Run) -> Seen:
        models, (x, h) = [layer(dropout=0.2) for _ in range(4)], hidden(4, WIDTH)

        def level(depth: int, h: Tensor) -> Tensor:
            h = models[depth](h)
            return run(lambda h: level(depth + 1, h), h) if depth < 3 else h

        return seen(level(0, h), x, *models)

    assert wrong(program) == []


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


def test_without_the_check_other_dtypes_pass():
    x, h = hidden(4, WIDTH)
    out = reentrant(Changing(torch.sin, lambda h: h.double().sin()), h, determinism_check="none")
    out.sum().backward()
    assert torch.allclose(x.grad, h.cos() * 1.5)


# Hooks


def test_parameters_are_accumulated_into_once_per_region_and_use():
    shared, alone, calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), []
    for name, linear in (("shared", shared), ("alone", alone)):
        linear.weight.register_hook(lambda grad, name=name: calls.append(f"{name} gradient"))
        linear.weight.register_post_accumulate_grad_hook(lambda weight, name=name: calls.append(f"{name} accumulated"))
    out = reentrant(shared, reentrant(lambda h: alone(shared(h)), torch.randn(2, WIDTH)))
    out.sum().backward()
    assert sorted(calls) == ["alone accumulated", "alone gradient"] + 2 * ["shared accumulated"] + 2 * [
        "shared gradient"
    ]


def test_hooks_on_arguments_and_results_run_once():
    calls = []
    _, h = hidden(4, WIDTH)
    h.register_hook(lambda grad: calls.append("argument"))
    out = reentrant(lambda h: h.sin().exp(), h)
    out.register_hook(lambda grad: calls.append("result"))
    out.sum().backward()
    assert calls == ["result", "argument"]


def test_hooks_that_change_gradients():
    def program(run: Run) -> Seen:
        linear, (x, h) = nn.Linear(WIDTH, WIDTH), hidden(4, WIDTH)
        linear.weight.register_hook(lambda grad: grad * 3)
        h.register_hook(lambda grad: grad.sign())
        out = run(linear, h)
        out.register_hook(lambda grad: grad + 1)
        return seen(out, x, linear)

    assert wrong(program) == []


def test_hooks_around_the_region_are_shown_its_inputs():
    packed, model, (_, h) = [], layer(), hidden(4, WIDTH)
    for _ in range(2):
        packed.clear()
        with saved_tensors_hooks(lambda one: packed.append(one) or one.clone(), lambda one: one):
            out = reentrant(model, h)
        assert [tuple(one.shape) for one in packed] == [(4, WIDTH)]
        out.sum().backward(retain_graph=True)


def test_save_on_cpu_around_the_region():
    def program(run: Run) -> Seen:
        model, (x, h) = layer(dropout=0.2), hidden(4, WIDTH)
        with save_on_cpu():
            out = run(model, h)
        return seen(out, x, model)

    assert wrong(program) == []


def test_two_threads_go_through_one_retained_graph():
    x = torch.randn(64, 64, requires_grad=True)
    weight = torch.randn(64, 64)
    loss = reentrant(lambda h: F.dropout(h @ weight, 0.5).tanh(), x).sum()
    loss.backward(retain_graph=True)
    once, x.grad = x.grad, None
    threads = [threading.Thread(target=loss.backward, kwargs={"retain_graph": True}) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(x.grad, once * 4)


# What earlier calls have shown


def test_what_the_other_mode_has_shown_does_not_count():
    """RReLU fills its noise after autograd has saved it: the other mode, which stops early, has to know of that."""

    def program(run: Run) -> Seen:
        x, h = hidden(4, WIDTH)
        return seen(run(noisy, h), x)

    def noisy(h: Tensor) -> Tensor:
        return F.rrelu(h.sin(), training=True)

    assert wrong(program) == []
    assert wrong(program, non_reentrant) == []
    assert wrong(program) == []


def test_kernels_that_only_run_without_grad_mode():
    """In eval mode attention is one fused op without grad mode, so what follows it has other arguments."""
    attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=torch.float64).eval()

    def program(run: Run) -> Seen:
        x, h = hidden(2, 6, WIDTH)

        def body(h: Tensor) -> Tensor:
            weights, chosen = attention(h, h, h, need_weights=False)[0].topk(2)
            return weights * chosen

        out = run(body, h)
        out.sum().backward()
        return {"x": x.grad}

    assert wrong(program, exact=False) == []
