"""The seeds of a model-parallel job."""

from __future__ import annotations

from typing import Any

import torch

from sac.full.rng_tracker import (
    MODEL_PARALLEL,
    RngTracker,
    checked_seed,
    config_error,
    device_of,
    whole_number,
)

DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"


def seed_model_parallel(
    seed: int,
    tp_rank: int = 0,
    ep_rank: int = 0,
    etp_rank: int = 0,
    *,
    tracker: RngTracker | None = None,
    device: torch.device | str | None = None,
) -> RngTracker:
    """Seed the default generator and the three named streams of a model-parallel job; return their tracker.

    The default generator of the tracker's device and ``data-parallel-rng`` get ``seed``: the same numbers on all ranks
    that have the same seed. ``model-parallel-rng`` gets ``seed + 2718 + tp_rank`` and ``expert-parallel-rng`` gets
    ``seed + 1024 + 100 * ep_rank + etp_rank``. ``tp_rank``, ``ep_rank`` and ``etp_rank`` are this rank's places in its
    tensor-, expert- and expert-tensor-parallel groups. The formula is that of Megatron-Core's
    ``model_parallel_cuda_manual_seed``. As there, the CPU's generator is left alone where the device is another one.

    ``tracker`` is reset; None makes one for ``device`` (by default as in ``RngTracker``).

    Raises ``ConfigError``, before anything is changed, if an argument is no seed or no rank, or two streams would have
    the same seed.
    """
    where = "seed_model_parallel"
    if tracker is not None and device is not None and device_of(device) != tracker.device:
        raise config_error(
            where, f"device {device} is not that of the tracker, {tracker.device}", fix="leave device out"
        )
    tp, ep, etp = (
        _checked_rank(rank, f"{where}.{key}")
        for key, rank in (("tp_rank", tp_rank), ("ep_rank", ep_rank), ("etp_rank", etp_rank))
    )
    first = checked_seed(seed, where)
    seeds = {
        DATA_PARALLEL: first,
        MODEL_PARALLEL: first + 2718 + tp,
        EXPERT_PARALLEL: first + 1024 + 100 * ep + etp,
    }
    for name, one in seeds.items():
        checked_seed(one, f"{where}: {name}")
    if seeds[MODEL_PARALLEL] == seeds[EXPERT_PARALLEL]:
        raise config_error(
            where,
            f"{MODEL_PARALLEL} and {EXPERT_PARALLEL} of this rank would both have seed {seeds[MODEL_PARALLEL]} "
            f"(tp_rank {tp}, ep_rank {ep}, etp_rank {etp})",
            fix="seed the default generator and add the streams yourself, with seeds of your own",
        )
    tracker = tracker if tracker is not None else RngTracker(device)
    tracker.reset()
    tracker.generator.manual_seed(first)
    for name, one in seeds.items():
        tracker.add(name, one)
    return tracker


def _checked_rank(rank: Any, where: str) -> int:
    whole = whole_number(rank)
    if whole is None or whole < 0:
        raise config_error(where, f"{rank!r} is not a rank", expected="a whole number from 0 on")
    return whole
