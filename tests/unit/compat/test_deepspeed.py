"""DeepSpeed's activation checkpointing: what its own tests hold, in both of its modes."""

from __future__ import annotations

import sys
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import sac.compat.deepspeed as checkpointing
from sac.errors import ConfigError, RegionError
from sac.full import RngTracker
from tests.support.rank_programs import ModelParallelUnit
from tests.support.ranks import run_ranks
from tests.support.training import assert_same
from tests.unit.compat.programs import DEEPSPEED, WIDTH, forking, gradients_of, plainly, same_everywhere, trained

pytestmark = pytest.mark.usefixtures("nothing_is_configured")


class MaskedLinear(nn.Linear):
    """A linear layer that multiplies what it returns by a mask."""

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        out = super().forward(x)
        return out * mask if mask.is_floating_point() else out.masked_fill(mask, 0)


class MaskedLinearAndMask(MaskedLinear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        return super().forward(x, mask), mask


class MaskedLinearReordered(MaskedLinear):
    def forward(self, x: Tensor, mask: Tensor) -> Any:
        out = super().forward(x, mask)
        return mask, out.detach() * 2, out


def masks() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"bool": torch.randint(0, 2, (4, WIDTH)).bool(), "float": torch.rand(4, WIDTH)}


def assert_as_plainly_called(module: nn.Module, call: Any, *inputs: Any) -> None:
    """Hold that results, input gradients and weight gradients are those of the plain call."""
    plain = run_once(deepcopy(module), plainly, inputs, None)
    ours = run_once(deepcopy(module), call, inputs, plain.differentiable)
    assert_same(plain.seen, ours.seen)
    assert plain.others == ours.others


def run_once(module: nn.Module, call: Any, inputs: Any, differentiable: list[int] | None) -> SimpleNamespace:
    """Run and backward; the loss reads the results at `differentiable`, or all that require a gradient.

    A reentrant region cannot tell that a result was detached inside: it requires a gradient too.
    """
    args = [
        one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one for one in inputs
    ]
    outputs = call(module, *args)
    leaves = tree_leaves(outputs, is_leaf=lambda one: one is None)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if differentiable is None:
        differentiable = [place for place, out in enumerate(tensors) if out.requires_grad]
    loss = torch.stack([tensors[place].square().sum() for place in differentiable]).sum()
    sources = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
    seen = gradients_of(loss, module, *sources) | {f"{place}": out.detach() for place, out in enumerate(tensors)}
    others = [type(outputs), *(leaf for leaf in leaves if not isinstance(leaf, Tensor))]
    return SimpleNamespace(seen=seen, others=others, differentiable=differentiable)


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("mask", ["bool", "float"])
@pytest.mark.parametrize("kind", [MaskedLinear, MaskedLinearAndMask, MaskedLinearReordered])
def test_layers_with_masks(call, kind, mask, needs_grad):
    torch.manual_seed(0)
    module, x = kind(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=needs_grad)
    assert_as_plainly_called(module, call, x, masks()[mask])


class WithAnything(nn.Linear):
    """A linear layer with a second argument that it does not look at, and other results than its own."""

    def __init__(self, results: tuple[Any, ...] = ()) -> None:
        super().__init__(WIDTH, WIDTH)
        self.results = results

    def forward(self, x: Tensor, *others: Any) -> Any:
        out = super().forward(x).tanh()
        return (out, *self.results) if self.results else out


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("others", [(None,), (2,), (True,), (None, 2.5), (None, True, torch.ones(3))])
def test_arguments_that_are_no_tensors(call, others, needs_grad):
    assert_as_plainly_called(WithAnything(), call, torch.randn(4, WIDTH, requires_grad=needs_grad), *others)


def test_lists_and_single_results_come_back_as_there(call):
    x = torch.ones(2, requires_grad=True)
    assert isinstance(call(lambda h: [h.sin(), h.cos()], x), tuple)
    assert isinstance(call(lambda h: (h.sin(),), x), Tensor)
    assert call(lambda h: {"a": h.sin()}, x).keys() == {"a"}


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
    assert len(returned) == 2
    (returned[0] + returned[1]).sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x.sin() + x.cos()).sum(), x)[0])
    assert isinstance(checkpointing.CheckpointFunction.apply(torch.sin, outputs, x), Tensor)
    assert len(outputs) == 4


def test_the_tracker_is_put_back_without_being_named(call):
    assert_same(forking(plainly, RngTracker()), forking(call, checkpointing.get_cuda_rng_tracker()))


def test_the_tracker_of_deepspeed_itself_is_put_back_too(call, monkeypatch):
    theirs = RngTracker()
    fake = SimpleNamespace(get_cuda_rng_tracker=lambda: theirs)
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.activation_checkpointing.checkpointing", fake)
    assert_same(forking(plainly, RngTracker()), forking(call, theirs))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"checkpoint_in_cpu": True},
        {"partition_activations": True},
        {"partition_activations": True, "checkpoint_in_cpu": True},
        {"partition_activations": True, "contiguous_checkpointing": True, "num_checkpoints": 4},
        {
            "partition_activations": True,
            "contiguous_checkpointing": True,
            "num_checkpoints": 4,
            "checkpoint_in_cpu": True,
        },
    ],
    ids=lambda arguments: "+".join(arguments) or "defaults",
)
def test_stacked_layers_in_every_configuration(call, arguments, needs_grad):
    """Without a model-parallel group: partitions are whole, buffers and copies are what they are."""
    checkpointing.configure(None, **arguments)

    def run(block: Any, h: Tensor) -> Any:
        return call(lambda x: block(x, scale=0.5), h)

    plain = trained(plainly, needs_grad=needs_grad, layers=4, scale=0.5)
    for _ in range(2):  # slots are free again after a backward
        assert_same(plain, trained(run, needs_grad=needs_grad, layers=4))


def test_one_layer_too_many_is_an_error_at_the_call_and_reset_frees_the_slots(call):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    x = torch.randn(4, requires_grad=True)
    kept = [call(lambda h: h.sin().exp(), x) for _ in range(2)]
    with pytest.raises(RegionError, match=r"each of its 2 \(num_checkpoints\)"):
        call(lambda h: h.sin().exp(), x)
    checkpointing.reset()
    call(lambda h: h.sin().exp(), x).sum().backward()
    assert len(kept) == 2


def test_arguments_of_different_sizes_have_buffers_of_their_own(call):
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    x, mask = torch.randn(4, WIDTH, requires_grad=True), torch.rand(WIDTH)
    out = call(lambda h, m: (h * m).exp(), call(lambda h, m: (h * m).sin(), x, mask), mask)
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((((x * mask).sin()) * mask).exp().sum(), x)[0])
    pending = call(lambda h: h.sin().exp(), x)
    with pytest.raises(RegionError, match="the slots of the contiguous buffer have"):
        call(lambda h: h.sin().exp(), x[:2] * 1)
    pending.sum().backward()


def test_what_is_configured_before_backward_does_not_matter_to_regions_that_have_run(call):
    """DeepSpeed reads its flags in backward again, and fails there."""
    x = torch.randn(4, WIDTH, requires_grad=True)
    checkpointing.configure(None, partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    one = call(lambda h: h.sin().exp(), x)
    checkpointing.configure(None, checkpoint_in_cpu=True)
    two = call(lambda h: h.sin().exp(), one)
    checkpointing.configure(None)
    two.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad(x.sin().exp().sin().exp().sum(), x)[0])


def partitioned(name: str, arguments: dict[str, Any]) -> list[list[str]]:
    """Dropout, keywords and flags, an odd number of elements, a residual: wrong or errors in DeepSpeed."""
    checkpointing.configure(ModelParallelUnit(), partition_activations=True, **arguments)
    call = DEEPSPEED[name]

    def run(function: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "reentrant":
            return call(function, *args, **kwargs)
        return call(lambda *given: function(*given, **kwargs), *args)  # it has no keywords

    def residual(run: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(3, WIDTH, requires_grad=True)
        h = x * 2
        return gradients_of((h + run(lambda t: F.dropout(linear(t), 0.3), h)).square().sum(), x, linear)

    def keywords(run: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, scale = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)

        def region(h: Tensor, *, flag: bool, by: Tensor) -> Tensor:
            return (h * by).exp() if flag else h

        return gradients_of(run(region, x, flag=True, by=scale).sum(), x)

    def odd_number(run: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        x, small = torch.randn(7, requires_grad=True), torch.randn(1, requires_grad=True)
        return gradients_of(run(lambda h, s: (h * s).sin().exp(), x * 1, small * 1).sum(), x, small)

    return [same_everywhere(program(plainly), program(run)) for program in (residual, keywords, odd_number)]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"checkpoint_in_cpu": True}, {"contiguous_checkpointing": True, "num_checkpoints": 1}],
    ids=lambda arguments: "+".join(arguments) or "partition",
)
@pytest.mark.parametrize("name", DEEPSPEED)
def test_partitioning_over_two_ranks(name, arguments):
    assert run_ranks(2, partitioned, name, arguments) == [[[], [], []]] * 2


def kept_elements(arguments: dict[str, Any]) -> list[int]:
    """How many elements a region keeps of arguments of 9, 4 and 1: of the last none is kept elsewhere, if so marked."""
    checkpointing.configure(ModelParallelUnit(), partition_activations=True, **arguments)
    kept = []
    keeping = checkpointing._process.settings.input_storing
    put = keeping.store.inner.put

    def counting(share: Tensor, origin: Any) -> Any:
        kept.append(share.numel())
        return put(share, origin)

    keeping.store.inner.put = counting
    marked = torch.ones(1)
    marked.no_checkpointing = True
    x = torch.randn(9, requires_grad=True)
    checkpointing.checkpoint(lambda a, b, c, d: (a.sum() * b * c).exp(), x, torch.ones(4), marked, torch.ones(3).bool())
    return kept


def test_each_rank_keeps_its_share_of_every_floating_point_argument():
    assert run_ranks(2, kept_elements, {}) == [[5, 2]] * 2


# Seeds


def test_seeds_are_those_of_deepspeeds_formula():
    mpu = SimpleNamespace(
        get_tensor_model_parallel_rank=lambda: 3,
        get_tensor_model_parallel_group=lambda: None,
        get_tensor_model_parallel_world_size=lambda: 1,
    )
    checkpointing.configure(mpu)
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker = checkpointing.get_cuda_rng_tracker()
    assert tracker.names == ("model-parallel-rng",)
    assert torch.initial_seed() == 5
    assert torch.equal(
        tracker.get_states()["model-parallel-rng"], torch.Generator().manual_seed(5 + 2718 + 3).get_state()
    )


def test_the_stream_of_the_group_continues_from_another_seed():
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker, default = checkpointing.get_cuda_rng_tracker(), torch.get_rng_state()
    checkpointing.model_parallel_reconfigure_tp_seed(9)
    expected = torch.Generator().manual_seed(9 + 2718).get_state()
    assert torch.equal(tracker.get_states()["model-parallel-rng"], expected)
    assert torch.equal(torch.get_rng_state(), default)
    with pytest.raises(ConfigError, match=r"^deepspeed\.model_parallel_reconfigure_tp_seed"):
        checkpointing.model_parallel_reconfigure_tp_seed(2**64 - 1)
