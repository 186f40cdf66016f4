"""Every stack of the matrix in docs/evidence.md, and each in the other ways to use it: what the modes promise.

Training is that without sac, bit for bit; a mode recomputes and keeps what it says. What a row does not show (errors,
orders, accumulation, what goes over the wire) is in a file of its own for each stack.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import sac
from tests.stacks.composition import Outcome, differences, train
from tests.stacks.matrix import assert_as_promised, line_named, line_of
from tests.stacks.other_trainers import TIMM
from tests.stacks.pipelines import SCHEDULES
from tests.stacks.registry import STACKS, Stack, row
from tests.support.compiling import vectorised_inductor

pytestmark = pytest.mark.filterwarnings("ignore")  # other packages' own: what sac finds wrong is an error in the row
WIDTH = 64


ELSEWHERE = ["ScheduleInterleavedZeroBubble", *(stack.options.get("schedule") for stack in STACKS)]
OTHERS = (
    *(row("pipelines:pipeline", 2, schedule=one, dropout=0.1) for one in SCHEDULES if one not in ELSEWHERE),
    row("pipelines:pipeline_dp", 4, schedule="ScheduleInterleavedZeroBubble"),
    row("pipelines:pipeline", 2, schedule="ScheduleZBVZeroBubble", layers=2),  # the rank with both ends has no layer
    row("model_parallel:tensor_parallel", 2, kind="dtensor", dropout=0.1),
    row("compiled:ddp_in_parts", 2),
    row("test_accelerate:run", 2, when="after"),
    row("test_accelerate:run_fsdp", 2, when="after", precision="bf16"),
    row("hf_training:trainer", gradient_accumulation_steps=2, bf16=True, eval_strategy="steps", eval_steps=1),
    row("hf_training:trainer", use_cache=True),  # the Trainer turns it on again
    *(row("test_peft:lora", kind=kind) for kind in ("lora and a head", "dora", "ia3", "prompt", "prefix")),
    *(row("test_peft:lora", kind=kind, first="sac") for kind in ("lora", "prefix")),
    *(row("test_trl:dpo", adapter=adapter) for adapter in (False, True)),
    *(row("other_trainers:lightning", way=way) for way in ("apply", "callback and configure_model")),
    row("other_trainers:lightning", precision="bf16-mixed", accumulate_grad_batches=2),
    row("other_trainers:lightning_ddp", 2),
    row("other_trainers:lightning_fsdp2", 2),
    *(row("other_trainers:diffusion", model=model) for model in ("flux", "unet")),
    *(row("other_trainers:vision", model=model) for model in [*TIMM][1:]),  # the first is one of the page
    *(row("other_trainers:low_precision", conversion=one) for one in ("float8 rowwise", "int8 weights", "nf4")),
    row("other_trainers:low_precision", conversion="float8 rowwise", backend="aot_eager"),
    row("other_trainers:qlora", lora_dropout=0.1),
    row("other_trainers:qlora", use_dora=True),
)
SLOW = ("aot_eager", "lightning_")


@pytest.mark.parametrize(
    "stack",
    [pytest.param(one, marks=vectorised_inductor if "inductor" in one.name else (), id=one.name) for one in STACKS],
)
def test_a_row_of_the_page(stack: Stack) -> None:
    assert_as_promised(line_named(stack.name))


@pytest.mark.parametrize(
    "stack",
    [pytest.param(one, marks=[pytest.mark.slow] if any(part in one.name for part in SLOW) else []) for one in OTHERS],
    ids=lambda stack: stack.name,
)
def test_another_row(stack: Stack) -> None:
    assert_as_promised(line_of(stack))


def measured(value: Any, scale: float = 1.0) -> Outcome:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3)))
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    return train(sac.apply(model, value), lambda model: (model(x) * scale).sum())


def test_what_is_measured_and_what_is_a_difference() -> None:
    """A layer costs three products, a recomputed one four; a blind measuring would pass every row."""
    none, full = measured("none"), measured("full")
    layers = 3 * 2 * WIDTH**3
    assert (none.flops, full.flops) == (3 * layers, 4 * layers)
    assert full.kept_bytes < none.kept_bytes
    assert differences(full, none) == []
    assert {"losses", "step 1 0.0.weight"} <= set(differences(measured("none", 2.0), none))
    changed = replace(none, state={**none.state, "random state": torch.get_rng_state() + 1})
    assert differences(changed, none) == ["random state"]
