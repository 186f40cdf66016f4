"""What cannot be scattered is told at the call, on every rank, before the function runs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import sac
from sac.config import COMPARED_BY_CALLS
from sac.errors import ConfigError, RegionError, SacError
from sac.stores.contiguous import ContiguousBuffer
from sac.stores.host import OnHost
from sac.stores.scatter import Scattered
from sac.stores.store import InputStoring, OnDevice
from tests.support.ranks import run_ranks
from tests.support.scattering import mlp, scattered

LEGAL = "\n    legal: a process group that holds this rank, or a mesh of one dimension"
MEMBER_FIX = "\n    fix: pass each rank the tensor-parallel group that it is in"


def never_called(*args: Any) -> Any:
    raise AssertionError("the function ran")


def error_of(call: Callable[[], Any], kind: type[SacError] = ConfigError) -> str:
    try:
        call()
    except (kind, AssertionError) as error:
        return str(error)
    return "no error"


def refused(group: Any) -> str:
    x = torch.randn(3, 5, requires_grad=True)
    return error_of(lambda: sac.checkpoint(never_called, x, tp_group=group, distribute_saved_activations=True))


def test_without_a_group():
    assert refused(None) == (
        "sac.checkpoint.tp_group: inputs are to be scattered, but there is no group to scatter them over"
        f"{LEGAL}\n    fix: pass tp_group=, the group whose ranks all have this input"
    )


def test_before_torch_distributed_is_initialised():
    assert not dist.is_initialized()
    assert refused("tp") == (
        f"sac.checkpoint.tp_group: torch.distributed is not initialised{LEGAL}"
        "\n    fix: call torch.distributed.init_process_group first"
    )


def test_apply_leaves_the_model_as_it_was():
    model = nn.Sequential(mlp(5), mlp(5))
    with pytest.raises(ConfigError) as error:
        sac.apply(model, {"mode": "full", "distribute_saved_activations": True})
    assert str(error.value).startswith("sac.apply.tp_group: inputs are to be scattered, but there is no group")
    assert not any("forward" in module.__dict__ for module in model.modules())


def wrong_groups() -> list[str]:
    others = dist.new_group([1])
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    nameless = init_device_mesh("cpu", (1, 2))
    elsewhere = DeviceMesh("cpu", [1])
    destroyed = dist.new_group([0, 1])
    dist.barrier()  # the other rank may still be connecting to this one
    dist.destroy_process_group(destroyed)
    return [refused(group) for group in ("tp", 3, [1], others, elsewhere, mesh, nameless, destroyed)]


def test_wrong_groups():
    where = "sac.checkpoint.tp_group: "
    wrong_type = [f"{where}{what} is not a group{LEGAL}" for what in ("'tp'", "3", "[1]")]
    dimensions = [
        f'{where}the mesh has 2 dimensions (dp, tp){LEGAL}\n    fix: pass one of them: mesh["tp"]',
        f"{where}the mesh has 2 dimensions{LEGAL}\n    fix: name its dimensions and pass one of them",
    ]
    left_out = [f"{where}rank 0 is not in the group{LEGAL}{MEMBER_FIX}"] * 2
    destroyed = [f"{where}the group has been destroyed{LEGAL}"]
    here, there = run_ranks(2, wrong_groups)
    assert here == [*wrong_type, *left_out, *dimensions, *destroyed]
    assert there == [*wrong_type, "the function ran", "the function ran", *dimensions, *destroyed]


def split(what: str) -> list[str]:
    """Regions whose input is not the same on all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.arange(24.0).view(4, 6)
    others = {
        "sequence": x.chunk(size)[rank],
        "one bit": x.clone().index_put_((torch.tensor(3), torch.tensor(5)), torch.tensor(1e-30 * (rank == size - 1))),
        "order": x.roll(rank),
        "shape": x.view(8 - 2 * min(rank, 1), -1),
        "strides": x if rank else x.t().contiguous().t(),
        "dtype": x if rank else x.double(),
        "zero sign": torch.zeros(3) * (-1 if rank else 1),
    }
    one = others[what].requires_grad_()
    calls = [
        lambda run: run(never_called, one),
        lambda run: run(never_called, 1, deep={"mask": None, "x": [one]}),
        lambda run: run(never_called, torch.ones(3), one),
    ]
    COMPARED_BY_CALLS._counts.clear()  # other tests have used this process group
    run = scattered(keep="all")
    return [error_of(lambda call=call: call(run), RegionError) for call in calls]


@pytest.mark.parametrize("what", ["sequence", "one bit", "order", "shape", "strides", "dtype", "zero sign"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_input_that_is_not_the_same_on_all_ranks(size, what):
    wrong = "shape, strides or dtype" if what in ("shape", "strides", "dtype") else "values"
    told = (
        f": its {wrong} differ between the {size} ranks of the group that it is to be scattered over (is it split "
        "between them, as in sequence parallelism?)\n    fix: scatter what all ranks have whole: choose by `keep`, or "
        "keep the inputs of this region whole"
    )
    names = ["argument 0", "argument 2", "argument 1"]
    assert run_ranks(size, split, what) == [[name + told for name in names]] * size


def copies() -> tuple[list[tuple[Any, ...]], list[list[Tensor]]]:
    """What copies of placements are, and the gradients of copies of a model, those of the model itself first."""
    found = []
    inner = {"here": OnDevice(), "host": OnHost(), "slots": ContiguousBuffer(3)}
    ours = dist.new_group([0, 1])
    for group in (dist.group.WORLD, ours):
        for one in inner.values():
            keeping = InputStoring(Scattered(group, one, set()), "all")
            for again in (copy.deepcopy(keeping), pickle.loads(pickle.dumps(keeping))):
                kept = again.store
                same = kept.group is group and type(kept.inner) is type(one)
                found.append((same, again.which))
    torch.manual_seed(0)  # the same weights on every rank
    model = sac.apply(nn.Sequential(mlp(5), mlp(5)), {"mode": "full", "store": "scattered"}, tp_group=ours)
    grads = []
    for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model):
        one(torch.ones(2, 5)).sum().backward()
        grads.insert(0, [parameter.grad for parameter in one.parameters()])
    return found, grads


def test_copies_and_pickles_are_over_the_same_group():
    for found, (model, *again) in run_ranks(2, copies):
        assert found == [(True, "all")] * 12
        assert len(again) == 2
        for one in again:
            assert all(torch.equal(left, right) for left, right in zip(one, model, strict=True))


def pickled() -> tuple[bytes, bytes, str]:
    own = dist.new_group([0, 1])
    over_all, over_some = (pickle.dumps(Scattered(group, OnDevice(), set())) for group in (dist.group.WORLD, own))
    return over_all, over_some, own.group_name


def loaded(content: bytes) -> str:
    return error_of(lambda: pickle.loads(content))


@pytest.mark.slow
def test_a_pickle_without_its_group():
    over_all, over_some, name = run_ranks(2, pickled)[0]
    fix = (
        "\n    fix: make the same groups in the same order before loading, or pickle the model without sac (sac.remove)"
    )
    missing = "torch.distributed is not initialised here"
    found = "tp_group: what is loaded scatters its inputs over the default group"
    assert loaded(over_all) == f"{found}, and {missing}{fix}"
    assert loaded(over_some) == (
        f'tp_group: what is loaded scatters its inputs over the process group "{name}", and {missing}{fix}'
    )
    fresh = run_ranks(4, loaded, over_some.replace(name.encode(), b"x" * len(name)))[0]
    assert fresh.endswith(f", and there is no such group here{fix}")
    assert run_ranks(4, loaded, over_all) == ["no error"] * 4
