"""DeepSpeed's activation checkpointing (``deepspeed.checkpointing``), carried out by ``sac.checkpoint``.

``import sac.compat.deepspeed as checkpointing`` takes the place of ``from deepspeed import checkpointing``.

What is different, each on purpose: arguments stay what they are for the caller, also when they are partitioned or moved
to the CPU; any number of elements can be partitioned; arguments have any structure; ``checkpoint_in_cpu`` needs no
partitioning; autocast is put back; a region keeps the settings that it was called with, whatever is configured before
its backward; an unknown key of the config is an error; a wrong configuration changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sac.compat.deepspeed_config import (
    ARGUMENTS,
    ActivationCheckpointing,
    SlotsByArgument,
    contradictions,
    keeping_of,
    model_parallel_rank,
    mpu_problems,
    read_section,
    value_problems,
)
from sac.compat.deepspeed_profile import Boundaries, table_of
from sac.errors import ConfigError, Problem
from sac.full import RngTracker
from sac.full.checkpoint import run_with
from sac.full.full_config import DEFAULT_CONFIG, CallOptions, settings_of
from sac.full.rng_tracker import MODEL_PARALLEL, checked_seed
from sac.region.settings import Settings

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "profile_table",
    "reset",
    "set_num_layers",
]

CudaRNGStatesTracker = RngTracker

_NAME = "deepspeed.configure"
_THEIRS = "deepspeed.runtime.activation_checkpointing.checkpointing"


class _Process:
    """What this process has configured; DeepSpeed keeps the same in globals. Exchanged as a whole, never half."""

    def __init__(self) -> None:
        self.is_configured = False
        self.tracker: RngTracker | None = None
        self.take(ActivationCheckpointing(), None)

    def take(self, section: ActivationCheckpointing, mpu: Any) -> None:
        """Let regions that begin from now on follow ``section``."""
        options = CallOptions(use_reentrant=True, get_rng_state_tracker=get_cuda_rng_tracker)
        settings = replace(settings_of(DEFAULT_CONFIG, options, _NAME), keeping=keeping_of(section, mpu))
        self.section, self.mpu, self.settings = section, mpu, settings
        self.boundaries = Boundaries(measures=section.profile)


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how regions that begin from now on keep their inputs. Each call begins with the defaults: nothing of it.

    ``mpu_``: an object with ``get_model_parallel_rank``, ``_group`` and ``_world_size`` (or
    ``get_tensor_model_parallel_…``); None leaves the one of an earlier call. ``deepspeed_config``: a mapping, the path
    of a JSON file, or an object with the keys of ``activation_checkpointing`` as attributes; see
    ``ActivationCheckpointing``. The other arguments win over it.

    Raises ``ConfigError`` with all that is wrong; then nothing has changed.
    """
    section = read_section(deepspeed_config) if deepspeed_config is not None else ActivationCheckpointing()
    written = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "num_checkpoints": num_checkpoints,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    given = {name: value for name, value in written.items() if value is not None}
    _raise_if(
        [one for name, value in given.items() for one in value_problems(f"{_NAME}.{name}", ARGUMENTS[name], value)]
    )
    values: dict[str, Any] = {ARGUMENTS[name]: value for name, value in given.items()}
    section = replace(section, **values)
    mpu = mpu_ if mpu_ is not None else _process.mpu
    _raise_if([*contradictions(section, _NAME), *mpu_problems(mpu, section, _NAME)])
    _process.take(section, mpu)
    _process.is_configured = True


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _process.is_configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn ``partition_activations`` on or off; raises ``ConfigError`` as ``configure``."""
    where = "deepspeed.partition_activations_in_checkpoint"
    _raise_if(value_problems(where, "partition_activations", partition_activation))
    section = replace(_process.section, partition_activations=partition_activation)
    _raise_if(mpu_problems(_process.mpu, section, where))
    _process.take(section, _process.mpu)


def set_num_layers(nlayers: int) -> None:
    """Set how many checkpoints contiguous buffers hold; raises ``ConfigError`` if it is no number of them."""
    _raise_if(value_problems("deepspeed.set_num_layers", "number_checkpoints", nlayers))
    _process.take(replace(_process.section, number_checkpoints=nlayers), _process.mpu)


def reset() -> None:
    """Take every slot of the contiguous buffers back, as after forwards whose backward will never run."""
    keeping = _process.settings.keeping
    placement = getattr(keeping, "placement", None)
    slots = getattr(placement, "inner", placement)
    if isinstance(slots, SlotsByArgument):
        slots.reset()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` as a reentrant region that is recomputed in backward; return its result.

    As there, a tuple or list of one comes back as that one, and a longer list as a tuple.

    Raises ``RegionError`` where a contiguous buffer is full or does not fit, and in backward as ``sac.checkpoint``.
    """
    return _single(_run(function, args, kwargs, _process.settings))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` as ``checkpoint`` does, as a region that is not reentrant: the mode to choose."""
    return _single(_run(function, args, {}, replace(_process.settings, use_reentrant=False)))


class CheckpointFunction:
    """``CheckpointFunction.apply``, which DeepSpeed's own code calls."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Run ``run_function(*args)`` as ``checkpoint`` does, append its results to ``all_outputs``, return tensors."""
        output = _run(run_function, args, {}, _process.settings)
        results = list(output) if isinstance(output, (tuple, list)) else [output]
        all_outputs += results
        return output if isinstance(output, torch.Tensor) else tuple(filter(torch.is_tensor, results))


def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker of this process, for the accelerator, or the CPU where there is none."""
    if _process.tracker is None:
        _process.tracker = RngTracker()
    return _process.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with ``seed``, and the stream ``model-parallel-rng`` with ``seed + 2718 + rank``.

    ``rank`` is this rank's place in the model-parallel group of the ``mpu_`` that was configured, 0 without one. Other
    streams are forgotten. Raises ``ConfigError`` if it is no seed.
    """
    seeds = _checked_seeds(seed, "deepspeed.model_parallel_cuda_manual_seed")
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.generator.manual_seed(seeds[0])
    tracker.add(MODEL_PARALLEL, seeds[1])


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Let ``model-parallel-rng`` go on from ``seed + 2718 + rank``.

    Raises ``ConfigError`` if it is no seed, or there is no such stream yet.
    """
    seeds = _checked_seeds(seed, "deepspeed.model_parallel_reconfigure_tp_seed")
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        tracker.generator.manual_seed(seeds[1])


def profile_table() -> str:
    """Return how often each region ran since ``configure``, and how long its forward and backward took, as a table."""
    return table_of(_process.boundaries.times)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    theirs = sys.modules.get(_THEIRS)
    if theirs is not None:  # layers of DeepSpeed's own fork its tracker
        settings = replace(settings, trackers=(*settings.trackers, theirs.get_cuda_rng_tracker))
    section = _process.section
    if not section.synchronize_checkpoint_boundary and not section.profile:
        return run_with(settings, function, args, kwargs)
    name = getattr(function, "__qualname__", type(function).__name__)
    return _process.boundaries.run(name, partial(run_with, settings, function, args, kwargs), (args, kwargs))


def _single(output: Any) -> Any:
    if type(output) not in (tuple, list):
        return output
    return output[0] if len(output) == 1 else tuple(output)


def _checked_seeds(seed: Any, where: str) -> tuple[int, int]:
    first = checked_seed(seed, where)
    return first, checked_seed(first + 2718 + model_parallel_rank(_process.mpu), where)


def _raise_if(problems: list[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


_process = _Process()
