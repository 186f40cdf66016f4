"""``offload_wrapper`` on modules that are not regions: what autograd saves in them is held in host memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import sac
from sac.compat import fsdp as ours
from sac.errors import ModelError
from tests.support.recording import Recorder
from tests.unit.compat.wrapping import is_layer, model, train


def offloaded() -> nn.Module:
    mine = model()
    ours.apply_activation_checkpointing(mine, ours.offload_wrapper, is_layer)
    return mine


def test_training_is_that_without_it() -> None:
    assert all(map(torch.equal, train(offloaded()), train(model())))


def test_what_it_saves_goes_through_its_own_hooks_and_nothing_runs_again() -> None:
    def step(network: nn.Module) -> tuple[int, int]:
        seen = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = network(torch.arange(16).view(2, 8)).sum()
        with Recorder() as backward:
            loss.backward()
        return len(seen), backward.count("aten._scaled_dot_product_flash_attention_for_cpu.default")

    plain, (outside, again) = step(model()), step(offloaded())
    assert outside < plain[0]  # what the layers save is not handed to hooks around the model any more
    assert again == plain[1] == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_use_their_own_weights(copied: object) -> None:
    other = copied(ours.offload_wrapper(nn.Linear(2, 2, bias=False)))  # type: ignore[operator]
    with torch.no_grad():
        other.weight.fill_(3.0)
    assert other(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_remove_takes_it_off() -> None:
    mine = sac.remove(offloaded())
    assert all("forward" not in one.__dict__ for one in mine.modules())


def test_a_region_cannot_be_put_over_it() -> None:
    mine = ours.offload_wrapper(nn.Linear(2, 2))
    with pytest.raises(ModelError) as error:
        ours.checkpoint_wrapper(mine)
    assert str(error.value) == (
        "Linear: offload_wrapper is on this module: make it a region before, not after\n"
        "    fix: call sac.remove(model) first"
    )
