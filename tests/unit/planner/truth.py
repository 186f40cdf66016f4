"""What a step is predicted to take, and what the allocator saw a real one take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sac
from sac.blocks.find import find_blocks
from sac.blocks.kv_cache import turn_off_cache
from sac.memory_timeline import mark, measure_memory
from sac.planner.fakes import call, fake_copy, fake_inputs, fake_mode
from sac.planner.live_bytes import KernelWorkspace, Ledger, ledgers_of
from sac.planner.step import run_step, scalar_loss
from tests.support.model_zoo import tiny
from tests.unit.planner.diffusion import DiffusionTransformer, noisy_patches

Inputs = tuple[Any, ...] | dict[str, Any]

# The name of a model here, the family in the zoo that it is of, and what is changed of that one.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", {}),
    "Qwen3-MoE": ("qwen3_moe", {}),
    "GPT-2, dropout": ("gpt2", {"dropout": 0.1}),
    "BERT": ("bert", {}),
    "T5": ("t5", {}),
    "ViT": ("vit", {"patch_size": 2}),  # else its few tokens are negligible against its parameters
}
# Further ones, which scripts/plan_accuracy.py also looks at.
FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3": ("gemma3", {}),
    "Gemma3n": ("gemma3n", {}),
    "DeepSeek-V3": ("deepseek_v3", {}),
    "Mamba": ("mamba", {}),
    "Mamba2": ("mamba2", {}),
    "Whisper": ("whisper", {}),
    "diffusion transformer": ("", {}),
}
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")


def put_on(policy: Any, engine: str = "auto") -> dict[str, Any]:
    """Return the config that puts a policy on a model, without the check of its first calls, which takes memory."""
    return {"mode": "selective", "policy": policy, "engine": engine, "verify": "never"}


def saving(ops: str) -> dict[str, Any]:
    """Return the policy that saves these ops."""
    return {"schema": "sac/v1", "name": "saving", "rules": [{"id": "saved", "ops": ops, "do": "save"}]}


EVERYTHING = "everything"
CONFIGS: dict[str, Any] = {
    "none": None,
    "full": "full",
    "selective": {"mode": "selective", "verify": "never"},
    "general": put_on("general"),
    "all matmuls": put_on(saving("matmul")),
    EVERYTHING: put_on(saving("*")),
}
SHARES = ("30%", "70%")  # of the range, that policies are planned for


@dataclass(frozen=True, slots=True)
class Bytes:
    """What a step takes in addition to parameters and inputs: kept when its forward is over, and at its highest."""

    kept: int
    peak: int


def model_named(name: str, layers: int = 2) -> tuple[nn.Module, dict[str, Any]]:
    """Return a tiny model of ``MODELS`` or ``FURTHER`` with so many layers (in each stack), and its inputs.

    It has no cache of keys and values, which sac turns off in any case.
    """
    family, changes = {**MODELS, **FURTHER}[name]
    if not family:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return DiffusionTransformer(layers).train(), noisy_patches()
    config = tiny(family)[0].config
    depth: dict[str, Any] = {field: layers for field in _LAYERS if hasattr(config, field)}
    if family == "gemma3n":  # says each layer's kind; those after the first two share keys and values
        cut = {field: getattr(config, field)[:layers] for field in ("layer_types", "activation_sparsity_pattern")}
        depth |= cut | {"num_kv_shared_layers": max(0, layers - 2)}
    model, inputs = tiny(family, **depth, **changes)
    turn_off_cache(model)
    return model, inputs


def predicted(
    model: nn.Module,
    inputs: Inputs,
    config: Any,
    loss_fn: Callable[[Any], Tensor] | None = None,
) -> Bytes:
    """Return what a step on fake tensors takes, with ``config`` put on a copy of the model."""
    mode = fake_mode()
    copied = fake_copy(model, mode)
    if config is not None:
        sac.apply(copied, config)
    blocks = [(block.path, block.module) for block in find_blocks(copied)]
    on_cpu = _device_of(model).type == "cpu"
    ledger = Ledger(workspace=KernelWorkspace()) if on_cpu else ledgers_of(None)()
    record = run_step(copied, fake_inputs(inputs, mode), blocks, ledger, loss_fn)
    return Bytes(record.kept - record.static, record.peak - record.static)


def measured(model: nn.Module, inputs: Inputs, config: Any, loss_fn: Callable[[Any], Tensor] | None = None) -> Bytes:
    """Return what the allocator saw in the second step of a copy of the model with ``config`` on it."""
    copied = copy.deepcopy(model)
    if config is not None:
        sac.apply(copied, config)

    def step() -> None:
        torch.manual_seed(0)
        output = call(copied, inputs)
        loss = scalar_loss(output, loss_fn)
        del output
        mark("forward is over")
        loss.backward()

    step()
    copied.zero_grad(set_to_none=True)
    timeline = measure_memory(step, _device_of(model))
    return Bytes(timeline.at("forward is over"), timeline.peak_bytes)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
