"""DeepSpeed's activation checkpointing (``deepspeed.checkpointing``), implemented with ``sac.checkpoint``.

``import sac.compat.deepspeed as checkpointing`` replaces ``from deepspeed import checkpointing``.

Differences: arguments do not change for the caller, have any structure and any number of elements; autocast is
restored; a region keeps the settings of its call; ``checkpoint_in_cpu`` needs no partitioning; an unknown key of the
config is an error; a wrong configuration changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from sac.checkpointing import run_with
from sac.compat.keywords import raise_if, read_keywords
from sac.config import DEFAULT_CONFIG, CallOptions, settings_of
from sac.config_keys import CONFIG_KEYS, read_flag
from sac.engine.settings import Settings
from sac.errors import ConfigError, Problem
from sac.full import ContiguousBuffer, RngTracker
from sac.rng_tracker import MODEL_PARALLEL, checked_seed
from sac.stores.scatter import FirstCalls, Scattered, group_problem, process_group
from sac.stores.store import InputStore, InputStoring, OnDevice, OnHost
from sac.torch_private import tree_leaves, when_backward_ends

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
    "reset",
    "set_num_layers",
]

CudaRNGStatesTracker = RngTracker

SECTION = "activation_checkpointing"
_NAME = "deepspeed.configure"
_THEIRS = "deepspeed.runtime.activation_checkpointing.checkpointing"
_log = logging.getLogger("sac.deepspeed")


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The ``activation_checkpointing`` section of a DeepSpeed config, with DeepSpeed's keys and defaults.

    ``partition_activations``: keep each floating-point argument scattered over the model-parallel group.
    ``contiguous_memory_optimization``: in buffers of ``number_checkpoints`` slots, one buffer per argument.
    ``cpu_checkpointing``: in host memory, without slots. ``synchronize_checkpoint_boundary``: wait for the device at
    the beginning and end of a region's forward and backward. ``profile``: log how long these take, to the logger
    ``sac.deepspeed``.
    """

    partition_activations: bool = False
    number_checkpoints: int | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


_COUNT = CONFIG_KEYS["num_checkpoints"].read
# The arguments of ``configure``, with their keys in the section.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}
_ARGUMENTS = {name: _COUNT if name == "num_checkpoints" else read_flag for name in _KEYS}
_SECTION = {_KEYS[name]: reader for name, reader in _ARGUMENTS.items()}


def _read_section(source: Any) -> dict[str, Any]:
    """Return the section of a whole DeepSpeed config: a mapping, or the path of a JSON file."""
    config, where = source, "deepspeed_config"
    if isinstance(source, (str, os.PathLike)):
        where = str(Path(source))
        try:
            config = json.loads(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(Problem(where, f"it cannot be read: {error.strerror}")) from error
        except ValueError as error:
            raise ConfigError(Problem(where, f"it is not JSON: {error}")) from error
    section = _mapping(_mapping(config, where).get(SECTION, {}), f"{where}.{SECTION}")
    fix = f"put it into {SECTION}"
    raise_if([Problem(f"{where}.{key}", f"it is outside of {SECTION}", fix=fix) for key in config if key in _SECTION])
    return read_keywords(section, _SECTION, f"{where}.{SECTION}")


def _mapping(value: Any, place: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(Problem(place, f"it is a {type(value).__name__}", expected="a mapping"))
    return value


def _problems_of(section: ActivationCheckpointing, mpu: Any, where: str) -> list[Problem]:
    """Return the contradictions in the section, and what is wrong with the ``mpu`` object."""
    place, problems = f"{where}.contiguous_checkpointing", []
    if section.contiguous_memory_optimization and not section.partition_activations:
        found = "contiguous buffers hold partitioned activations, but partitioning is off"
        problems.append(Problem(place, found, fix="set partition_activations too"))
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        found = "contiguous buffers need the number of layers whose checkpoints they hold"
        problems.append(Problem(place, found, fix="give num_checkpoints (number_checkpoints in a file)"))
    if mpu is None:
        return problems
    missing = [f"get_model_parallel_{what}" for what in ("rank", "group", "world_size") if not _methods(mpu, what)]
    if missing:
        found = f"a {type(mpu).__name__} has no {' and no '.join(missing)}"
        problems.append(Problem(f"{where}.mpu_", found, fix="add it; get_tensor_model_parallel_… will do too"))
    elif section.partition_activations and _ask(mpu, "world_size") > 1:
        problems += [replace(one, where=f"{where}.mpu_") for one in group_problem(_ask(mpu, "group"), where)]
    return problems


def _methods(mpu: Any, what: str) -> list[Callable[[], Any]]:
    names = (f"get_tensor_model_parallel_{what}", f"get_slice_parallel_{what}", f"get_model_parallel_{what}")
    return [getattr(mpu, name) for name in names if hasattr(mpu, name)]


def _ask(mpu: Any, what: str) -> Any:
    """Return the ``rank``, ``group`` or ``world_size`` of an ``mpu`` object, which ``configure`` has checked."""
    return _methods(mpu, what)[0]()


def _storing(section: ActivationCheckpointing, mpu: Any) -> InputStoring | None:
    """Return how regions store their inputs under this section; None if the caller holds them."""
    store: InputStore | None = OnHost() if section.cpu_checkpointing else None
    if section.partition_activations:
        if store is None and section.contiguous_memory_optimization and section.number_checkpoints is not None:
            store = ContiguousBuffer(section.number_checkpoints)
        if mpu is not None and _ask(mpu, "world_size") > 1:
            store = Scattered.over(process_group(_ask(mpu, "group")), store or OnDevice(), FirstCalls()) or store
    return InputStoring(store, _is_activation) if store is not None else None


def _is_activation(position: int, tensor: torch.Tensor) -> bool:
    """Return whether an argument is stored elsewhere; ``no_checkpointing = True`` on a tensor prevents it."""
    return tensor.is_floating_point() and not getattr(tensor, "no_checkpointing", False)


class _Process:
    """The configuration of this process, which DeepSpeed keeps in globals. It is replaced as a whole, never in part."""

    def __init__(self) -> None:
        self.is_configured = False
        self.tracker: RngTracker | None = None
        self.take(ActivationCheckpointing(), None)

    def take(self, section: ActivationCheckpointing, mpu: Any) -> None:
        """Apply ``section`` to regions that begin from now on."""
        options = CallOptions(use_reentrant=True, get_rng_state_tracker=get_cuda_rng_tracker)
        settings = replace(settings_of(DEFAULT_CONFIG, options, _NAME), input_storing=_storing(section, mpu))
        self.section, self.mpu, self.settings = section, mpu, settings


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
    """Configure how regions that begin from now on keep their inputs. Each call starts from the defaults.

    ``mpu_``: an object with ``get_model_parallel_rank``, ``_group`` and ``_world_size`` (or
    ``get_tensor_model_parallel_…``); None keeps the one of an earlier call. ``deepspeed_config``: a mapping, or the
    path of a JSON file; see ``ActivationCheckpointing``. The other arguments take precedence over it.

    Raises ``ConfigError`` with all problems; then nothing has changed.
    """
    section = _read_section(deepspeed_config) if deepspeed_config is not None else {}
    values = (
        partition_activations, contiguous_checkpointing, num_checkpoints, checkpoint_in_cpu, synchronize, profile,
    )  # fmt: skip
    given = {name: value for name, value in zip(_KEYS, values, strict=True) if value is not None}
    options = {_KEYS[name]: value for name, value in read_keywords(given, _ARGUMENTS, _NAME).items()}
    _take(section | options, mpu_, _NAME, ActivationCheckpointing())
    _process.is_configured = True


def _take(changes: Mapping[str, Any], mpu: Any, where: str, section: ActivationCheckpointing) -> None:
    section, mpu = replace(section, **changes), mpu if mpu is not None else _process.mpu
    raise_if(_problems_of(section, mpu, where))
    _process.take(section, mpu)


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _process.is_configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn ``partition_activations`` on or off; raises ``ConfigError`` as ``configure`` does."""
    where = "deepspeed.partition_activations_in_checkpoint"
    _take({"partition_activations": read_flag(partition_activation, where)}, None, where, _process.section)


def set_num_layers(nlayers: int) -> None:
    """Set how many checkpoints contiguous buffers hold; raises ``ConfigError`` if ``nlayers`` is not such a number."""
    where = "deepspeed.set_num_layers"
    _take({"number_checkpoints": _COUNT(nlayers, where)}, None, where, _process.section)


def reset() -> None:
    """Free every slot of the contiguous buffers, for example after forwards whose backward will never run."""
    store = getattr(_process.settings.input_storing, "store", None)
    buffer = getattr(store, "inner", store)
    if isinstance(buffer, ContiguousBuffer):
        buffer.reset()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function(*args, **kwargs)`` as a reentrant region that is recomputed in backward; return its result.

    As in DeepSpeed, a tuple or list with one element is returned as that element, and a longer list as a tuple.

    Raises ``RegionError`` if a contiguous buffer is full or does not fit, and in backward as ``sac.checkpoint`` does.
    """
    return _single(_run(function, args, kwargs, _process.settings))


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` as ``checkpoint`` does, but as a non-reentrant region, which is the recommended mode."""
    return _single(_run(function, args, {}, replace(_process.settings, use_reentrant=False)))


class CheckpointFunction:
    """``CheckpointFunction.apply``, which DeepSpeed's own code calls."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Run ``run_function(*args)`` as ``checkpoint``, append its results to ``all_outputs``, return the tensors."""
        output = _run(run_function, args, {}, _process.settings)
        results = list(output) if isinstance(output, (tuple, list)) else [output]
        all_outputs += results
        return output if isinstance(output, torch.Tensor) else tuple(filter(torch.is_tensor, results))


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    theirs = sys.modules.get(_THEIRS)
    if theirs is not None:  # DeepSpeed's own layers fork its tracker
        settings = replace(settings, trackers=(*settings.trackers, theirs.get_cuda_rng_tracker))
    section = _process.section
    if not section.synchronize_checkpoint_boundary and not section.profile:
        return run_with(settings, function, args, kwargs)
    name = getattr(function, "__qualname__", type(function).__name__)
    note = partial(_note, name if section.profile else "")
    started = _now()
    output = run_with(settings, function, args, kwargs)
    note("forward", started)
    if torch.is_grad_enabled():
        _Backward(partial(note, "backward"), _differentiable(output), _differentiable((args, kwargs)))
    return output


def _single(output: Any) -> Any:
    if type(output) not in (tuple, list):
        return output
    return output[0] if len(output) == 1 else tuple(output)


# -- Seeds


def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker of this process, for the accelerator if there is one, else for the CPU."""
    if _process.tracker is None:
        _process.tracker = RngTracker()
    return _process.tracker


def _seeds(seed: int, where: str) -> tuple[int, int]:
    """Return the seeds of the default generator and of ``model-parallel-rng`` on this rank."""
    rank = 0 if _process.mpu is None else int(_ask(_process.mpu, "rank"))
    first = checked_seed(seed, where)
    return first, checked_seed(first + 2718 + rank, where)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Continue ``model-parallel-rng`` from ``seed + 2718 + rank``.

    Raises ``ConfigError`` if ``seed`` is not a seed, or if the stream does not exist yet.
    """
    _, second = _seeds(seed, "deepspeed.model_parallel_reconfigure_tp_seed")
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        tracker.generator.manual_seed(second)


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with ``seed``, and the stream ``model-parallel-rng`` with ``seed + 2718 + rank``.

    ``rank`` is this rank's position in the model-parallel group of the configured ``mpu_``, 0 without one. Other
    streams are removed. Raises ``ConfigError`` if ``seed`` is not a seed.
    """
    first, second = _seeds(seed, "deepspeed.model_parallel_cuda_manual_seed")
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.generator.manual_seed(first)
    tracker.add(MODEL_PARALLEL, second)


# -- `synchronize` and `profile`: waiting at the boundaries of regions, and the time between


def synchronize_device() -> None:
    """Wait for all work on the current accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _now() -> float:
    synchronize_device()
    return time.perf_counter()


def _note(name: str, phase: str, started: float) -> None:
    """Wait; log how long a pass of a region has taken if it has a ``name``."""
    took = (_now() - started) * 1e3
    if name:
        _log.info("%s: %s %.3f ms", name, phase, took)


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


class _Backward:
    """One region's backward, which may run repeatedly, from the first graph node of its outputs.

    It ends when all inputs have their gradients, at the latest with the whole backward; it includes recomputation. The
    hook on the inputs, which may be leaves that live on, is removed with the graph of the outputs, which holds this.
    """

    def __init__(self, note: Callable[[float], None], outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        self.note = note
        self.hook: Any = None
        self.started: float | None = None
        for node in {tensor.grad_fn for tensor in outputs} - {None}:
            node.register_prehook(self.begin)  # type: ignore[union-attr]
        if inputs:
            end = weakref.WeakMethod(self.end)
            self.hook = register_multi_grad_hook(inputs, lambda grads: (call := end()) and call())

    def begin(self, grads: Any) -> None:
        if self.started is None:
            self.started = _now()
            when_backward_ends(self.end)

    def end(self) -> None:
        if self.started is not None:
            started, self.started = self.started, None
            self.note(started)

    def __del__(self) -> None:
        if self.hook is not None:
            self.hook.remove()


_process = _Process()
