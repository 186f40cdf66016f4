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
from sac.blocks.other_checkpointing import ENABLING
from sac.errors import ModelError, RegionError
from tests.support.model_zoo import tiny
from tests.support.plain_zoo import plain

pytest.importorskip("transformers", reason="tests/stacks needs transformers")

CALLED = (
    "{model}: {name} was called, and sac.apply has been called on this model before: two at once would run every block "
    "three times\n"
    "    fix: leave the model's own checkpointing off: activation_checkpointing=False and gradient_checkpointing=False "
    "for a Trainer (TRL has it on by default), use_gradient_checkpointing=False for PEFT; or call sac.remove(model) "
    "first"
)
FOUND = (
    "{path}: {found}, and sac.apply has been called on this model: two at once would run every block three times\n"
    "    fix: leave the model's own checkpointing off (with Accelerate: activation_checkpointing of the FSDP plugin)"
)


class Timm(nn.Sequential):
    """A stack with a switch as timm's."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(3)))
        self.grad_checkpointing = False

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable


def switches(model: nn.Module) -> list[tuple[str, str]]:
    return [(path, name) for path, one in model.named_modules() for name in vars(one) if name in ENABLING]


@pytest.mark.parametrize("name", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
@pytest.mark.parametrize("value", ["full", "selective"])
def test_a_method_that_turns_it_on(name: str, value: str) -> None:
    model, batch = tiny("llama")
    sac.apply(model, value)
    for part in (model, model.model):
        with pytest.raises(ModelError) as caught:
            getattr(part, name)({"use_reentrant": False})
        assert str(caught.value) == CALLED.format(model=type(part).__name__, name=name)
    assert not model.is_activation_checkpointing
    model(**batch).loss.backward()


def test_a_method_that_turns_it_on_or_off() -> None:
    model = sac.apply(Timm(), "full")
    model.set_grad_checkpointing(False)
    model.set_grad_checkpointing(enable=False)
    with pytest.raises(ModelError) as caught:
        model.set_grad_checkpointing()
    assert str(caught.value) == CALLED.format(model="Timm", name="set_grad_checkpointing")
    assert model.grad_checkpointing is False


def test_remove_gives_the_methods_back() -> None:
    model, _ = tiny("llama")
    model.gradient_checkpointing_enable = own = lambda: "called"
    sac.apply(model, "full")
    assert sorted(switches(model)) == sorted(
        (path, name)
        for path in ("", "model")
        for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    )
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
    with pytest.raises(RegionError) as caught:
        model(**batch)
    assert str(caught.value) == FOUND.format(path="model.layers.1", found="gradient_checkpointing is on in this block")


def test_a_flag_that_is_set_by_hand_on_what_calls_the_blocks() -> None:
    model, inputs = plain("timm")
    sac.apply(model, "full")
    model.grad_checkpointing = True
    with pytest.raises(RegionError) as caught:
        model(**inputs)
    assert str(caught.value) == FOUND.format(
        path="blocks.0", found="grad_checkpointing is on in TimmStyle, which calls this block"
    )


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
    with pytest.raises(RegionError) as caught:
        model(**batch)
    found = "a checkpoint_wrapper (CheckpointWrapper) has been put around this block"
    assert str(caught.value) == FOUND.format(path="model.layers.1", found=found)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2))
        self.was_freed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        big = torch.ones(1000)
        reference = weakref.ref(big)
        for layer in self.layers:
            x = layer(x)
        del big
        self.was_freed = reference() is None
        return x


def test_what_calls_the_model_may_checkpoint_something_else() -> None:
    class Outer(nn.Module):
        gradient_checkpointing = True

        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = Tower(), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.head, self.tower(x), use_reentrant=False)

    model = Outer()
    sac.apply(model.tower, "full")
    model(torch.ones(2, 4)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_looking_at_callers_holds_nothing_of_theirs() -> None:
    model = sac.apply(Tower(), "full")
    model(torch.ones(2, 4)).sum().backward()
    assert model.was_freed
