"""FLOPs counted by torch's dispatcher, held against counts by hand."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.nn.functional import grouped_mm, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sac.ops.flops import flops_of, grouped_matmul_flops
from sac.planner.fakes import fake_ranks
from sac.tools.comparison import count_flops

BATCH, HEADS, S, D = 2, 3, 8, 16


def test_matmul_and_its_two_gradients():
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, 16, requires_grad=True)
    assert count_flops(lambda: (x @ w).sum().backward()) == 3 * 2 * 4 * 8 * 16


def test_attention_is_two_matmuls_in_forward_and_five_in_backward_and_what_runs_again_counts():
    q, k, v = (torch.randn(BATCH, HEADS, S, D, requires_grad=True) for _ in range(3))
    matmul = 2 * BATCH * HEADS * S * S * D
    again = partial(checkpoint, scaled_dot_product_attention, use_reentrant=False)
    with torch.no_grad():
        assert count_flops(lambda: scaled_dot_product_attention(q, k, v)) == 2 * matmul
    assert count_flops(lambda: scaled_dot_product_attention(q, k, v).sum().backward()) == 7 * matmul
    assert count_flops(lambda: again(q, k, v).sum().backward()) == 9 * matmul


def test_gradients_that_are_asked_for_by_name_are_counted():
    """As a pipeline schedule asks for them that runs backward in two parts."""
    layer, x = torch.nn.Linear(8, 16, bias=False), torch.randn(4, 8, requires_grad=True)

    def step() -> None:
        out = layer(x)
        torch.autograd.grad(out.sum(), [x], retain_graph=True)
        torch.autograd.grad(out.sum(), [layer.weight])

    assert count_flops(step) == 3 * 2 * 4 * 8 * 16


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [((32, 8), (4, 8, 16), 2 * 32 * 8 * 16), ((8, 32), (32, 16), 2 * 8 * 32 * 16), ((4, 8, 16), (4, 16, 32), 4 * 8192)],
)
def test_grouped_matmul_multiplies_each_row_with_one_group(left, right, flops):
    assert grouped_matmul_flops(left, right) == flops


def test_grouped_matmul_is_counted_where_the_dispatcher_sees_it():
    rows, groups = torch.randn(32, 16, dtype=torch.bfloat16), torch.randn(4, 16, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    assert count_flops(lambda: grouped_mm(rows, groups, offs=offsets)) == 2 * 32 * 16 * 16


@pytest.mark.parametrize(
    ("left", "right"),
    [(Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Replicate()), (Replicate(), Replicate())],
    ids=["columns", "terms", "rows", "copies"],
)
def test_flops_of_dtensors_are_those_of_this_rank(left: Placement, right: Placement) -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        x, w = distribute_tensor(torch.ones(4, 8), mesh, [left]), distribute_tensor(torch.ones(8, 16), mesh, [right])
        found = flops_of(torch.ops.aten.mm.default, (x, w), {}, torch.mm(x, w))
    assert found == 2 * 4 * 8 * 16 // (1 if left == right else 2)
