"""A model's own checkpointing that is turned on after `sac.apply`: one clear error, and never two recomputations."""

from __future__ import annotations

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import sac
from sac.errors import ModelError, RegionError
from tests.support.model_zoo import tiny
from tests.support.plain_zoo import plain

pytest.importorskip("transformers", reason="tests/stacks needs transformers")

ENABLING = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
CALLED = r"{0}: {1} was called, and sac\.apply has been called on this model before: two at once .*\n    fix: "
FOUND = r"^{0}: {1}, and sac\.apply has been called on this model: two at once .*\n    fix:"


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


class Timm(nn.Sequential):
    """A stack with a switch as timm's."""

    grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


def switches(model: nn.Module) -> list[tuple[str, str]]:
    return sorted((path, name) for path, one in model.named_modules() for name in vars(one) if name in ENABLING)


@pytest.mark.parametrize("name", ENABLING)
@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_method_that_turns_it_on(name: str, value: str) -> None:
    model, batch = tiny("llama")
    sac.apply(model, value)
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
    assert switches(model) == sorted((path, name) for path in ("", "model") for name in ENABLING)
    with pytest.raises(ModelError, match="gradient_checkpointing_enable was called"):
        model.gradient_checkpointing_enable()
    sac.remove(model)
    assert switches(model) == [("", "gradient_checkpointing_enable")]
    assert model.gradient_checkpointing_enable is own
    del model.gradient_checkpointing_enable
    model.activation_checkpointing_enable()
    assert model.is_activation_checkpointing
    with pytest.raises(ModelError, match="the model's own checkpointing is on"):
        sac.apply(model, "full")
    assert switches(model) == []


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_switches_of_its_own(copied: Any) -> None:
    model, _ = tiny("llama")
    names = list(model.state_dict())
    twin = copied(sac.apply(model, "full"))
    sac.remove(model)
    assert list(twin.state_dict()) == names
    with pytest.raises(ModelError, match="was called"):
        twin.activation_checkpointing_enable()
    sac.remove(twin)
    twin.activation_checkpointing_enable()
    assert twin.is_activation_checkpointing
    assert not model.is_activation_checkpointing


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_flag_that_is_set_by_hand_on_a_block(steps_before: int) -> None:
    model, batch = tiny("llama")
    sac.apply(model, "full")
    for _ in range(steps_before):
        model(**batch).loss.backward()
    model.model.layers[1].gradient_checkpointing = True
    with pytest.raises(RegionError, match=FOUND.format("model.layers.1", "gradient_checkpointing is on in this block")):
        model(**batch)


def test_a_flag_that_is_set_by_hand_on_what_calls_the_blocks() -> None:
    model, inputs = plain("timm")
    sac.apply(model, "full")
    model.grad_checkpointing = True
    found = "grad_checkpointing is on in TimmStyle, which calls this block"
    with pytest.raises(RegionError, match=FOUND.format("blocks.0", found)):
        model(**inputs)


def test_enabling_a_model_of_which_a_part_is_ours() -> None:
    model, batch = tiny("llama")
    sac.apply(model.model, "full")
    model.activation_checkpointing_enable()
    with pytest.raises(RegionError, match=r"^layers.0: gradient_checkpointing is on in this block"):
        model(**batch)


@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_wrapper_that_is_put_around_a_block(value: str) -> None:
    model, batch = tiny("llama")
    sac.apply(model, value)
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    found = r"a checkpoint_wrapper \(CheckpointWrapper\) has been put around this block"
    with pytest.raises(RegionError, match=FOUND.format("model.layers.1", found)):
        model(**batch)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))
        self.was_freed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = torch.ones(1000)
        reference = weakref.ref(big)
        for one in self.layers:
            x = one(x)
        del big
        self.was_freed = reference() is None
        return x


class Outer(nn.Module):
    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.head, self.tower(x), use_reentrant=False)


def test_what_calls_the_model_may_checkpoint_something_else_and_is_not_held() -> None:
    model = Outer()
    sac.apply(model.tower, "full")
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert model.tower.was_freed
