"""The pool of ranks that tests of process groups stand on."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankError, run_ranks


def whoami(tag: str) -> tuple[str, int, int, int]:
    return tag, dist.get_rank(), dist.get_world_size(), os.getpid()


def summed(tensor: torch.Tensor) -> torch.Tensor:
    own = tensor + dist.get_rank()
    dist.all_reduce(own)
    return own


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("this rank is no good")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def sleep() -> None:
    time.sleep(60)


def leave_a_collective_to_rank_0() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_results_come_by_rank(world_size):
    results = run_ranks(world_size, whoami, "a")
    assert [result[:3] for result in results] == [("a", rank, world_size) for rank in range(world_size)]


def test_processes_stay():
    assert run_ranks(2, whoami, "a") == run_ranks(2, whoami, "a")


def test_tensors_go_there_and_come_back():
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    for result in run_ranks(2, summed, x):
        assert torch.equal(result, 2 * x + 1)
        assert result.dtype == torch.bfloat16


def test_an_exception_surfaces_and_the_pool_works_again():
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*raise_on(.|\n)*ValueError: this rank is no good"):
        run_ranks(2, raise_on, 1)
    assert [result[1] for result in run_ranks(2, whoami, "a")] == [0, 1]


def test_a_process_that_dies_is_told():
    with pytest.raises(RankError, match="rank 0: the process is gone: exit code 7"):
        run_ranks(2, die_on, 0)
    assert [result[1] for result in run_ranks(2, whoami, "a")] == [0, 1]


def test_a_hang_is_cut_off():
    with pytest.raises(RankError) as error:
        run_ranks(2, sleep, timeout=1)
    assert str(error.value) == "rank 0: sleep did not end within 1 s\nrank 1: sleep did not end within 1 s"
    assert [result[1] for result in run_ranks(2, whoami, "a")] == [0, 1]


def test_a_collective_of_one_rank_only_is_found_out():
    with pytest.raises(RankError):
        run_ranks(2, leave_a_collective_to_rank_0, timeout=2)
    assert [result[1] for result in run_ranks(2, whoami, "a")] == [0, 1]
