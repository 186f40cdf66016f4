"""`use_reentrant: true` in a config value: whole models, data parallel and sharded ones too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import sac
from tests.support.cases import WIDTH, Run, Seen, hidden, layer
from tests.support.layers import stack
from tests.support.ranks import run_ranks
from tests.support.stored_regions import wrong
from tests.support.training import nearly_same, new_tensors_in

LAYERS = {"mode": "full", "use_reentrant": True, "blocks": ["*"]}


def step_data_parallel(value: Any, shared: bool) -> dict[str, Tensor]:
    """Gradients of a data parallel model, and how often each weight was accumulated into."""
    with new_tensors_in(torch.float64):  # the gradient of a second use is added before or after that of the first
        return gradients_data_parallel(value, shared)


def gradients_data_parallel(value: Any, shared: bool) -> dict[str, Tensor]:
    model = stack(2)
    if shared:
        model.append(model[0])
    if value is not None:
        sac.apply(model, value)
    calls: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.update({name: calls.get(name, 0) + 1}))
    parallel = DistributedDataParallel(model, static_graph=shared and value is not None)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        parallel(x).square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return found | {"calls": torch.tensor(sorted(set(calls.values())))}


@pytest.mark.parametrize("shared", [False, True])
def test_data_parallel(shared):
    """A layer that is used twice is accumulated into twice: data parallel has to be told of that (static_graph)."""
    plain = run_ranks(2, step_data_parallel, None, shared)
    ours = run_ranks(2, step_data_parallel, LAYERS, shared)
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
    return wrong(lambda run: program(run, *args), partial(sac.checkpoint, use_reentrant=True, **options, **group))


@pytest.mark.parametrize("options", [{}, {"distribute_saved_activations": True}], ids=["whole", "scattered"])
def test_dtensors_and_tensor_parallel_layers(options):
    for placement in (Replicate(), Shard(0)):
        assert run_ranks(2, wrong_on_rank, in_dtensors, options, placement) == [[], []]
    assert run_ranks(2, wrong_on_rank, tensor_parallel, options) == [[], []]
