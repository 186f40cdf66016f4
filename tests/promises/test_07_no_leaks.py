"""Memory is free when backward is done or the graph is dropped, without the cycle collector.

Storages are watched by weak references from outside; torch's plain checkpoint passes
these, and its selective one those on which it does not raise.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

from tests.support.blocks import APPLY, FunctionBlock, Stack, install, policy, save, selective, square
from tests.support.oracle import built_model, on_every_way
from tests.support.programs import CATALOGUE, Block, Program, programs
from tests.support.recording import Recorder, without_collector
from tests.support.training import built, summed
from tests.support.ways import WAYS

# its workspace outlives the region
FREED = [program for program in programs() if program.name != "workspace_overwritten_first" and not program.around]


@on_every_way(FREED, quick=("auto",))
def test_nothing_lives_after_backward(program: Program, way: str, policy: str) -> None:
    """Even while the caller still holds the output and the loss; and nothing of a graph that is dropped."""
    model = built_model(program, WAYS[way], policy)
    for step in range(2):
        with without_collector(), Recorder() as recorder:
            given = [x.requires_grad_() for x in program.inputs(step)]
            out = model(*(x * 1 for x in given))
            loss = summed([out])
            loss.backward()
        held = (out, loss, [x.grad for x in given], given, [p.grad for p in model.parameters()], list(model.buffers()))
        assert recorder.live_bytes(besides=held) == 0
        model.zero_grad()
        del held, given, out, loss
    with without_collector(), Recorder() as recorder:
        out = model(*program.inputs(2))
        del out
        assert recorder.live_bytes(besides=list(model.buffers())) == 0


@on_every_way(
    [CATALOGUE[name] for name in ("llama_block", "two_dropouts", "mixture_of_experts", "smooth")],
    quick=("full", "auto", "served rerun"),
)
def test_neither_inputs_nor_values_live_after_a_retained_graph_is_dropped(
    program: Program, way: str, policy: str
) -> None:
    model = built_model(program, WAYS[way], policy)
    for backwards in (2, 1, 0):
        with without_collector():
            recorder = Recorder()
            with recorder:
                (x,) = program.inputs(0)
                seen = weakref.ref(x.requires_grad_())
                loss = model(x).square().sum()
                for _ in range(backwards):
                    loss.backward(retain_graph=True)
            del x, loss
            model.zero_grad()
            assert seen() is None
            assert recorder.live_bytes() == 0


def two_branches(block: FunctionBlock, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x @ block.a).exp().sin(), (x @ block.b).sin()


@pytest.mark.parametrize("entry", APPLY)
def test_what_one_branch_was_recomputed_from_goes_before_the_other_branch(entry: str) -> None:
    """Nothing of the second branch is missing, so that no recomputation can come."""
    model = install(built(lambda: Stack(FunctionBlock(two_branches))), selective(policy(save("matmul"))), entry)
    with without_collector(), Recorder() as recorder:
        first, second = model(*square())
        first.sum().backward()
        model.zero_grad()
        del first
        held = recorder.live_bytes()
    assert held == 3 * 8 * 8 * 4  # the input, the second product, and its sine
    assert second.requires_grad


@pytest.mark.parametrize("way", ["full", "served rerun", "checkpoint"])
def test_nothing_lives_after_an_error_in_recompute(way: str) -> None:
    """Where the region's Python runs again: replay runs none of it."""

    def fails_again(block: Block, x: Tensor) -> Tensor:
        h = block.up(x).sin()
        if block.runs == 2:
            raise KeyError("the user's own")
        return block.down(h).cos()

    model = built_model(Program("fails_again", fails_again), WAYS[way], blocks=1)
    recorder = Recorder()
    with recorder:
        loss = model(*square()).sum()
        with pytest.raises(KeyError):
            loss.backward()
    del loss
    gc.collect()  # the traceback of an error is a cycle of Python's own
    model.zero_grad()
    assert recorder.live_bytes() == 0


@on_every_way([CATALOGUE[name] for name in ("llama_block", "two_dropouts")], quick=("full", "auto"))
def test_steps_do_not_grow(program: Program, way: str, policy: str) -> None:
    model = built_model(program, WAYS[way], policy)
    live: list[int] = []
    objects: list[int] = []
    recorder = Recorder()
    with without_collector():
        for step in range(5):
            with recorder:
                model(*program.inputs(step)).square().mean().backward()
            model.zero_grad()
            live.append(recorder.live_bytes())
            objects.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    assert live[1:] == [0] * 4
    assert len(set(objects[2:])) == 1, objects


@on_every_way([CATALOGUE["two_dropouts"]])
def test_no_grad_keeps_nothing(program: Program, way: str, policy: str) -> None:
    model = built_model(program, WAYS[way], policy)
    with without_collector(), torch.no_grad(), Recorder() as recorder:
        out = model(*program.inputs(0))
        assert recorder.live_bytes(besides=out) == 0
