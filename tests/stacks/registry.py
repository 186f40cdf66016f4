"""Every training stack that sac is run inside, by the name that it has in the matrix of docs/evidence.md.

`trained(stack, mode)` returns what each process has after some steps in a mode: an `Outcome` per rank. A stack's
function is named and not imported, so that a package that is missing takes away its own rows alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.stacks.composition import Outcome
from tests.support.ranks import run_ranks

NONE = "none"
MODES: dict[str, Any] = {
    NONE: "none",
    "full": "full",
    "selective": "selective",
    "scattered": {"mode": "full", "distribute_saved_activations": True},
    "reentrant": {"mode": "full", "use_reentrant": True},
    "on the host": {"mode": "full", "store": "host"},
}
EVERYWHERE = ("full", "selective")
EVERY_MODE = (*EVERYWHERE, "scattered")


@dataclass(frozen=True)
class Stack:
    """One row. `function` is `module:name` below `tests.stacks`; it is called with a config value and `options`.

    `mode_options` are given in one mode, and to the run without us that it is held against. `rounded`: the stack itself
    adds numbers in another order once a graph changes, so that gradients are compared up to rounding.
    """

    name: str
    function: str
    world: int = 1
    modes: tuple[str, ...] = EVERYWHERE
    options: Mapping[str, Any] = field(default_factory=dict)
    mode_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rounded: bool = False


# Over a data-parallel group the inputs of regions are alike only if the data is.
SAME_DATA: dict[str, Any] = {"modes": EVERY_MODE, "mode_options": {"scattered": {"same_data": True}}}

STACKS: tuple[Stack, ...] = (
    Stack("plain", "compiled:plain"),
    Stack("DDP", "data_parallel:ddp", 2, **SAME_DATA),
    Stack("FSDP1", "data_parallel:fsdp1", 2, **SAME_DATA),
    Stack("FSDP2", "data_parallel:fsdp2", 2, **SAME_DATA),
    Stack("FSDP2 nested", "data_parallel:fsdp2", 2, options={"block": "experts", "nested": True}, **SAME_DATA),
    Stack("TP", "model_parallel:tensor_parallel", 2, EVERY_MODE),
    Stack("SP", "model_parallel:tensor_parallel", 2, options={"kind": "sequence"}),
    Stack("CP", "ring_attention:context_parallel", 2),
    Stack("PP 1F1B", "pipelines:pipeline", 2, options={"schedule": "Schedule1F1B"}),
    Stack("PP interleaved", "pipelines:pipeline", 2, options={"schedule": "ScheduleInterleaved1F1B"}),
    Stack("PP zero-bubble", "pipelines:pipeline", 2, options={"schedule": "ScheduleZBVZeroBubble"}),
    Stack("FSDP2xTP", "model_parallel:fsdp_tp", 4, EVERY_MODE),
    Stack("compile aot_eager", "compiled:whole", options={"backend": "aot_eager"}),
    Stack("compile inductor", "compiled:whole", options={"backend": "inductor", "layers": 1}, rounded=True),
    Stack("per-block compile", "compiled:per_block", options={"backend": "aot_eager"}),
    Stack("HF Trainer", "hf_training:trainer"),
    Stack("Accelerate", "test_accelerate:run"),
    Stack("PEFT LoRA", "test_peft:lora"),
    Stack("TRL SFT", "test_trl:sft"),
    Stack("Lightning", "other_trainers:lightning"),
    Stack("diffusers DiT", "other_trainers:diffusion", options={"model": "dit"}),
    Stack("timm ViT", "other_trainers:vision"),
    Stack("torchtitan", "other_trainers:torchtitan"),
    Stack("torchao float8", "other_trainers:low_precision", options={"conversion": "float8 tensorwise"}),
    Stack("QLoRA 4 bit", "other_trainers:qlora"),
)

_references: dict[tuple[str, int, str], list[Outcome]] = {}  # without us


def trained(stack: Stack, mode: Any, options: Mapping[str, Any] | None = None) -> list[Outcome]:
    """Train in `mode`, a key of `MODES` or a config value; return the outcome of each rank.

    `options` are given in addition to those of the stack.
    """
    given = {**stack.options, **(options or {})}
    value = MODES.get(mode, mode) if isinstance(mode, str) else mode
    key = (stack.function, stack.world, str(given))
    found = _references.get(key) if value == NONE else None
    if found is None:
        if stack.world == 1:
            found = [train(stack.function, value, given)]
        else:
            found = run_ranks(stack.world, train, stack.function, value, given)
        if value == NONE:
            _references[key] = found
    return found


def train(function: str, value: Any, options: Mapping[str, Any]) -> Outcome:
    """Train in this process."""
    module, _, name = function.partition(":")
    found: Outcome = getattr(importlib.import_module(f"tests.stacks.{module}"), name)(value, **options)
    return found


def row(function: str, world: int = 1, modes: tuple[str, ...] = EVERYWHERE, **options: Any) -> Stack:
    """A row that is not in the matrix of the page."""
    return Stack(f"{function} {options}", function, world, modes, options)
