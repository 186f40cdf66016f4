"""A model's own checkpointing that is turned on after `sac.apply`: one clear error, and never two recomputations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sac
from sac.errors import ModelError
from tests.support.model_zoo import tiny
from tests.support.plain_zoo import plain

pytest.importorskip("transformers", reason="tests/stacks needs transformers")

ENABLING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
CALLED = r"{0}: {1} was called, and sac\.apply has been called on this model before"
FOUND = "the model's own checkpointing is on: "


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Timm(nn.Sequential):
    """A stack with a switch as timm's."""

    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


@pytest.mark.parametrize("name", ENABLING)
def test_a_method_that_turns_it_on(name: str) -> None:
    model, batch = tiny("llama")
    sac.apply(model, "full")
    for part in (model, model.model):
        with pytest.raises(ModelError, match=CALLED.format(type(part).__name__, name)):
            getattr(part, name)({"use_reentrant": False})
    assert not model.is_activation_checkpointing
    model(**batch).loss.backward()


def test_a_method_that_turns_it_on_or_off() -> None:
    model = sac.apply(Timm(*(layer() for _ in range(3))), "full")
    model.set_grad_checkpointing(False)
    model.set_grad_checkpointing(enable=False)
    with pytest.raises(ModelError, match=CALLED.format("Timm", "set_grad_checkpointing")):
        model.set_grad_checkpointing()
    assert model.grad_checkpointing is False


def test_remove_gives_the_methods_back() -> None:
    model, _ = tiny("llama")
    model.gradient_checkpointing_enable = own = lambda: "called"
    sac.apply(model, "full")
    with pytest.raises(ModelError, match="gradient_checkpointing_enable was called"):
        model.gradient_checkpointing_enable()
    sac.remove(model)
    assert model.gradient_checkpointing_enable is own
    del model.gradient_checkpointing_enable
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    with pytest.raises(ModelError, match="the model's own checkpointing is on"):
        sac.apply(model, "full")


def flag_on_a_block(model: Any) -> None:
    model.model.layers[1].gradient_checkpointing = True


def wrapper_around_a_block(model: Any) -> None:
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])


@pytest.mark.parametrize(
    ("turn_on", "found"),
    [
        (flag_on_a_block, "gradient_checkpointing at model.layers.1"),
        (wrapper_around_a_block, "checkpoint_wrapper at model.layers.1"),
    ],
)
def test_what_is_turned_on_by_hand(turn_on: Callable[[Any], None], found: str) -> None:
    model, batch = tiny("llama")
    sac.apply(model, "full")
    turn_on(model)
    with pytest.raises(ModelError, match=FOUND + found):
        model(**batch)


def test_a_flag_that_is_set_by_hand_on_what_calls_the_blocks() -> None:
    model, inputs = plain("VisionTransformer")
    sac.apply(model, "full")
    model.grad_checkpointing = True
    with pytest.raises(ModelError, match=FOUND + "grad_checkpointing at the model"):
        model(**inputs)


def test_enabling_a_model_of_which_a_part_is_ours() -> None:
    model, batch = tiny("llama")
    sac.apply(model.model, "full")
    model.activation_checkpointing_enable()
    with pytest.raises(ModelError, match=FOUND + "gradient_checkpointing at "):
        model(**batch)
