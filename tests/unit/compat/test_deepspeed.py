"""DeepSpeed's activation checkpointing: what its own tests hold, in both of its modes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import sac.compat.deepspeed as checkpointing
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.support.rank_programs import ModelParallelUnit
from tests.support.ranks import run_ranks
from tests.support.training import assert_same
from tests.unit.compat.programs import DEEPSPEED, WIDTH, forking, gradients_of, plainly, trained, unequal_in_a_residual

pytestmark = pytest.mark.usefixtures("nothing_is_configured")


@pytest.mark.parametrize("needs_grad", [True, False])
def test_arguments_and_results_of_every_sort(call, needs_grad):
    def region(x: Tensor, mask: Tensor, bools: Tensor, *others: Any) -> tuple[Any, ...]:
        out = linear(x).masked_fill(bools, 0)
        return mask, out * mask, (out * 2).detach(), *others

    torch.manual_seed(0)
    linear, x, mask = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=needs_grad), torch.rand(WIDTH)
    seen = []
    for run in (plainly, call):
        linear.zero_grad()
        x.grad = None
        first, out, detached, *others = run(region, x, mask, mask > 0.5, None, 2, True)
        assert others == [None, 2, True]
        seen.append(gradients_of(out.square().sum(), linear, x) | {"first": first, "detached": detached.detach()})
    assert_same(*seen)


def test_checkpoint_is_reentrant_and_the_other_is_not():
    x = torch.ones(2, requires_grad=True)
    (grad,) = torch.autograd.grad(checkpointing.non_reentrant_checkpoint(torch.exp, x).sum(), x)
    assert torch.equal(grad, x.exp())
    with pytest.raises(RegionError, match="use_reentrant=False"):
        torch.autograd.grad(checkpointing.checkpoint(torch.exp, x).sum(), x)


def test_the_checkpoint_function():
    x = torch.randn(3, requires_grad=True)
    outputs: list[Any] = []
    returned = checkpointing.CheckpointFunction.apply(lambda h: (h.sin(), 3, h.cos()), outputs, x)
    assert [type(one) for one in outputs] == [Tensor, int, Tensor]
    (returned[0] + returned[1]).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() + x.cos()).sum(), x)[0])


def test_the_tracker_is_put_back_without_being_named(call, monkeypatch):
    assert_same(forking(plainly, RngTracker()), forking(call, checkpointing.get_cuda_rng_tracker()))
    theirs = RngTracker()
    fake = SimpleNamespace(get_cuda_rng_tracker=lambda: theirs)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.activation_checkpointing.checkpointing", fake)
    assert_same(forking(plainly, RngTracker()), forking(call, theirs))


SLOTS = {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4}


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpoint_in_cpu": True}, {"partition_activations": True}, SLOTS, SLOTS | {"checkpoint_in_cpu": True}],
    ids="+".join,
)
def test_stacked_layers_in_every_configuration(call, arguments, needs_grad):
    """Without a model-parallel group: partitions are whole, buffers and copies are what they are."""
    checkpointing.configure(None, **arguments)
    plain = trained(plainly, needs_grad=needs_grad, layers=4)
    for _ in range(2):  # slots are free again after a backward
        assert_same(plain, trained(call, needs_grad=needs_grad, layers=4))


def test_one_layer_too_many_is_an_error_at_the_call_and_reset_frees_the_slots(call):
    checkpointing.configure(None, **SLOTS)
    x = torch.randn(4, requires_grad=True)
    kept = [call(lambda h: h.sin().exp(), x) for _ in range(4)]
    with pytest.raises(RegionError, match=r"each of its 4 \(num_checkpoints\)"):
        call(lambda h: h.sin().exp(), x)
    checkpointing.reset()
    call(lambda h: h.sin().exp(), x).sum().backward()
    assert len(kept) == 4


def test_another_configuration_before_backward_does_not_matter_to_regions_that_have_run(call):
    """DeepSpeed reads its flags in backward again, and fails there."""
    checkpointing.configure(None, **SLOTS)
    x = torch.randn(4, requires_grad=True)
    out = call(lambda h: h.sin().exp(), x)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])


def partitioned(name: str, arguments: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """What differs in a residual, and whether an argument itself is let go: one of many, and one that is marked."""
    checkpointing.configure(ModelParallelUnit(), partition_activations=True, **arguments)
    call = DEEPSPEED[name]
    is_free = {}
    for is_marked in (True, False):  # the first call of a function may hold on to more
        h = torch.randn(7, requires_grad=True) * 2
        h.no_checkpointing = is_marked
        memory, out = StorageWeakRef(h.untyped_storage()), call(lambda t: t.exp().exp(), h)
        del h
        is_free[is_marked] = memory.expired()
        out.sum().backward()
    return unequal_in_a_residual(call), is_free[False], is_free[True]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True, "num_checkpoints": 1}],
    ids=lambda arguments: "+".join(arguments) or "partition",
)
@pytest.mark.parametrize("name", DEEPSPEED)
def test_partitioning_over_two_ranks(name, arguments):
    assert run_ranks(2, partitioned, name, arguments) == [([], True, False)] * 2


def test_seeds_are_those_of_deepspeeds_formula_until_others_are_set():
    answers = {"rank": lambda: 3, "group": lambda: None, "world_size": lambda: 1}
    checkpointing.configure(SimpleNamespace(**{f"get_model_parallel_{name}": one for name, one in answers.items()}))
    for seed, seeds in (
        (5, checkpointing.model_parallel_cuda_manual_seed),
        (9, checkpointing.model_parallel_reconfigure_tp_seed),
    ):
        seeds(seed)
        state = checkpointing.get_cuda_rng_tracker().get_states()["model-parallel-rng"]
        assert torch.equal(state, torch.Generator().manual_seed(seed + 2718 + 3).get_state())
        assert torch.initial_seed() == 5  # the default generator is left alone the second time
    with pytest.raises(ConfigError, match=r"^deepspeed\.model_parallel_reconfigure_tp_seed"):
        checkpointing.model_parallel_reconfigure_tp_seed(2**64 - 1)
