"""Random programs as regions with random options: outputs, gradients, buffers and generators are those of the plain
program, bit for bit, and no memory is left after backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis
import torch
import torch._dynamo  # torch imports it inside an op otherwise, and that holds the op's tensors until a collection
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sac
from sac.full import FullConfig, RngTracker
from tests.fuzz.programs import Program, programs
from tests.fuzz.test_random_programs import BACKWARDS, CALM, live_after, needs_grad, trained
from tests.support.blocks import FULL, Stack, policy, save, selective
from tests.support.training import Backward, assert_same, built

TRACKER = RngTracker("cpu")


@dataclass(frozen=True)
class Options:
    """How a program becomes regions. ``nested``: regions of one line each, inside the region or without one around."""

    face: str
    store: str = "whole"
    keep: str = "first"
    use_reentrant: bool = False
    early_stop: bool = True
    nested: bool = False
    forks: bool = False

    @property
    def sizes(self) -> dict[str, Any]:
        return {"num_checkpoints": 64} if "contiguous" in self.store else {}

    def put_on(self, model: Stack) -> Stack:
        """Make the block of ``model`` a region, in place."""
        if self.face == "checkpoint":
            config = FullConfig(store=self.store, keep=self.keep, **self.sizes)
            given = {"use_reentrant": self.use_reentrant, "early_stop": self.early_stop, "config": config}
            block = functools.partial(
                sac.checkpoint, model.blocks[0].forward, get_rng_state_tracker=lambda: TRACKER, **given
            )
            model.blocks[0].forward = block
            return model
        value = selective(policy(save("matmul", optional=True))) if self.face == "selective" else dict(FULL)
        value |= {"store": self.store, "keep": self.keep, "early_stop": self.early_stop, **self.sizes}
        if self.use_reentrant:
            value["use_reentrant"] = True
        return sac.apply(model, value, get_rng_state_tracker=lambda: TRACKER)

    def build(self, program: Program) -> Stack:
        """The stack of one block, which forks the tracker and holds inner regions if asked to."""
        return Stack(Surrounded(program.build().blocks[0], self))


class Surrounded(nn.Module):
    """A program between two draws of its own; the plain run of ``nested`` is told apart by ``inner_regions``."""

    def __init__(self, body: nn.Module, options: Options) -> None:
        super().__init__()
        self.body, self.options, self.inner_regions = body, options, False
        self.first = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: Tensor) -> Any:
        inputs = tuple(value * self.first for value in inputs)
        if self.options.forks:
            with TRACKER.fork("stream"):
                inputs = tuple(nn.functional.dropout(value, 0.2) for value in inputs)
        if not self.inner_regions:
            return self.body(*inputs)
        return sac.checkpoint(self.body, *inputs, use_reentrant=self.options.use_reentrant)


def run(program: Program, options: Options, backward: Backward, *, ours: bool) -> tuple[Stack, dict[str, Tensor]]:
    TRACKER.reset()
    TRACKER.add("stream", 5)
    model = built(lambda: options.build(program))
    if ours:
        model.blocks[0].inner_regions = options.nested  # type: ignore[assignment]
        options.put_on(model)  # type: ignore[arg-type]
    seen = trained(program, model, backward, "cpu")
    return model, seen | {"tracker": TRACKER.get_states()["stream"]}


def assert_same_as_plain(program: Program, options: Options, backward: Backward) -> None:
    """The property."""
    hypothesis.assume(needs_grad(program))
    _, reference = run(program, options, backward, ours=False)
    model, ours = run(program, options, backward, ours=True)
    assert_same(reference, ours)
    assert live_after(model, program, "cpu") == 0


@st.composite
def options(draw: st.DrawFn) -> Options:
    """Options that go together, in the non-reentrant mode."""
    return Options(
        face=draw(st.sampled_from(["checkpoint", "checkpoint", "full", "selective"])),
        store=draw(st.sampled_from(["whole", "host", "contiguous", "contiguous+host"])),
        keep=draw(st.sampled_from(["first", "all"])),
        early_stop=draw(st.booleans()),
        nested=draw(st.integers(0, 3)) == 3,
        forks=draw(st.integers(0, 3)) == 3,
    )


@st.composite
def examples(draw: st.DrawFn) -> tuple[Program, Options, Callable[..., Any]]:
    """Everything that one example needs."""
    return draw(programs("apply")), draw(options()), draw(st.sampled_from(BACKWARDS))


@settings(CALM, max_examples=250, derandomize=True)
@given(example=examples())
def test_random_regions(example: tuple[Program, Options, Backward]) -> None:
    assert_same_as_plain(*example)
