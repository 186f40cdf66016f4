"""Megatron-Core's activation checkpointing (``megatron.core.tensor_parallel``), implemented with ``sac.checkpoint``.

``from sac.compat.megatron import checkpoint`` replaces the import from ``megatron.core``.

If Megatron-Core is loaded in this process, its tensor-parallel group, its ranks and its tracker of random states are
used, so its layers and this module use the same ones. Without it, pass the group to ``set_tensor_model_parallel_group``
and the ranks to ``model_parallel_cuda_manual_seed``.

Intentional differences: regions are non-reentrant, so recomputation stops early and ``torch.autograd.grad`` works; the
caller's tensor is not touched; autocast is restored; arguments and results have any
structure. FP8 state of TransformerEngine is restored, whatever ``fp8`` says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from sac.checkpointing import run_with
from sac.compat.keywords import raise_if
from sac.compat.output_discarding import Discardable, discard, lent_inputs, run_discardable
from sac.config import DEFAULT_CONFIG, CallOptions, settings_of
from sac.engine.compiled import run_in_eager
from sac.engine.fp8 import check_fp8
from sac.errors import ConfigError, Problem, RegionError
from sac.full import RngTracker, seed_model_parallel
from sac.rng_tracker import DATA_PARALLEL, EXPERT_PARALLEL
from sac.stores.scatter import group_problem, process_group
from sac.torch_private import tree_leaves

# -- The job's tensor-parallel group, ranks and random states, from Megatron-Core or from the user


class CudaRNGStatesTracker(RngTracker):
    """``RngTracker`` with Megatron's name and constructor; for the accelerator if there is one, else for the CPU.

    Raises ``ConfigError`` for a tracker compatible with CUDA graphs and for one for inference: only Megatron has those.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        _refuse(
            "CudaRNGStatesTracker",
            use_cudagraphable_rng=use_cudagraphable_rng,
            is_inference_rng_tracker=is_inference_rng_tracker,
        )
        super().__init__()

    def is_initialized(self) -> bool:
        """Whether a stream was added."""
        return bool(self.names)


class _Job:
    """The settings of this process, which Megatron keeps in globals."""

    group: Any = None
    tracker: CudaRNGStatesTracker | None = None


_job = _Job()


def set_tensor_model_parallel_group(group: Any) -> None:
    """Set the group over which activations are scattered: a process group, or a one-dimensional mesh; None clears it.

    Raises ``ConfigError`` if this rank is not in it.
    """
    raise_if(group_problem(group, "megatron.set_tensor_model_parallel_group") if group is not None else ())
    _job.group = group


def _tensor_model_parallel_group() -> Any:
    """Return the group that was set, or Megatron's; raises ``ConfigError`` if there is neither."""
    state = sys.modules.get("megatron.core.parallel_state")
    group = _job.group
    if group is None and state is not None:
        with suppress(AssertionError):  # raised if nothing was initialised
            group = state.get_tensor_model_parallel_group()
    if group is None:
        found = "there is no tensor-parallel group to scatter over"
        fix = "call set_tensor_model_parallel_group(group), or initialise megatron.core.parallel_state"
        raise ConfigError(Problem(f"{_NAME}.distribute_saved_activations", found, fix=fix))
    return group


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> Any:
    """Return the tracker of this process: Megatron's own if Megatron is loaded, else one of ours.

    Raises ``ConfigError`` without Megatron if another type of tracker is requested.
    """
    theirs = sys.modules.get("megatron.core.tensor_parallel.random")
    if theirs is not None:
        return theirs.get_cuda_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    _refuse(
        "get_cuda_rng_tracker",
        use_te_rng_tracker=use_te_rng_tracker,
        inference_rng_tracker=inference_rng_tracker,
        use_cudagraphable_rng=use_cudagraphable_rng,
    )
    if _job.tracker is None:
        _job.tracker = CudaRNGStatesTracker()
    return _job.tracker


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    force_reset_rng: bool = False,
) -> None:
    """Seed the default generator and the streams of ``get_cuda_rng_tracker``; see ``sac.full.seed_model_parallel``.

    If Megatron is loaded, it does the seeding. Otherwise ``tp_rank`` defaults to this rank's position in the group that
    was set, ``ep_rank`` to 0, and ``etp_rank`` to ``tp_rank``, as for a job without expert parallelism.

    Raises ``ConfigError`` if no rank is known, or without Megatron if another type of tracker is requested.
    """
    flags = (te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    theirs = sys.modules.get("megatron.core.tensor_parallel.random")
    if theirs is not None:
        ranks = {"tp_rank": tp_rank, "ep_rank": ep_rank, "etp_rank": etp_rank}
        theirs.model_parallel_cuda_manual_seed(seed, *flags, **ranks, force_reset_rng=force_reset_rng)
        return
    where = "model_parallel_cuda_manual_seed"
    if tp_rank is None:
        if _job.group is None:
            found = "the rank in the tensor-parallel group is not known"
            fix = "pass tp_rank=, or call set_tensor_model_parallel_group(group) first"
            raise ConfigError(Problem(f"megatron.{where}.tp_rank", found, fix=fix))
        tp_rank = dist.get_rank(process_group(_job.group))
    names = ("te_rng_tracker", "inference_rng_tracker", "use_cudagraphable_rng")
    _refuse(where, **dict(zip(names, flags, strict=True)))
    if force_reset_rng:
        _job.tracker = None
    etp_rank = etp_rank if etp_rank is not None else tp_rank
    seed_model_parallel(seed, tp_rank, ep_rank or 0, etp_rank, tracker=get_cuda_rng_tracker())


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that is the same on all tensor-parallel ranks."""
    return DATA_PARALLEL


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream of experts."""
    return EXPERT_PARALLEL


def _refuse(where: str, **flags: bool) -> None:
    found = "this type of tracker belongs to Megatron"
    wrong = [name for name, value in flags.items() if value]
    raise_if([Problem(f"megatron.{where}.{one}", found, fix=f"leave {one} out, or import megatron") for one in wrong])


# -- Megatron-Core's ``CheckpointWithoutOutput``: regions whose outputs are released until backward

_DISCARDING = "megatron.CheckpointWithoutOutput"


class CheckpointWithoutOutput:
    """One region whose output is released once its consumers have run, and recomputed in backward.

    ``ckpt_manager``: discards the outputs of several regions together. ``retain_input_tensors`` is always treated as
    true: an output in the memory of an input is never released. ``fp8`` is not needed: FP8 state is always restored.

    Intentional differences from Megatron: no storage is resized. The output's memory is freed with the caller's own
    references; consumers that do not lead to the hook tensor keep what they saved; a wrong hook tensor causes a
    warning, and gradients are right.
    """

    def __init__(
        self,
        fp8: Any = False,
        ckpt_manager: CheckpointWithoutOutputManager | None = None,
        retain_input_tensors: bool = False,
    ) -> None:
        del fp8, retain_input_tensors
        self._manager = ckpt_manager
        self.discardable: Discardable | None = None
        self.has_run = False

    def checkpoint(self, run_function: Callable[..., Any], *args: Any) -> Any:
        """Run ``run_function(*args)`` as a region; return its result. In a compiled function, it runs in eager mode."""
        if torch.compiler.is_compiling():  # discarding walks an autograd graph, which a compiled one is not
            return run_in_eager(self.checkpoint, run_function, *args)
        if torch.is_grad_enabled():
            check_fp8(_DISCARDING)
        settings = settings_of(DEFAULT_CONFIG, CallOptions(get_rng_state_tracker=get_cuda_rng_tracker), _DISCARDING)
        output, self.discardable = run_discardable(settings, run_function, args)
        self.has_run = True
        if self._manager is not None:
            self._manager.add_checkpoint(self)
        return output

    def discard_output_and_register_recompute(self, hook_tensor: Any) -> None:
        """Release the output in what was saved between the region and ``hook_tensor``, a tensor computed from it.

        With a manager this does nothing. If ``hook_tensor`` does not depend on the output, or the output was changed in
        place, it is kept, with a warning. Raises ``RegionError`` if nothing was checkpointed.
        """
        if torch.compiler.is_compiling():
            run_in_eager(self.discard_output_and_register_recompute, hook_tensor)
            return
        if not self.has_run:
            fix = "call checkpoint(run_function, *args) first"
            where = f"{_DISCARDING}.discard_output_and_register_recompute"
            raise RegionError(Problem(where, "there is no output to discard", fix=fix))
        if self._manager is None:
            _discard_outputs([self], hook_tensor)


class CheckpointWithoutOutputManager:
    """Discards the outputs of several regions together, also if each is the input of the next."""

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Add a region that has run; raises ``ConfigError`` for anything else."""
        if not isinstance(ckpt, CheckpointWithoutOutput) or not ckpt.has_run:
            where, kind = "megatron.CheckpointWithoutOutputManager.add_checkpoint", type(ckpt).__name__
            found, fix = f"this {kind} is not a region that has run", "call its checkpoint(run_function, *args) first"
            raise ConfigError(Problem(where, found, "a CheckpointWithoutOutput that has run", fix=fix))
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Any) -> None:
        """Release all outputs in what was saved between the regions and ``hook_tensor``; warns as for one region."""
        _discard_outputs(self.checkpoints, hook_tensor)


MHCBlockRecomputeManager = BlockLevelCheckpointManager = CheckpointWithoutOutputManager


def _discard_outputs(checkpoints: Sequence[CheckpointWithoutOutput], hook_tensor: Any) -> None:
    found = [ckpt.discardable for ckpt in checkpoints if ckpt.discardable is not None]
    for ckpt in checkpoints:
        ckpt.discardable = None
    discard(found, *(leaf for leaf in tree_leaves(hook_tensor) if isinstance(leaf, torch.Tensor)))


# -- Megatron-Core's activation checkpointing (``megatron.core.tensor_parallel``), implemented with ``sac.checkpoint``

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


def checkpoint(function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any) -> Any:
    """Run ``function(*args)`` as a region that is recomputed in backward; return its result.

    ``distribute_saved_activations``: keep the first floating-point input scattered over the tensor-parallel group; None
    means false, as in Megatron. The tracker of ``get_cuda_rng_tracker`` is always restored for recomputation. Without
    grad mode this is the plain call.

    Raises ``ConfigError`` if there is no group to scatter over, and for FP8 in a version of TransformerEngine whose
    state cannot be restored; ``RegionError`` in backward as ``sac.checkpoint`` does.
    """
    if not isinstance(distribute_saved_activations, bool | None):
        found = f"a {type(distribute_saved_activations).__name__} is not true or false"
        fix = "call checkpoint(function, distribute_saved_activations, *args)"
        raise ConfigError(Problem(f"{_NAME}.distribute_saved_activations", found, "true, false", fix=fix))
    if not torch.is_grad_enabled():
        return function(*args)
    check_fp8(_NAME)
    options = CallOptions(
        distribute_saved_activations=bool(distribute_saved_activations),
        tp_group=_tensor_model_parallel_group() if distribute_saved_activations else None,
        get_rng_state_tracker=get_cuda_rng_tracker,
    )
    settings = settings_of(DEFAULT_CONFIG, options, _NAME)
    with lent_inputs(args):
        return run_with(settings, function, args, {})
