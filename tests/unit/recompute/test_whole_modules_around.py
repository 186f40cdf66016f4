"""Modules saved as a whole among all else: backward as often as one likes, hooks, modes, threads, copies, errors."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import sac
from sac.outer_hooks import active_hooks
from tests.support.blocks import FunctionBlock, Stack, llama_stack, policy, save, selective, square, with_dropout
from tests.support.training import assert_same, assert_same_training, built, train
from tests.support.whole_module_blocks import EVERY, Apply, Output, stack_of, whole

VALUES = {
    "modules alone": selective(policy(whole("{self_attn,mlp}"))),
    "modules and ops": selective(policy(whole("mlp"), save("attention"), save("matmul", module="self_attn.*"))),
    "alternate": selective(policy(whole("{self_attn.*_proj,mlp}", "alternate"))),
}
ON_EACH_VALUE = pytest.mark.parametrize("name", VALUES)
ALONE = selective(policy(whole(EVERY)))


def dropped() -> Stack:
    return with_dropout(llama_stack(), attention=0.2)


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
