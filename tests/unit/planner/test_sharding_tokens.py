"""A sharded model that reads tokens: no op of its plan has data, and its layers are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sac.planner.fakes import fake_mode
from sac.planner.prepare import prepare
from sac.planner.sharding import QuickChunks, fake_ranks, fsdp_over
from sac.torch_private import FakeTensor
from tests.support.ranks import run_ranks
from tests.unit.planner.test_sharding import WIDTH, Block, _least_peak


class Tokens(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _tokens() -> Tensor:
    return torch.arange(64) % 50


def _measured_on_a_rank() -> int:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Tokens()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model(_tokens()).backward()
    model.zero_grad(set_to_none=True)
    peak: int = _least_peak(model, _tokens())
    return peak


@pytest.mark.slow
def test_the_peak_of_a_real_rank_that_reads_tokens_is_what_was_predicted() -> None:
    measured = min(run_ranks(2, _measured_on_a_rank))
    with fake_ranks(2):
        planner = prepare(Tokens(), (_tokens(),), parallelize=fsdp_over(2))
        predicted = planner.run(planner.without_checkpointing).peak - planner.step.static
    assert predicted == measured


def test_the_first_block_runs_without_data_and_is_like_the_others() -> None:
    seen: list[bool] = []
    model = Tokens()
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(isinstance(args[0], FakeTensor)))
    with fake_ranks(4):
        planner = prepare(model, (_tokens(),), parallelize=fsdp_over(4))
    assert seen
    assert all(seen)
    assert [len(profile.paths) for profile in planner.profiles] == [4]


def test_the_peaks_of_a_sharded_model_are_composed_within_a_block_of_the_checked_ones() -> None:
    with fake_ranks(4):
        planner = prepare(Tokens(8), (_tokens(),), parallelize=fsdp_over(4))
        full = planner.everywhere(lambda group: 0)
        predicted = planner.step.peak(full)[0]
        assert predicted <= planner.run(full).peak
        assert planner.step.peak(full)[0] == planner.run(full).peak


@pytest.mark.parametrize(("length", "count"), [(12, 4), (13, 4), (3, 8), (1, 2), (0, 2)])
def test_chunks_have_the_sizes_that_torch_gives_them(length: int, count: int) -> None:
    whole = fake_mode().from_tensor(torch.zeros(2, length))
    expected = [tuple(one.shape) for one in torch.chunk(whole, count, 1)]
    with QuickChunks():
        found = torch.chunk(whole, count, dim=1)
    assert [tuple(one.shape) for one in found] == expected
