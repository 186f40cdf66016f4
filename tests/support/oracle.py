"""The oracle: a program trained with a way of checkpointing and without, from the same seeds, must show the same bits.

Compared after each step: results, loss, gradients of inputs and parameters, parameters, buffers, generators of modules,
and the random states of torch, Python and NumPy.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from tests.support.blocks import Stack
from tests.support.programs import Program
from tests.support.training import Backward, assert_same, backward_shows, descend, outputs_of, plain_backward
from tests.support.ways import NONE, POLICIES, UNVERIFIED, WAYS, Way


def train_program(
    program: Program,
    way: Way = NONE,
    policy: str = "nothing",
    *,
    steps: int = 3,
    blocks: int = 2,
    backward: Backward = plain_backward,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Train a new model of the program; return all that must not depend on the way, by name."""
    model = built_model(program, way, policy, blocks=blocks, seed=seed)
    seen: dict[str, Tensor] = {}
    for step in range(steps):
        seen |= train_step(program, model, step, backward)
    return seen


def built_model(program: Program, way: Way = NONE, policy: str = "nothing", *, blocks: int = 2, seed: int = 0) -> Stack:
    """Build the program's model from the seed with the way put on it, and seed all random states."""
    torch.manual_seed(seed + 1)
    model = program.model(blocks)
    way.put(model, POLICIES[policy])
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
    return model


def train_step(program: Program, model: Stack, step: int, backward: Backward = plain_backward) -> dict[str, Tensor]:
    """Run one step; return what it shows, by name."""
    inputs = [x.requires_grad_() for x in program.inputs(step)]
    with program.around() if program.around else contextlib.nullcontext():
        outputs = outputs_of(model, inputs)
    if program.between:
        program.between(model, step)
    seen = backward_shows(step, model, inputs, outputs, backward, "cpu")
    seen[f"step {step} random numbers of Python"] = torch.tensor(random.getstate()[1])
    seen[f"step {step} random numbers of NumPy"] = torch.from_numpy(numpy.random.get_state()[1].astype(numpy.int64))
    seen[f"step {step} counters"] = torch.tensor([getattr(block, "calls", 0) for block in model.blocks])
    if program.between:
        model.train()
    descend(model, 0.05)
    return seen


def assert_exact(program: Program, way: str, policy: str = "nothing", **options: Any) -> None:
    """Hold that training the program in this way gives the same bits as without checkpointing, in every step.

    Warnings of sac are allowed: what falls back is reported, and has to be right all the same.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(reference(program, **options), train_program(program, WAYS[way], policy, **options))


def reference(program: Program, **options: Any) -> dict[str, Tensor]:
    """Return what training the program without checkpointing shows; it is trained once, and repeats itself."""
    key = id(program), *sorted(options.items(), key=itemgetter(0))
    if key not in _references:
        _references[key] = program, train_program(program, **options)
    return _references[key][1]


_references: dict[
    tuple[Any, ...], tuple[Program, dict[str, Tensor]]
] = {}  # with the program, so that its id stays its own


def assert_replayed_exactly(program: Program, policy: str = "nothing", **options: Any) -> None:
    """Hold the same of `engine: replay` without verifying: a warning of sac may say that the region is rerun."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(reference(program, **options), train_program(program, UNVERIFIED, policy, **options))


def assert_same_results(
    run: Callable[[Stack], dict[str, Tensor]], program: Program, way: str, policy: str = "nothing", **options: Any
) -> None:
    """Hold that ``run(model)``, which returns tensors by name, returns the same bits in this way as without."""
    reference = run(built_model(program, **options))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(reference, run(built_model(program, WAYS[way], policy, **options)))


def on_every_way(chosen: Sequence[Program], *ways: str, quick: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrize ``(program, way, policy)``: every program in every way; the policies of a way take turns.

    ``quick``: the ways that the quick suite runs; without it, "auto" and every second, others for the next program.
    """
    params = []
    for place, each in enumerate(chosen):
        for name in ways or WAYS:
            names = [*POLICIES] if WAYS[name].policies else ["nothing"]
            if name not in each.not_under:
                policy = names[(place + len(params)) % len(names)]
                is_quick = name in (quick or ("auto", *[*WAYS][place % 2 :: 2]))
                marks = () if is_quick else pytest.mark.slow
                params.append(pytest.param(each, name, policy, id=f"{each}-{name}-{policy}", marks=marks))
    return pytest.mark.parametrize(("program", "way", "policy"), params)
