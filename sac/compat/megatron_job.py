"""What Megatron-Core knows of a job, or the user has said of it: its tensor-parallel group, ranks, random states."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist

from sac.errors import ConfigError, Problem
from sac.full import RngTracker, seed_model_parallel
from sac.full.seeding import DATA_PARALLEL, EXPERT_PARALLEL
from sac.region.stores.groups import group_problem, process_group


class CudaRNGStatesTracker(RngTracker):
    """``RngTracker`` under Megatron's name, with its constructor; for the accelerator, or the CPU where there is none.

    Raises ``ConfigError`` for a tracker that CUDA graphs can follow and for one for inference: those are Megatron's.
    """

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        _refuse(
            "megatron.CudaRNGStatesTracker",
            use_cudagraphable_rng=use_cudagraphable_rng,
            is_inference_rng_tracker=is_inference_rng_tracker,
        )
        super().__init__()

    def is_initialized(self) -> bool:
        """Whether a stream was added."""
        return bool(self.names)


class _Job:
    """What this process was told; Megatron keeps the same in globals."""

    def __init__(self) -> None:
        self.group: Any = None
        self.tracker: CudaRNGStatesTracker | None = None


_job = _Job()


def set_tensor_model_parallel_group(group: Any) -> None:
    """Say over which group activations are scattered: a process group, or a mesh of one dimension; None forgets it.

    Raises ``ConfigError`` if this rank is not in it.
    """
    problems = group_problem(group, "megatron.set_tensor_model_parallel_group") if group is not None else []
    if problems:
        raise ConfigError(problems)
    _job.group = group


def tensor_model_parallel_group(where: str) -> Any:
    """Return the group that was set, or Megatron's; raises ``ConfigError`` if there is neither."""
    if _job.group is not None:
        return _job.group
    found = _ask_parallel_state("get_tensor_model_parallel_group")
    if found is None:
        raise ConfigError(
            Problem(
                f"{where}.distribute_saved_activations",
                "there is no tensor-parallel group to scatter over",
                fix="call set_tensor_model_parallel_group(group), or initialise megatron.core.parallel_state",
            )
        )
    return found


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False, inference_rng_tracker: bool = False, use_cudagraphable_rng: bool = False
) -> Any:
    """Return the tracker of this process: Megatron's own where Megatron is loaded, else one of ours.

    Raises ``ConfigError`` without Megatron if another sort of tracker is asked for.
    """
    theirs = sys.modules.get("megatron.core.tensor_parallel.random")
    if theirs is not None:
        return theirs.get_cuda_rng_tracker(use_te_rng_tracker, inference_rng_tracker, use_cudagraphable_rng)
    _refuse(
        "megatron.get_cuda_rng_tracker",
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

    Where Megatron is loaded, Megatron does it. Else ``tp_rank`` is by default this rank's place in the group that was
    set, ``ep_rank`` 0, and ``etp_rank`` is ``tp_rank``, as for a job without expert parallelism.

    Raises ``ConfigError`` if no rank is known, or without Megatron if another sort of tracker is asked for.
    """
    theirs = sys.modules.get("megatron.core.tensor_parallel.random")
    if theirs is not None:
        theirs.model_parallel_cuda_manual_seed(
            seed,
            te_rng_tracker,
            inference_rng_tracker,
            use_cudagraphable_rng,
            tp_rank=tp_rank,
            ep_rank=ep_rank,
            etp_rank=etp_rank,
            force_reset_rng=force_reset_rng,
        )
        return
    where = "megatron.model_parallel_cuda_manual_seed"
    if tp_rank is None:
        if _job.group is None:
            fix = "pass tp_rank=, or call set_tensor_model_parallel_group(group) first"
            raise ConfigError(
                Problem(f"{where}.tp_rank", "the rank in the tensor-parallel group is not known", fix=fix)
            )
        tp_rank = dist.get_rank(process_group(_job.group))
    _refuse(
        where,
        te_rng_tracker=te_rng_tracker,
        inference_rng_tracker=inference_rng_tracker,
        use_cudagraphable_rng=use_cudagraphable_rng,
    )
    if force_reset_rng:
        _job.tracker = None
    seed_model_parallel(
        seed,
        tp_rank,
        ep_rank if ep_rank is not None else 0,
        etp_rank if etp_rank is not None else tp_rank,
        tracker=get_cuda_rng_tracker(),
    )


def get_data_parallel_rng_tracker_name() -> str:
    """Return the name of the stream that is the same on all tensor-parallel ranks."""
    return DATA_PARALLEL


def get_expert_parallel_rng_tracker_name() -> str:
    """Return the name of the stream of experts."""
    return EXPERT_PARALLEL


def _ask_parallel_state(question: str) -> Any:
    """Return what ``megatron.core.parallel_state`` answers, None where it is not loaded or not initialised."""
    state = sys.modules.get("megatron.core.parallel_state")
    try:
        return getattr(state, question)() if state is not None else None
    except AssertionError:  # its way of saying that nothing was initialised
        return None


def _refuse(where: str, **flags: bool) -> None:
    problems = [
        Problem(
            f"{where}.{name}", "this sort of tracker is Megatron's own", fix=f"leave {name} out, or import megatron"
        )
        for name, asked in flags.items()
        if asked
    ]
    if problems:
        raise ConfigError(problems)
