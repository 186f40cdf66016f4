"""Calls of `full` without a recorder hold what ops choose: with the library they are what a recorder makes of them."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import sac
from sac.errors import RegionError, SacWarning
from sac.recompute import regions
from sac.recompute.native_watch import NativeWatch
from tests.promises.test_exact_when_programs_change import assert_same, usual
from tests.support.native_engine import needs_library, with_library

pytestmark = needs_library
FULL = {"mode": "full", "blocks": ["*"]}

# These are functions because sac knows of some ops by their names in the code of a region's classes.


def by_topk(h: Tensor) -> Tensor:
    values, indices = h.topk(4, dim=1)
    return h.gather(1, indices) * values


def by_topk_in_place(h: Tensor) -> Tensor:
    """Normalise the weights of experts in place, as Mixtral does."""
    weights, chosen = h.softmax(1).topk(4, dim=1)
    weights /= weights.sum(1, keepdim=True)
    return h.gather(1, chosen) * weights


def by_sort(h: Tensor) -> Tensor:
    values, order = h.sort(dim=1, stable=True, descending=True)
    return (values * h.gather(1, order))[:, :4]


def by_nonzero(h: Tensor) -> Tensor:
    row, column = (h > 0).nonzero(as_tuple=True)
    return torch.zeros_like(h).index_put((row, column), h[row, column])[:, :4]


def by_argmax(h: Tensor) -> Tensor:
    return h.gather(1, h.argmax(1, keepdim=True)).expand(-1, 4) * h[:, :4]


def by_median(h: Tensor) -> Tensor:
    return h[:, :4] - h.median(1, keepdim=True).values * h.kthvalue(2, 1, keepdim=True)[0] * h.mode(1, keepdim=True)[0]


def by_unique(h: Tensor) -> Tensor:
    found, where = (h.detach() * 2).round().unique(return_inverse=True)
    return h[:, :4] * found[where][:, :4] * torch.bincount(where.flatten()).sum()


def by_experts(h: Tensor) -> Tensor:
    """Loop over the experts that were chosen, which reads values."""
    weights, chosen = h.softmax(1).topk(2, dim=1)
    out = torch.zeros(3, 4)
    for expert in chosen.unique().tolist():
        row, slot = (chosen == expert).nonzero(as_tuple=True)
        out.index_add_(0, row, h[row, :4] * weights[row, slot, None] * (expert + 1))
    return out


def by_several(h: Tensor) -> Tensor:
    h = by_topk(h) + by_topk_in_place(h)
    return by_topk(h) + by_argmax(h) + by_topk(-h)


WAYS = [by_topk, by_topk_in_place, by_sort, by_nonzero, by_argmax, by_median, by_unique, by_experts, by_several]
each = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


class Choosing(nn.Module):
    def __init__(self, way: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(4, 6), nn.Linear(4, 4), way

    def forward(self, x: Tensor) -> Tensor:
        self.look(x)
        return x + self.down(self.way(torch.tanh(self.up(x))).sin())

    def look(self, x: Tensor) -> None:
        """Do something first, in the classes of some tests."""


def chain(*ways: Callable[[Tensor], Tensor], value: Any = FULL) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*map(Choosing, ways))
    return sac.apply(model, value) if value else model


def warm(model: nn.Module, steps: int = 2) -> None:
    for _ in range(steps):
        model(torch.randn(3, 4, requires_grad=True)).sum().backward()
        model.zero_grad()


class Watches:
    """The watches of the calls of regions, and those of calls that had a recorder: None."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def __enter__(self) -> Watches:
        frame = regions.Region._frame

        def noting(region: Any, call: Any) -> Any:
            made = frame(region, call)
            if region.path != "Choosing":  # inside of another one
                self.found.append(made[1] if isinstance(made[1], NativeWatch) and made[1]._holds else None)
            return made

        self._patch = mock.patch.object(regions.Region, "_frame", noting)
        self._patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.stop()

    @property
    def are_held(self) -> list[bool]:
        return [one is not None for one in self.found]


@each
def test_training_is_what_it_is_without_us(way: Any) -> None:
    with with_library():
        assert_same(lambda: Choosing(way), "full")


@each
def test_only_the_first_call_has_a_recorder(way: Any) -> None:
    with with_library(), Watches() as watches:
        warm(chain(way), 3)
    assert watches.are_held == [False, True, True]


@each
def test_a_call_keeps_and_reports_what_a_recorder_keeps(way: Any) -> None:
    def reported(used: bool) -> Any:
        with with_library(used):
            model = chain(way, way)
            warm(model)
            x = torch.randn(3, 4, requires_grad=True)
            torch.manual_seed(1)
            out = model(x)
            found = sac.report(model).to_dict()
            out.sum().backward()
        return {key: value for key, value in found.items() if "native" not in key}, x.grad

    (ours, gradient), (python, expected) = reported(True), reported(False)
    assert ours == python
    assert torch.equal(gradient, expected)


# -- What ops choose in recomputation

TURN = [1.0]


@torch.library.custom_op("sac_tests::turned", mutates_args=())
def turned(x: Tensor) -> Tensor:
    """Return something else in each call, as a kernel does that adds in any order."""
    TURN[0] = -TURN[0]
    return x * TURN[0]


def unsteady(choose: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def way(h: Tensor) -> Tensor:
        found = choose(turned(h.detach()))
        index = found if isinstance(found, Tensor) else found[1]
        return h.gather(1, index.expand(3, index.shape[1]).reshape(3, -1)[:, :4] % 6).expand(3, 4)

    return way


CHOICES = {
    "topk": lambda keys: keys.topk(4, dim=1),
    "sort": lambda keys: keys.sort(dim=1),
    "argmax": lambda keys: keys.argmax(1, keepdim=True),
    "argmin": lambda keys: keys.argmin(1, keepdim=True),
    "kthvalue": lambda keys: keys.kthvalue(2, 1, keepdim=True),
    "median": lambda keys: keys.median(1, keepdim=True),
    "written": lambda keys: keys.topk(4, dim=1)[1].add_(1),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_backward_takes_what_the_forward_has_chosen(choose: Any) -> None:
    def gradients(value: Any) -> list[Tensor]:
        model = chain(unsteady(choose), unsteady(choose), value=value)
        warm(model)
        TURN[0] = 1.0
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        model(x).square().sum().backward()
        return [x.grad, *(one.grad for one in model.parameters())]  # type: ignore[list-item]

    with with_library():
        with Watches() as watches:
            found = gradients(FULL)
        assert watches.are_held == [False, False, True, True, True, True]
        assert all(map(torch.equal, gradients(None), found))


@pytest.mark.parametrize("count", [1, -1])
def test_a_choice_of_another_length_is_replaced_too(count: int) -> None:
    def way(h: Tensor) -> Tensor:
        row, column = (turned(h.detach() + 0.05) > 0).nonzero(as_tuple=True)
        return torch.zeros_like(h).index_put((row, column), h[row, column] * count)[:, :4]

    def gradient(value: Any) -> Tensor:
        model = chain(way, value=value)
        warm(model)
        TURN[0] = 1.0
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        return x.grad

    with with_library():
        assert torch.equal(gradient(None), gradient(FULL))


def test_an_op_inside_of_another_ones_kernel_is_chosen_anew() -> None:
    def way(h: Tensor) -> Tensor:
        return by_topk(h) + torch.cat([h[h > 0], h[h <= 0]]).view(3, 6)[:, :4]

    def kept(way: Any) -> int:
        model = chain(way)
        warm(model)
        model(torch.randn(3, 4, requires_grad=True))
        return sum(one["saved_bytes"] for one in sac.report(model).to_dict()["kinds"])

    with with_library():
        assert_same(lambda: Choosing(way), "full")
        assert kept(way) == kept(by_topk) > 0


@pytest.mark.parametrize(
    "more", [{"store": "host"}, {"early_stop": False}, {"verify": "never"}, {"freeze_buffers": False}]
)
def test_options(more: dict[str, Any]) -> None:
    with with_library(), Watches() as watches:
        models = [chain(by_several, by_experts, value=value) for value in (None, {**FULL, **more})]
        expected, found = (_trained(model, 1) for model in models)
    assert all(map(torch.equal, expected, found))
    assert watches.are_held[2:] == [True] * 10


@pytest.mark.parametrize(
    "write",
    [
        lambda one: one.mul_(0),
        lambda one: one.data.zero_(),
        lambda one: one.view(-1)[:3].fill_(0),
        lambda one: torch.mul(one, 0, out=one),
        lambda one: torch._foreach_zero_([one]),
        lambda one: one.resize_(2, 2).zero_(),
        lambda one: one.set_(torch.zeros_like(one)),
    ],
)
@pytest.mark.parametrize("is_inside", [True, False])
def test_writes_to_what_was_chosen(write: Any, is_inside: bool) -> None:
    given: list[Tensor] = []

    def way(h: Tensor) -> Tensor:
        values, indices = turned(h.detach()).topk(4, dim=1) if is_inside else h.detach().topk(4, dim=1)
        out = h.gather(1, indices.clone()) * values.clone()
        given[:] = values, indices
        if is_inside:
            write(values), write(indices)
        return out

    def gradient(value: Any) -> Tensor:
        model = chain(way, value=value)
        warm(model)
        TURN[0] = 1.0
        x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()
        out = model(x)
        if not is_inside:
            write(given[0]), write(given[1])
        out.sum().backward()
        assert x.grad is not None
        return x.grad

    with with_library():
        assert torch.equal(gradient(None), gradient(FULL))


def test_two_backwards_and_a_gradient_inside() -> None:
    class Inside(Choosing):
        def look(self, x: Tensor) -> None:
            with torch.enable_grad():
                inner = x.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(by_topk(torch.tanh(self.up(inner))).sum(), inner)
            self.seen = gradient

    def twice(model: Any, x: Tensor, step: int) -> Tensor:
        loss = model(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss

    with with_library():
        for make in (lambda: Choosing(by_several), lambda: Inside(by_topk)):
            assert_same(make, "full", twice)


class GradientOfItself(Choosing):
    """Takes a gradient of what it has computed so far: the region runs again before its forward is over."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.way(torch.tanh(self.up(x)))
        if x.requires_grad and torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(h.square().sum(), x, retain_graph=True)
            h = h + by_topk(torch.cat([gradient, gradient], 1).detach().tanh())
        return x + self.down(self.way(torch.cat([h, h[:, :2]], 1).tanh()).tanh())


def test_a_gradient_before_the_forward_is_over() -> None:
    with with_library():
        assert_same(lambda: GradientOfItself(by_several), "full")


def test_modes_of_others_see_the_ops() -> None:
    def flops(value: Any) -> list[int]:
        model = chain(by_several, by_topk_in_place, value=value)
        warm(model)
        found = []
        for _ in range(2):
            with FlopCounterMode(display=False) as counter:
                model(torch.randn(3, 4, requires_grad=True)).sum().backward()
            found.append(counter.get_total_flops())
        return found

    with with_library(), Watches() as watches:
        ours = flops(FULL)
    assert watches.are_held[4:] == [True] * 4
    with with_library(False):
        assert ours == flops(FULL)


def test_it_is_held_by_a_recorder_where_the_watch_cannot() -> None:
    class Nested(Choosing):
        def __init__(self) -> None:
            super().__init__(by_topk)
            self.inner = Choosing(by_topk)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(sac.checkpoint(self.inner, x))

    def drawing(h: Tensor) -> Tensor:
        return by_topk(h) + torch.multinomial(h.softmax(1), 4)

    def outside(model: Any, x: Tensor, step: int) -> Tensor:
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        loss = out.square().sum()
        loss.backward()
        return loss  # type: ignore[no-any-return]

    with with_library(), warnings.catch_warnings():
        warnings.simplefilter("error", SacWarning)
        for make, loop in ((Nested, usual), (lambda: Choosing(drawing), usual), (lambda: Choosing(by_topk), outside)):
            with Watches() as watches:
                assert_same(make, "full", loop)
            assert not any(watches.are_held), (make, watches.are_held)


def test_another_thing_that_needs_a_recorder() -> None:
    """The watch goes on looking for it: the activations of the first such call are kept, with a warning."""
    count = [0]

    def way(h: Tensor) -> Tensor:
        count[0] += 1
        return by_topk(h) + torch.nn.functional.rrelu(h, training=True)[:, :4] if count[0] > 4 else by_topk(h)

    model = chain(by_topk)
    model[0].way = way
    with with_library(), Watches() as watches, mock.patch.object(regions, "writes_unseen", return_value=False):
        warm(model, 2)
        with pytest.warns(SacWarning, match="rrelu_with_noise, which fills a tensor") as caught:
            warm(model, 4)
    assert len(caught) == 1
    assert watches.are_held[:3] == [False, True, True]
    assert watches.are_held[-1] is False


def test_a_program_that_branches() -> None:
    """A call that reads values is no evidence for others, so all of them are watched."""
    others = [by_argmax, by_topk, by_nonzero, by_experts, by_sort]

    def way(h: Tensor) -> Tensor:
        return others[int(h.detach().sum().item() * 1e4) % 5](h)

    with with_library(), Watches() as watches:
        assert_same(lambda: Choosing(way), "full")
    assert sum(watches.are_held) > len(watches.are_held) // 2


# -- Changes to what is held


@pytest.mark.parametrize("verify", ["first", "always"])
def test_an_unseen_write_to_a_choice_is_found(verify: str) -> None:
    def way(h: Tensor) -> Tensor:
        values, indices = h.topk(4, dim=1)
        out = h.gather(1, indices)
        indices.numpy()[:] = 0
        return out * h.gather(1, indices) * values

    with with_library():
        assert_same(lambda: Choosing(way), "full")


def test_a_choice_that_is_not_repeated_after_an_unseen_write() -> None:
    def way(h: Tensor) -> Tensor:
        indices = turned(h.detach()).topk(4, dim=1)[1]
        out = h.gather(1, indices)
        indices.numpy()[:] = 0
        return out

    model = chain(way)
    with with_library():
        error = _error(lambda: warm(model, 3))
    assert error == (
        "0: the result of aten.topk.default in forward was overwritten, not by an op but by NumPy or a kernel on raw "
        "pointers, and recomputation returns another result\n    fix: write to a copy of it"
    )


def _error(function: Callable[[], object]) -> str:
    with pytest.raises(RegionError) as caught:
        function()
    return str(caught.value)


# -- Recomputations that differ


def test_messages_of_choices_that_are_left_over() -> None:
    def differs() -> bool:
        return threading.current_thread() is not threading.main_thread()

    def other_k(h: Tensor) -> Tensor:
        chosen = h.gather(1, h.topk(3 if differs() else 4, dim=1)[1])
        return chosen[:, :3].sum(1, keepdim=True).sin().expand(3, 4)

    def none(h: Tensor) -> Tensor:
        return h.gather(1, torch.zeros(3, 4, dtype=torch.int64) if differs() else h.detach().topk(4, dim=1)[1])

    cases = {
        other_k: "in recomputation with (float32[3, 6], 3, 1, True, True)\n    fix: the region computed with other",
        none: "not at all in recomputation\n    fix: recomputation took another path",
    }
    with with_library():
        for way, seen in cases.items():
            model = chain(way)
            warm(model)
            loss = model(torch.randn(3, 4, requires_grad=True)).sum()
            with ThreadPoolExecutor(1) as pool:
                error = _error(pool.submit(loss.backward).result)
            assert error.startswith(
                f"0: call 0 of aten.topk in 0 ran in forward with (float32[3, 6], 4, 1, True, True) and {seen}"
            )


# -- Memory, threads


def test_nothing_is_held_after_backward_nor_without_it() -> None:
    held: list[Any] = []

    def way(h: Tensor) -> Tensor:
        values, indices = h.topk(4, dim=1)
        held.append(weakref.ref(indices.untyped_storage()))
        return h.gather(1, indices) * values

    with with_library():
        model = chain(way)
        warm(model)
        held.clear()
        gc.disable()
        try:
            out = model(torch.randn(3, 4, requires_grad=True))
            kept = [one() for one in held]
            assert all(one is not None for one in kept)
            del kept
            out.sum().backward()
            del out
            model(torch.randn(3, 4, requires_grad=True))
            with torch.no_grad():
                model(torch.randn(3, 4))
            assert [one() for one in held] == [None] * len(held)
        finally:
            gc.enable()


def test_threads_hold_their_own() -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            expected, found = (_trained(model, seed) for model in models[seed])
            assert all(map(torch.equal, expected, found))
        except BaseException as error:
            errors.append(error)

    models = [[chain(by_several, by_several, value=value) for value in (None, FULL)] for _ in range(4)]
    with with_library():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert errors == []


def _trained(model: nn.Module, seed: int) -> list[Tensor]:
    found = []
    source = torch.Generator().manual_seed(seed)
    for _ in range(6):
        x = torch.randn(3, 4, generator=source).requires_grad_()
        model(x).square().sum().backward()
        found += [x.grad, *(one.grad.clone() for one in model.parameters())]  # type: ignore[union-attr]
    return found  # type: ignore[return-value]
