"""`use_reentrant: true` in a config value: whole models, data parallel and sharded ones too."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.support.blocks import llama_stack, with_dropout
from tests.support.cases import WIDTH, Run, Seen, hidden, layer
from tests.support.layers import stack
from tests.support.ranks import run_ranks
from tests.support.recording import kept_bytes
from tests.support.reentrant import reentrant, wrong
from tests.support.training import assert_same, assert_same_training, built, nearly_same, new_tensors_in, train

REENTRANT = {"mode": "full", "use_reentrant": True, "blocks": ["blocks.*"]}
LAYERS = {"mode": "full", "use_reentrant": True, "blocks": ["*"]}


def model_with_dropout() -> nn.Module:
    return with_dropout(llama_stack(3), attention=0.1)


class TakesAGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda y: self.linear(y).sin().sum())(x.detach())
        return x + slope * self.linear(x)


def test_transforms_of_torch_func_run_inside_of_a_reentrant_region():
    """Elsewhere torch refuses them: hooks on saved tensors are on."""
    x = torch.randn(2, 4)
    plain, ours = (built(lambda: nn.Sequential(TakesAGradient(), TakesAGradient())) for _ in range(2))
    sac.apply(ours, LAYERS)
    for model in (plain, ours):
        model(x.clone().requires_grad_()).square().sum().backward()
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    others = sac.apply(sac.remove(ours), LAYERS | {"use_reentrant": False})
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"):
        others(x)


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("store", ["whole", "host"])
def test_training_is_the_same(store, needs_grad):
    """The input of the first block may need no gradient, as that of an embedding's frozen table: its weights train."""
    value = REENTRANT | {"store": store}
    assert_same_training(model_with_dropout, value, steps=3, input_needs_grad=[needs_grad])


def test_copies_and_pickles_are_reentrant_too():
    model = sac.apply(built(model_with_dropout), REENTRANT)
    reference = train(built(model_with_dropout))
    for other in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        x = torch.randn(2, 8, 32, requires_grad=True)
        with pytest.raises(sac.SacError, match=r"torch\.autograd\.grad"):
            torch.autograd.grad(other(x).sum(), x)
        assert_same(reference, train(other))
        other.zero_grad()
    assert_same(reference, train(sac.remove(sac.apply(built(model_with_dropout), REENTRANT))))


def test_frozen_models_claim_no_gradient():
    model = sac.apply(llama_stack(2).requires_grad_(False), REENTRANT)
    assert not model(torch.randn(2, 8, 32)).requires_grad
    x = torch.randn(2, 8, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def test_inputs_are_all_that_is_kept():
    x = torch.randn(2, 8, 32, requires_grad=True)
    model = sac.apply(llama_stack(4), REENTRANT)
    assert kept_bytes(model, (x,)) == 3 * x.nbytes  # the first block's is the caller's
    figures = sac.report(model).to_dict()
    assert figures["kinds"][0]["input_bytes"] == x.nbytes
    assert figures["kinds"][0]["saved_bytes"] == 0


def inputs_of(rank: int) -> Tensor:
    return torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(rank))


def step_data_parallel(value: Any, shared: bool) -> dict[str, Tensor]:
    """Gradients of a data parallel model, and how often each weight was accumulated into."""
    model = stack(2)
    if shared:
        model.append(model[0])
    if value is not None:
        sac.apply(model, value)
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    parallel = DistributedDataParallel(model, static_graph=shared and value is not None)
    for _ in range(2):
        parallel(inputs_of(dist.get_rank())).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {"calls": torch.tensor(sorted(set(calls.values())))}


def step_in_float64(value: Any, shared: bool) -> dict[str, Tensor]:
    """The second use's gradient is added before or after the first's."""
    with new_tensors_in(torch.float64):
        return step_data_parallel(value, shared)


@pytest.mark.parametrize("shared", [False, True])
def test_data_parallel(shared):
    """A layer that is used twice is accumulated into twice: data parallel has to be told of that (static_graph)."""
    plain = run_ranks(2, step_in_float64 if shared else step_data_parallel, None, shared)
    ours = run_ranks(2, step_in_float64 if shared else step_data_parallel, LAYERS, shared)
    for right, found in zip(plain, ours, strict=True):
        calls = found.pop("calls").tolist()
        assert calls == ([2, 4] if shared else [2])
        for name, one in found.items():
            assert (nearly_same if shared else torch.equal)(one, right[name]), name


def in_dtensors(run: Run, placement: Placement) -> Seen:
    mesh = dist.init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.randn(WIDTH, WIDTH), mesh, [Replicate()]))
    x = distribute_tensor(torch.randn(4, WIDTH), mesh, [placement]).requires_grad_()
    h = x * 1.5
    out = run(lambda h: torch.tanh(h @ weight), h)
    (out + h).square().sum().full_tensor().backward()
    return {"out": out.to_local().detach(), "x": x.grad.to_local(), "weight": weight.grad.to_local()}


def tensor_parallel(run: Run) -> Seen:
    model, (x, h) = layer(), hidden(4, WIDTH)
    mesh = dist.init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, {"1": ColwiseParallel(), "4": RowwiseParallel()})
    (h + run(model, h)).square().sum().backward()
    found = {name: getattr(one.grad, "to_local", lambda one=one: one.grad)() for name, one in model.named_parameters()}
    return found | {"x": x.grad}


def wrong_on_rank(program: Callable[..., Seen], options: dict[str, Any], *args: Any) -> list[str]:
    group = {"tp_group": dist.group.WORLD} if options else {}
    return wrong(lambda run: program(run, *args), lambda *args: reentrant(*args, **options, **group))


@pytest.mark.parametrize("options", [{}, {"distribute_saved_activations": True}], ids=["whole", "scattered"])
def test_dtensors_and_tensor_parallel_layers(options):
    for placement in (Replicate(), Shard(0)):
        assert run_ranks(2, wrong_on_rank, in_dtensors, options, placement) == [[], []]
    assert run_ranks(2, wrong_on_rank, tensor_parallel, options) == [[], []]
