"""Ranks with the library and ranks without it send the same collectives, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import sac
from tests.support.blocks import FunctionBlock, Stack, selective
from tests.support.native_engine import needs_library, recorded, with_library
from tests.support.rank_programs import BODIES, reduced, stack_of
from tests.support.ranks import run_ranks
from tests.support.replay_programs import POLICIES, gradients
from tests.support.training import assert_same, built

pytestmark = needs_library
SENT = ("_c10d_functional::", "c10d::")  # gloo has events of its own too, on other threads


def routed(block: FunctionBlock, x: Tensor) -> Tensor:
    """Choose between two collectives; autograd saves nothing after the last one but the choice."""
    h = reduced(x @ block.a)
    chosen = h.detach().topk(8, dim=1)[1]
    return (h.sin() @ block.b + reduced(h)).gather(1, chosen)


def steps_of(name: str, engine: str, chosen: dict[str, Any], natives: list[bool]) -> tuple[Any, ...]:
    """Four steps of this rank: gradients, the collectives of the last step in order, ops that the library recorded."""
    model = built(lambda: stack_of(name) if name in BODIES else Stack(FunctionBlock(routed), FunctionBlock(routed)))
    if engine == "full":
        model = sac.apply(model, {"mode": "full"})
    elif engine != "none":
        model = sac.apply(model, selective(chosen, engine=engine, verify="never"))
    seen: dict[str, Tensor] = {}

    def step() -> None:
        model.zero_grad()
        model(torch.randn(8, 8)).square().sum().backward()

    with with_library(natives[dist.get_rank()]), recorded() as log:
        torch.manual_seed(dist.get_rank())
        for index in range(3):
            step()
            seen |= {f"{index} {key}": one for key, one in gradients(model).items()}
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step()
        seen |= {f"last {key}": one for key, one in gradients(model).items()}
    events = sorted(profiler.events(), key=lambda one: one.time_range.start)
    # Under a mode, torch reports an op twice: in `full` only a recorder has one.
    sent = "gloo:" if engine == "full" else SENT
    return seen, [one.name for one in events if one.name.startswith(sent)], sum(log.ops)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["replay", "auto"])
@pytest.mark.parametrize("chosen", POLICIES)
@pytest.mark.parametrize("name", BODIES)
def test_one_rank_without_the_library(name: str, chosen: str, engine: str) -> None:
    plain = run_ranks(2, steps_of, name, "none", POLICIES[chosen], [True, True])
    mixed = run_ranks(2, steps_of, name, engine, POLICIES[chosen], [True, False])
    python = run_ranks(2, steps_of, name, engine, POLICIES[chosen], [False, False])
    for rank in range(2):
        assert_same(plain[rank][0], mixed[rank][0])
        assert mixed[rank][1] == python[rank][1]
        assert mixed[rank][1] != []
    assert mixed[0][2] > 0
    assert mixed[1][2] == python[0][2] == 0


def test_one_rank_without_it_and_one_collective() -> None:
    (one, sent, native), (_, others, without) = run_ranks(
        2, steps_of, "functional", "replay", POLICIES["matmuls"], [True, False]
    )
    assert sent == others
    assert any("all_reduce" in event for event in sent)
    assert native > 0
    assert without == 0
    assert one


def test_one_rank_holds_choices_in_a_watch_and_one_in_a_recorder() -> None:
    plain = run_ranks(2, steps_of, "routed", "none", {}, [True, True])
    mixed = run_ranks(2, steps_of, "routed", "full", {}, [True, False])
    python = run_ranks(2, steps_of, "routed", "full", {}, [False, False])
    for rank in range(2):
        assert_same(plain[rank][0], mixed[rank][0])
        assert mixed[rank][1] == python[rank][1]
        assert len(mixed[rank][1]) > 4
