"""Modules saved as a whole among all else: backward as often as one likes, hooks, modes, threads, copies, errors."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import sac
from sac.outer_hooks import active_hooks
from tests.promises.test_05_backward_often import (
    gradient_penalty,
    inputs_then_weights,
    second_derivative_only,
    three_times_by_grad,
    twice,
)
from tests.support.blocks import FunctionBlock, Stack, llama_stack, policy, save, selective, square, with_dropout
from tests.support.recording import Recorder
from tests.support.training import assert_same, assert_same_training, built, plain_backward, train
from tests.support.whole_module_blocks import EVERY, Apply, Output, stack_of, whole

VALUES = {
    "modules alone": selective(policy(whole("{self_attn,mlp}"))),
    "modules and ops": selective(policy(whole("mlp"), save("attention"), save("matmul", module="self_attn.*"))),
    "alternate": selective(policy(whole("{self_attn.*_proj,mlp}", "alternate"))),
}
ON_EACH_VALUE = pytest.mark.parametrize("name", VALUES)
WAYS = pytest.mark.parametrize("entry", ["apply", "context_fn with module"])
ALONE = selective(policy(whole(EVERY)))


def backward_elsewhere(*given: Any) -> Any:
    """Backward in another thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(plain_backward, *given).result()


def dropped() -> Stack:
    return with_dropout(llama_stack(), attention=0.2)


def with_slopes(in_steps: set[int], part: Callable[[], nn.Module]) -> Callable[[], Stack]:
    """A region that in some steps takes a gradient through a saved module."""

    def function(block: FunctionBlock, x: Tensor) -> Tensor:
        if block.calls in in_steps:
            z = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(block.part(z).sin().sum(), z, create_graph=True)
            x = x + slope
        return (x @ block.a).sin()

    return lambda: Stack(FunctionBlock(function, part=part()))


@pytest.mark.parametrize("in_steps", [{3}, {1, 2}, {1, 2, 3, 4}], ids=str)
@pytest.mark.parametrize(
    "part",
    [lambda: nn.Linear(8, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))],
    ids=["linear", "buffers and dropout"],
)
def test_gradients_taken_inside_in_some_steps_only(part: Callable[[], nn.Module], in_steps: set[int]) -> None:
    """The recomputation runs the modules that they pass through, in whichever call that is."""
    value = selective(policy(whole("part", optional=True)))
    assert_same_training(with_slopes(in_steps, part), value, steps=4, make_input=square)


@WAYS
@ON_EACH_VALUE
@pytest.mark.parametrize(
    "backward",
    [twice, three_times_by_grad, inputs_then_weights, gradient_penalty, second_derivative_only, backward_elsewhere],
    ids=lambda one: one.__name__,
)
def test_backward_as_often_as_one_likes(backward: Callable[..., Any], name: str, entry: str) -> None:
    build = llama_stack if backward in (gradient_penalty, second_derivative_only) else dropped
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert_same_training(build, VALUES[name], entry=entry, steps=2, backward=backward)


@WAYS
@ON_EACH_VALUE
@pytest.mark.parametrize("around", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t)])
def test_hooks_around_the_region_are_shown_what_is_kept(around: Any, name: str, entry: str) -> None:
    assert_same_training(dropped, VALUES[name], entry=entry, steps=3, around_forward=around)


def test_hooks_inside_the_region_are_shown_what_a_module_saves() -> None:
    shown: list[Tensor] = []

    def body(block: Any, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: (shown.append(t), t)[1], lambda t: t):
            y = block.part(x.exp())
        return y.cos()

    assert_same_training(lambda: stack_of(body), ALONE, steps=3, make_input=square)
    assert shown


def test_modes_that_are_not_ours_see_what_a_module_runs() -> None:
    value = selective(policy(whole("part"), save("matmul", optional=True)))
    model = sac.apply(built(lambda: stack_of(lambda block, x: block.part(x.exp()).cos(), 1)), value)
    for _ in range(3):
        with Recorder() as recorder:
            model(square()[0].requires_grad_())
        assert recorder.count("aten.mm") == 1

    def with_mode_inside(block: Any, x: Tensor) -> Tensor:
        with Recorder() as recorder:
            y = block.part(x.exp()).cos()
        seen.append(recorder.count("aten.mm"))
        return y

    seen: list[int] = []
    assert_same_training(lambda: stack_of(with_mode_inside, 1), value, steps=3, make_input=square)
    assert seen == 6 * [1], "three steps without us, and three with us"


@pytest.mark.parametrize("outer", [checkpoint, sac.checkpoint], ids=["of torch", "ours"])
@ON_EACH_VALUE
def test_inside_another_region(outer: Any, name: str) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = dropped()

        def forward(self, x: Tensor) -> Any:
            options = {"use_reentrant": False} if outer is checkpoint else {}
            return outer(self.stack, x.sin(), **options)

    plain, ours = built(Outer), built(Outer)
    sac.apply(ours, {**VALUES[name], "blocks": ["stack.blocks.*"]})
    assert_same(train(plain, steps=3), train(ours, steps=3))


@ON_EACH_VALUE
def test_regions_inside_a_saved_module(name: str) -> None:
    def body(block: Any, x: Tensor) -> Tensor:
        return block.part(x).cos()

    def checkpointed(part: Apply, x: Tensor) -> Tensor:
        inner = lambda x: (x @ part.weight).sin().cos()  # noqa: E731
        return checkpoint(inner, x, use_reentrant=False) + sac.checkpoint(inner, x)

    def build() -> Stack:
        stack = stack_of(body)
        for block in stack.blocks:
            block.part.body = checkpointed
        return stack

    assert_same_training(build, ALONE, steps=3, make_input=square)


def test_an_error_in_a_saved_module_leaves_hooks_and_modes_as_they_were() -> None:
    def fails(part: Apply, x: Tensor) -> Tensor:
        raise ArithmeticError

    for value in (ALONE, selective(policy(whole("part"), save("matmul", optional=True)))):
        model = built(lambda: stack_of(lambda block, x: block.part(x.exp()).cos(), 1))
        plain = copy.deepcopy(model)
        sac.apply(model, value)
        for _ in range(3):
            sound = model.blocks[0].part.body
            model.blocks[0].part.body = fails
            with saved_tensors_hooks(lambda t: t, lambda t: t):
                hooks = active_hooks()
                with pytest.raises(ArithmeticError):
                    model(square()[0].requires_grad_())
                assert active_hooks() == hooks
            assert active_hooks() is None
            assert _get_current_dispatch_mode_stack() == []
            model.blocks[0].part.body = sound
            assert_same(train(plain, make_input=square), train(model, make_input=square))


@ON_EACH_VALUE
def test_copies_and_pickles_learn_anew(name: str) -> None:
    reference = built(dropped)
    model = sac.apply(built(dropped), VALUES[name])
    train(model, steps=2)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    reference.load_state_dict(state)
    expected = train(reference, steps=2)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert_same(expected, train(twin, steps=2))
    assert list(model.state_dict()) == list(reference.state_dict())


def test_two_threads_at_once() -> None:
    def trained(model: nn.Module) -> list[Tensor]:
        for _ in range(4):
            model(torch.ones(1, 4, 32, requires_grad=True)).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = trained(built(llama_stack))
    models = [sac.apply(built(llama_stack), VALUES[name]) for name in ("modules alone", "modules and ops")]
    found: dict[int, list[Tensor]] = {}
    threads = [
        threading.Thread(target=lambda place, model: found.update({place: trained(model)}), args=pair)
        for pair in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place in range(2):
        assert all(torch.equal(one, other) for one, other in zip(found[place], expected, strict=True))


def written_sometimes(block: Any, x: Tensor) -> Tensor:
    y = block.plain(x.exp())
    z = y + 1
    if x.detach().flatten().tolist()[0] > 0:  # which no op shows
        y.mul_(2)
    return (z.sin() @ block.a) * y.cos()


def inputs_of_both_signs(device: str) -> tuple[Tensor, ...]:
    SIGNS.append(1)
    return (square(device)[0].abs() * (1 if len(SIGNS) % 3 == 0 else -1),)


SIGNS: list[int] = []


def test_what_the_caller_writes_to_after_the_region() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = stack_of(lambda block, x: (y := block.plain(x.exp()), (y + 1).sin()), 1)

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.stack(x)
            y.mul_(2)
            return y.sin() * z

    plain, ours = built(Caller), built(Caller)
    sac.apply(ours, {**ALONE, "blocks": ["stack.blocks.*"]})
    assert_same(train(plain, steps=3, make_input=square), train(ours, steps=3, make_input=square))


def test_a_region_input_that_a_saved_module_writes_to() -> None:
    def body(block: Any, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        before = (h + 1).sin() @ block.a
        y = block.in_place(h)
        return block.part(y).sin() * before.cos(), x * 1.0

    def two(device: str) -> tuple[Tensor, ...]:
        return square(device)[0], square(device)[0]

    class First(nn.Module):
        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            return x * 1, h * 2

    for value in (ALONE, selective(policy(whole(EVERY), save("matmul")))):
        value = {**value, "blocks": ["blocks.1", "blocks.2"]}
        build = lambda: Stack(First(), *stack_of(body).blocks)  # noqa: E731
        assert_same_training(build, value, steps=3, make_input=two)


def test_a_module_that_writes_to_its_buffer_runs_again() -> None:
    def advances(part: Apply, x: Tensor) -> Tensor:
        part.large += 1
        return x @ part.weight * part.large.mean()

    def build() -> Stack:
        stack = stack_of(written_sometimes, 1)
        stack.blocks[0].plain.register_buffer("large", torch.zeros(200))
        stack.blocks[0].plain.body = advances
        return stack

    SIGNS.clear()
    assert_same_training(build, ALONE, steps=6, make_input=inputs_of_both_signs)


def test_a_large_buffer_of_a_saved_module_advances_once_and_needs_no_mode() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(300)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.exp()).sin()

    def wide(device: str) -> tuple[Tensor, ...]:
        return (torch.randn(4, 300, device=device),)

    value = selective(policy(whole("norm")))
    assert_same_training(lambda: Stack(Wide(), Wide()), value, steps=4, make_input=wide)


@pytest.mark.parametrize("config", [{"store": "host"}, {"preserve_rng_state": True}], ids=str)
@ON_EACH_VALUE
def test_settings_of_the_full_path(config: dict[str, Any], name: str) -> None:
    assert_same_training(dropped, {**VALUES[name], **config}, steps=3)


def test_state_of_the_users_own_stands_where_a_saved_module_left_it() -> None:
    class Counter:
        count = 0.0

        def snapshot(self) -> float:
            return self.count

        def restore(self, state: float) -> None:
            self.count = state

    counter = Counter()

    def counting(part: Apply, x: Tensor) -> Tensor:
        counter.count += 1
        return x @ part.weight

    def body(block: Any, x: Tensor) -> Tensor:
        y = block.part(x.exp())
        return (y * counter.count).sin()

    def build() -> Stack:
        counter.count = 0.0
        stack = stack_of(body)
        for block in stack.blocks:
            block.part.body = counting
        return stack

    value = {**ALONE, "state": (counter,)}
    assert_same_training(build, value, steps=3, make_input=square)


@pytest.mark.parametrize("rules", [[], [save("matmul")]], ids=["modules alone", "modules and ops"])
def test_a_tensor_that_the_module_returned_twice_is_one_tensor_again(rules: list[Any]) -> None:
    def part(part: Any, x: Tensor) -> Any:
        h = (x @ part.weight).sin()
        return h, Output(h, x)

    def body(block: Any, x: Tensor) -> Tensor:
        a = x.exp()
        h, output = block.part(a)
        return h.cos() * x if h is output.hidden and output.extra is a else h.cos()

    def build() -> Stack:
        return Stack(FunctionBlock(body, part=Apply(part)))

    assert_same_training(build, selective(policy(whole("part"), *rules), engine="rerun"), steps=3, make_input=square)
