"""``offload_wrapper`` on modules that are not regions: what autograd saves in them is held in host memory."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import sac
from sac.blocks.install import ours_on
from sac.compat import fsdp as ours
from sac.errors import ModelError
from tests.support.model_zoo import tiny
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


def test_it_is_the_module_itself_that_is_returned() -> None:
    mine = nn.Linear(2, 2)
    assert ours.offload_wrapper(mine) is mine
    assert type(mine) is nn.Linear
    assert list(mine.state_dict()) == ["weight", "bias"]


def test_without_grad_mode_it_is_the_plain_forward() -> None:
    with torch.no_grad():
        ids = torch.arange(16).view(2, 8)
        assert torch.equal(offloaded().eval()(ids), model().eval()(ids))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_use_their_own_weights(copied: object) -> None:
    other = copied(ours.offload_wrapper(nn.Linear(2, 2, bias=False)))  # type: ignore[operator]
    with torch.no_grad():
        other.weight.fill_(3.0)
    assert other(torch.ones(1, 2)).tolist() == [[6.0, 6.0]]


def test_remove_takes_it_off() -> None:
    mine = sac.remove(offloaded())
    assert all("forward" not in one.__dict__ for one in mine.modules())


def inside_a_region() -> None:
    ours.offload_wrapper(sac.apply(model(), {"mode": "full", "blocks": ["layers.*"]}).layers[0].up)


REFUSED = {
    "Linear: it is inside a region, which does not keep what its modules save\n    fix: call off": inside_a_region,
    "Linear: what it saves is kept elsewhere already\n    fix: call sac.remove": lambda: ours.offload_wrapper(
        ours.offload_wrapper(nn.Linear(2, 2))
    ),
    "ModuleList: it is not called itself, .*\n    fix: call offload_wrapper on each of": lambda: ours.offload_wrapper(
        nn.ModuleList([nn.Linear(2, 2)])
    ),
    "Linear: offload_wrapper is on this module: make it a region before": lambda: ours.checkpoint_wrapper(
        ours.offload_wrapper(nn.Linear(2, 2))
    ),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=text):
        REFUSED[text]()


def test_apply_on_a_model_that_has_it_is_refused() -> None:
    llama, _ = tiny("llama")
    ours.offload_wrapper(llama.lm_head)
    with pytest.raises(ModelError) as error:
        sac.apply(llama, "full")
    assert str(error.value) == (
        "lm_head: sac.compat.fsdp.offload_wrapper is on this module\n"
        "    fix: call sac.remove(model), then sac.apply, and then offload_wrapper for modules outside of the blocks"
    )
    assert type(ours_on(llama.lm_head)) is ours.OffloadedForward


def test_it_can_be_put_beside_regions() -> None:
    plain, inputs = tiny("llama")
    mine = copy.deepcopy(plain)
    sac.apply(mine, "selective")
    ours.offload_wrapper(mine.lm_head)
    grads = []
    for one in (plain, mine):
        torch.manual_seed(0)
        one(**inputs).loss.backward()
        grads.append([parameter.grad for parameter in one.parameters()])
    assert all(map(torch.equal, *grads))
