"""Megatron-Core's activation checkpointing (``megatron.core.tensor_parallel``), carried out by ``sac.checkpoint``.

``from sac.compat.megatron import checkpoint`` takes the place of the import from ``megatron.core``.

Where Megatron-Core is loaded in this process, its tensor-parallel group, its ranks and its tracker of random states are
the ones that are used, so that its layers and this module mean the same ones. Without it give the group to
``set_tensor_model_parallel_group`` and the ranks to ``model_parallel_cuda_manual_seed``.

What is different, each on purpose: regions are non-reentrant, so recomputation stops early and
``torch.autograd.grad`` works; the caller's tensor is not touched unless ``release_input=True``; autocast is put back;
arguments and results have any structure. FP8 state of TransformerEngine is not put back: FP8 around a region is an
error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sac.compat.fp8 import fp8_problem
from sac.compat.megatron_discarding import (
    BlockLevelCheckpointManager,
    CheckpointWithoutOutput,
    CheckpointWithoutOutputManager,
    MHCBlockRecomputeManager,
)
from sac.compat.megatron_job import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    get_data_parallel_rng_tracker_name,
    get_expert_parallel_rng_tracker_name,
    model_parallel_cuda_manual_seed,
    set_tensor_model_parallel_group,
    tensor_model_parallel_group,
)
from sac.errors import ConfigError, Problem
from sac.full import FullConfig
from sac.full.checkpoint import run_with
from sac.full.discarding import lent_inputs
from sac.full.full_config import DEFAULT_CONFIG, CallOptions, settings_of

__all__ = [
    "BlockLevelCheckpointManager",
    "CheckpointWithoutOutput",
    "CheckpointWithoutOutputManager",
    "CudaRNGStatesTracker",
    "MHCBlockRecomputeManager",
    "checkpoint",
    "get_cuda_rng_tracker",
    "get_data_parallel_rng_tracker_name",
    "get_expert_parallel_rng_tracker_name",
    "model_parallel_cuda_manual_seed",
    "set_tensor_model_parallel_group",
]

_NAME = "megatron.checkpoint"
_RELEASING = FullConfig(release_input=True)


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any, release_input: bool = False
) -> Any:
    """Run ``function(*args)`` as a region that is recomputed in backward; return its result.

    ``distribute_saved_activations``: keep the first floating-point input scattered over the tensor-parallel group;
    None is false, as there.
    ``release_input``: with that, and as Megatron does, the caller's tensor holds this rank's share only, flat, from the
    end of the forward until backward. The tracker of ``get_cuda_rng_tracker`` is put back for recomputation, always.
    Without grad mode it is the plain call.

    Raises ``ConfigError`` if there is no group to scatter over, for ``release_input`` without scattering, and for FP8
    around the call; ``RegionError`` in backward as ``sac.checkpoint``.
    """
    if distribute_saved_activations is None:
        distribute_saved_activations = False
    if not isinstance(distribute_saved_activations, bool):
        found = f"a {type(distribute_saved_activations).__name__} is not true or false"
        fix = "call checkpoint(function, distribute_saved_activations, *args)"
        raise ConfigError(Problem(f"{_NAME}.distribute_saved_activations", found, "true, false", fix=fix))
    if not torch.is_grad_enabled():
        return function(*args)
    problems = fp8_problem(_NAME)
    if problems:
        raise ConfigError(problems)
    options = CallOptions(
        distribute_saved_activations=distribute_saved_activations,
        tp_group=tensor_model_parallel_group(_NAME) if distribute_saved_activations else None,
        get_rng_state_tracker=get_cuda_rng_tracker,
    )
    settings = settings_of(_RELEASING if release_input else DEFAULT_CONFIG, options, _NAME)
    with lent_inputs(args):
        return run_with(settings, function, args, {})
