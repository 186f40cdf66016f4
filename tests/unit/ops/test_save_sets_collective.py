"""What the functional collectives do to tensors, and that traits and sets say so."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives

from sac.ops.facts import traits_of
from sac.ops.names import resolve_ops

c10d = torch.ops._c10d_functional
P2P = ("irecv", "batch_p2p_ops")


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_result_may_be_waited_for_again_and_later(group):
    """Waiting hands back the tensor it waits for, so what a region keeps is complete once backward has waited."""
    x = torch.arange(4.0)
    result = c10d.all_to_all_single(x, [4], [4], group.group_name)
    assert c10d.wait_tensor(result) is result
    assert c10d.wait_tensor(result) is result
    assert torch.equal(result, x)
    assert result.data_ptr() != x.data_ptr()
    assert traits_of(c10d.wait_tensor.default).is_view


def test_the_wrapper_of_a_pending_result_shares_its_storage(group):
    pending = collectives.all_reduce(torch.ones(2), "sum", group)
    assert traits_of(c10d._wrap_tensor_autograd.default).is_view
    assert not resolve_ops(["*"]).matches(c10d._wrap_tensor_autograd.default)
    assert torch.equal(pending + 0, torch.ones(2))


@pytest.mark.parametrize("name", ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"])
def test_functional_collectives_can_be_saved(name):
    matcher, op = resolve_ops(["collective"]), getattr(c10d, name).default
    assert matcher.matches(op)
    assert not matcher.conditional(op)


newer = pytest.mark.skipif(not hasattr(c10d, "irecv"), reason="this torch has no point-to-point ops")


@pytest.mark.parametrize(
    "name",
    ["all_reduce_", "broadcast_", "all_gather_into_tensor_out", *(pytest.param(n, marks=newer) for n in P2P)],
)
def test_collectives_that_write_cannot_be_saved(name):
    assert traits_of(getattr(c10d, name).default).unsavable_reason.startswith("it writes its argument")
