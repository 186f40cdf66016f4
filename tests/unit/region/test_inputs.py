"""Inputs and weights of a region: which tensors it holds, which it sees as one, and what it says of a write to one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.errors import RegionError
from tests.support.cases import WIDTH, Run, Seen, hidden, layer, loss_of
from tests.support.stored_regions import wrong

both_modes = pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])


# -- Memory: a region inside another one, or under saved-tensor hooks, holds no input of its own


def test_the_input_of_an_inner_region_is_free_once_the_outer_forward_is_over():
    memories = []

    def outer(x: Tensor) -> Tensor:
        h = x * 2
        memories.append(StorageWeakRef(h.untyped_storage()))
        return sac.checkpoint(lambda t: t.sin().exp(), h)

    x = torch.randn(64, requires_grad=True)
    for _ in range(2):  # with the recorder and without
        memories.clear()
        out = sac.checkpoint(outer, x)
        assert memories[0].expired()
        x.grad = None
        out.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def test_hooks_that_copy_are_the_only_holders_of_an_input():
    x = torch.randn(64, requires_grad=True)
    h = x * 2
    memory = StorageWeakRef(h.untyped_storage())
    with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        out = sac.checkpoint(lambda t: t.sin().exp(), h)
    del h
    assert memory.expired()
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


# -- Writes between forward and backward


def test_a_write_to_an_input_in_the_hands_of_hooks_is_still_seen():
    h = torch.randn(64, requires_grad=True) * 2
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        out = sac.checkpoint(lambda t: t.sin().exp(), h)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(RegionError, match=r"its input `t` \(float32\[64\]\) was changed in place after the forward"):
        out.sum().backward()


WRITES: dict[str, tuple[Callable[[Tensor, nn.Linear], Any], str]] = {
    "an input": (lambda mask, linear: mask.zero_(), r"its input `mask` .* was changed"),
    "other data": (
        lambda mask, linear: setattr(mask, "data", torch.zeros_like(mask)),
        r"its input `mask` .* was changed",
    ),
    "other data of another shape": (
        lambda mask, linear: setattr(mask, "data", torch.zeros(5)),
        r"its input `mask` .* was changed",
    ),
    "a weight": (
        lambda mask, linear: linear.weight.detach().mul_(0.5),
        r"a parameter or buffer \(float32\[8, 8\]\) was changed in place between forward and backward",
    ),
}


@both_modes
@pytest.mark.parametrize("name", WRITES)
def test_a_write_in_between_is_an_error(name: str, reentrant: bool) -> None:
    """torch's checkpoint, and the peers', recompute with what is there now and say nothing."""
    write, told = WRITES[name]
    x, mask, linear = torch.randn(8, requires_grad=True), torch.arange(16.0)[1::2], nn.Linear(8, 8)

    def body(x: Tensor, mask: Tensor) -> Tensor:
        return linear((x * mask) ** 2).tanh().tanh()

    for _ in range(2):  # the later calls need no recorder, which would hold the weights and look at them itself
        out = sac.checkpoint(body, x, mask, use_reentrant=reentrant)
    write(mask, linear)
    with pytest.raises(RegionError, match=told):
        out.sum().backward()


@both_modes
def test_an_optimizer_that_steps_inside_backward(reentrant: bool) -> None:
    """Weights are updated as soon as their gradient is there, which is after the recomputation that needed them."""

    def descend(parameter: Tensor) -> None:
        parameter.detach().sub_(parameter.grad, alpha=0.1)

    def program(run: Run) -> Seen:
        model = nn.ModuleList([layer(), layer()])
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(descend)
        for _ in range(3):
            loss_of([run(model[1], run(model[0], hidden(4, WIDTH)[1]))]).backward()
        return {name: one.detach() for name, one in model.named_parameters()}

    assert wrong(program, partial(sac.checkpoint, use_reentrant=reentrant)) == []


# -- One tensor that is passed several times is one tensor again in recomputation: functions ask whether it is


def test_an_input_is_named_as_the_function_names_it() -> None:
    def body(x: Tensor, *, parts: dict[str, list[Tensor]]) -> Tensor:
        return (x * parts["masks"][1]).sin().exp()

    x, mask = torch.randn(8, requires_grad=True), torch.ones(8)
    out = sac.checkpoint(body, x, parts={"masks": [x, mask]})
    mask.zero_()
    with pytest.raises(RegionError, match=r"its input `parts\['masks'\]\[1\]` \(float32\[8\]\) was changed"):
        out.sum().backward()
