"""DeepSpeed's activation checkpointing (``deepspeed.checkpointing``), implemented with ``sac.checkpoint``.

``import sac.compat.deepspeed as checkpointing`` replaces ``from deepspeed import checkpointing``.

Intentional differences: arguments do not change for the caller, even when they are partitioned or moved to the CPU; any
number of elements can be partitioned; arguments have any structure; ``checkpoint_in_cpu`` needs no partitioning;
autocast is restored; a region keeps the settings of its call, even if they are configured differently before its
backward; an unknown key of the config is an error; a wrong configuration changes nothing.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from sac.checkpointing import run_with
from sac.compat.keywords import Keyword, options_of, raise_if
from sac.config import DEFAULT_CONFIG, CallOptions, settings_of
from sac.config_keys import CONFIG_KEYS, read_flag
from sac.engine.settings import Settings
from sac.errors import ConfigError, Problem
from sac.full import ContiguousBuffer, RngTracker
from sac.rng_tracker import MODEL_PARALLEL, checked_seed
from sac.stores.host import OnHost
from sac.stores.scatter import FirstCalls, Scattered, group_problem, process_group
from sac.stores.store import ArgumentInfo, InputStore, InputStoring, OnDevice, StoredTensor
from sac.tables import Table, screen_width
from sac.torch_private import tree_leaves, when_backward_ends

# -- The ``activation_checkpointing`` section of a DeepSpeed config, and the region settings derived from it

SECTION = "activation_checkpointing"


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The section, with DeepSpeed's keys and defaults.

    ``partition_activations``: keep each floating-point argument scattered over the model-parallel group.
    ``contiguous_memory_optimization``: in buffers of ``number_checkpoints`` slots, one buffer per argument.
    ``cpu_checkpointing``: in host memory. ``synchronize_checkpoint_boundary``: wait for the device at the beginning and
    end of a region's forward and backward. ``profile``: measure how long these take.
    """

    partition_activations: bool = False
    number_checkpoints: int | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


_COUNT = CONFIG_KEYS["num_checkpoints"].read
# The arguments of ``configure``, and the keys of the section that they are called there.
_ARGUMENTS = {
    "partition_activations": Keyword("partition_activations", read_flag),
    "contiguous_checkpointing": Keyword("contiguous_memory_optimization", read_flag),
    "num_checkpoints": Keyword("number_checkpoints", _COUNT),
    "checkpoint_in_cpu": Keyword("cpu_checkpointing", read_flag),
    "synchronize": Keyword("synchronize_checkpoint_boundary", read_flag),
    "profile": Keyword("profile", read_flag),
}
_SECTION = {keyword.ours: keyword for keyword in _ARGUMENTS.values()}
KEYS = tuple(one.name for one in fields(ActivationCheckpointing))


def _read_section(source: Any) -> ActivationCheckpointing:
    """Return the section of a whole DeepSpeed config: a mapping, or the path of a JSON file.

    Missing keys have their defaults. Raises ``ConfigError`` with all problems.
    """
    if isinstance(source, (str, os.PathLike)):
        return _section_of(_read_json(Path(source)), str(Path(source)))
    return _section_of(source, "deepspeed_config")


def _section_of(config: Any, where: str) -> ActivationCheckpointing:
    section = config.get(SECTION, {}) if isinstance(config, Mapping) else config
    if not isinstance(section, Mapping):
        place = f"{where}.{SECTION}" if isinstance(config, Mapping) else where
        raise ConfigError(Problem(place, f"it is a {type(section).__name__}", expected="a mapping"))
    strays = [key for key in config if key in KEYS]
    if strays:
        fix = f"put it into {SECTION}"
        raise ConfigError([Problem(f"{where}.{key}", f"it is outside of {SECTION}", fix=fix) for key in strays])
    options, problems = options_of(section, _SECTION, f"{where}.{SECTION}", legal=KEYS)
    raise_if(problems)
    return ActivationCheckpointing(**options)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(Problem(str(path), f"it cannot be read: {error.strerror}")) from error
    except ValueError as error:
        raise ConfigError(Problem(str(path), f"it is not JSON: {error}")) from error


def _contradictions(section: ActivationCheckpointing) -> list[Problem]:
    """Return the contradictions between values of the section."""
    where, problems = f"{_NAME}.contiguous_checkpointing", []
    if section.contiguous_memory_optimization and not section.partition_activations:
        found = "contiguous buffers hold partitioned activations, but partitioning is off"
        problems.append(Problem(where, found, fix="set partition_activations too"))
    if section.contiguous_memory_optimization and section.number_checkpoints is None:
        found = "contiguous buffers need the number of layers whose checkpoints they hold"
        problems.append(Problem(where, found, fix="give num_checkpoints (number_checkpoints in a file)"))
    return problems


def _ask(mpu: Any, what: str) -> Any:
    """Return the ``rank``, ``group`` or ``world_size`` of an ``mpu`` object."""
    names = (f"get_tensor_model_parallel_{what}", f"get_slice_parallel_{what}", f"get_model_parallel_{what}")
    return next(getattr(mpu, name) for name in names if hasattr(mpu, name))()


def _mpu_problems(mpu: Any, section: ActivationCheckpointing, where: str) -> list[Problem]:
    """Return the problems of an ``mpu`` object: missing methods, and its group if that is needed."""
    if mpu is None:
        return []
    forms = ("get_tensor_model_parallel_", "get_slice_parallel_", "get_model_parallel_")
    asked = ("rank", "group", "world_size")
    missing = [what for what in asked if not any(hasattr(mpu, form + what) for form in forms)]
    if missing:
        found = f"a {type(mpu).__name__} has no {' and no '.join(f'get_model_parallel_{what}' for what in missing)}"
        return [Problem(f"{where}.mpu_", found, fix="add it; get_tensor_model_parallel_… will do too")]
    if not section.partition_activations or _ask(mpu, "world_size") == 1:
        return []
    return [replace(problem, where=f"{where}.mpu_") for problem in group_problem(_ask(mpu, "group"), where)]


def _storing(section: ActivationCheckpointing, mpu: Any) -> InputStoring | None:
    """Return how regions store their inputs under this section; None if the caller holds them."""
    store: InputStore | None = OnHost() if section.cpu_checkpointing else None
    if section.partition_activations:
        if section.contiguous_memory_optimization and section.number_checkpoints is not None:
            store = SlotsByArgument(section.number_checkpoints, on_host=section.cpu_checkpointing)
        if mpu is not None and _ask(mpu, "world_size") > 1:
            store = Scattered.over(process_group(_ask(mpu, "group")), store or OnDevice(), FirstCalls()) or store
    return InputStoring(store, _is_activation) if store is not None else None


def _is_activation(position: int, tensor: torch.Tensor) -> bool:
    """Return whether an argument is stored elsewhere; ``no_checkpointing = True`` on a tensor prevents it."""
    return tensor.is_floating_point() and not getattr(tensor, "no_checkpointing", False)


class SlotsByArgument(InputStore):
    """One contiguous buffer per argument: sizes differ between arguments, but not between equal layers."""

    def __init__(self, num_checkpoints: int, *, on_host: bool) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host
        self._buffers: dict[str, ContiguousBuffer] = {}

    def put(self, flat: torch.Tensor, name: ArgumentInfo) -> StoredTensor:
        """Copy ``flat`` into a free slot of its argument's buffer."""
        buffer = self._buffers.setdefault(name(), ContiguousBuffer(self.num_checkpoints, on_host=self.on_host))
        return buffer.put(flat, name)

    def describe(self) -> str:
        """Describe where inputs are kept."""
        return f"in buffers of {self.num_checkpoints} slots{' in host memory' if self.on_host else ''}"

    def reset(self) -> None:
        """Free every slot."""
        for buffer in self._buffers.values():
            buffer.reset()


# -- Region boundaries in forward and backward: waiting for the device, and measuring the time between

_log = logging.getLogger("sac.deepspeed")

# Note [Region boundaries in backward]
#
# A region's backward begins right before the first of the graph nodes that produced its outputs runs. It ends when all
# its inputs that get a gradient in this backward have theirs. If there are no such inputs, and at the latest, it ends
# with the whole backward. Hooks on the inputs would stay on a leaf forever, so they are removed together with the graph
# of the outputs.


def synchronize_device() -> None:
    """Wait for all work on the current accelerator, if there is one."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


@dataclass(slots=True)
class Boundaries:
    """Actions at the boundaries of regions: wait for the device, and measure if ``measures``.

    ``times``: by the name of the region's function and the pass, the milliseconds that each took.
    """

    measures: bool = False
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def run(self, name: str, region: Callable[[], Any], inputs: Any) -> Any:
        """Run and measure ``region``, which reads ``inputs``; return its result."""
        started = _now()
        output = region()
        self.note(name, "forward", started)
        if torch.is_grad_enabled():
            backward = _Backward(self, name)
            for node in {output.grad_fn for output in _differentiable(output)} - {None}:
                node.register_prehook(backward.begin)  # type: ignore[union-attr]
            if differentiable := _differentiable(inputs):
                reference = weakref.ref(backward)
                backward.handle = register_multi_grad_hook(differentiable, lambda grads: _end(reference))
        return output

    def note(self, name: str, phase: str, started: float) -> None:
        """Wait for the device, and record one pass; a backward includes recomputation."""
        took = (_now() - started) * 1e3
        if self.measures:
            self.times.setdefault(name, {"forward": [], "backward": []})[phase].append(took)
            _log.info("%s: %s %.3f ms", name, phase, took)


def _now() -> float:
    synchronize_device()
    return time.perf_counter()


def _differentiable(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _end(reference: weakref.ref[_Backward]) -> None:
    backward = reference()
    if backward is not None:
        backward.end()


class _Backward:
    """One region's backward, which may run repeatedly; lives as long as the graph nodes of the region's outputs."""

    def __init__(self, boundaries: Boundaries, name: str) -> None:
        self.boundaries, self.name = boundaries, name
        self.handle: Any = None
        self._started: float | None = None

    def begin(self, grads: Any) -> None:
        """A node of the region's outputs is about to run."""
        if self._started is None:
            self._started = _now()
            when_backward_ends(self.end)

    def end(self) -> None:
        """The region's backward is over."""
        if self._started is not None:
            started, self._started = self._started, None
            self.boundaries.note(self.name, "backward", started)

    def __del__(self) -> None:
        if self.handle is not None:
            self.handle.remove()


# -- DeepSpeed's activation checkpointing (``deepspeed.checkpointing``), implemented with ``sac.checkpoint``

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
    """Configure how regions that begin from now on keep their inputs. Each call starts from the defaults.

    ``mpu_``: an object with ``get_model_parallel_rank``, ``_group`` and ``_world_size`` (or
    ``get_tensor_model_parallel_…``); None keeps the one of an earlier call. ``deepspeed_config``: a mapping, or the
    path of a JSON file; see ``ActivationCheckpointing``. The other arguments take precedence over it.

    Raises ``ConfigError`` with all problems; then nothing has changed.
    """
    section = _read_section(deepspeed_config) if deepspeed_config is not None else ActivationCheckpointing()
    values = (
        partition_activations, contiguous_checkpointing, num_checkpoints, checkpoint_in_cpu, synchronize, profile,
    )  # fmt: skip
    given = {name: value for name, value in zip(_ARGUMENTS, values, strict=True) if value is not None}
    options, problems = options_of(given, _ARGUMENTS, _NAME)
    raise_if(problems)
    section = replace(section, **options)
    mpu = mpu_ if mpu_ is not None else _process.mpu
    raise_if([*_contradictions(section), *_mpu_problems(mpu, section, _NAME)])
    _process.take(section, mpu)
    _process.is_configured = True


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _process.is_configured


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn ``partition_activations`` on or off; raises ``ConfigError`` as ``configure`` does."""
    where = "deepspeed.partition_activations_in_checkpoint"
    section = replace(_process.section, partition_activations=read_flag(partition_activation, where))
    raise_if(_mpu_problems(_process.mpu, section, where))
    _process.take(section, _process.mpu)


def set_num_layers(nlayers: int) -> None:
    """Set how many checkpoints contiguous buffers hold; raises ``ConfigError`` if ``nlayers`` is not such a number."""
    count = _COUNT(nlayers, "deepspeed.set_num_layers")
    _process.take(replace(_process.section, number_checkpoints=count), _process.mpu)


def reset() -> None:
    """Free every slot of the contiguous buffers, for example after forwards whose backward will never run."""
    keeping = _process.settings.input_storing
    placement = getattr(keeping, "store", None)
    slots = getattr(placement, "inner", placement)
    if isinstance(slots, SlotsByArgument):
        slots.reset()


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


def profile_table() -> str:
    """Return a table of each region's runs since ``configure``, and the times of its forward and backward."""
    columns = ("region", "forwards", "ms per forward", "backwards", "ms per backward")
    rows = []
    for name, passes in _process.boundaries.times.items():
        figures = [(str(len(took)), f"{sum(took) / max(len(took), 1):.3f}") for took in passes.values()]
        rows.append((name, *figures[0], *figures[1]))
    return Table(columns, tuple(rows), right=columns[1:]).text(screen_width())


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    theirs = sys.modules.get(_THEIRS)
    if theirs is not None:  # DeepSpeed's own layers fork its tracker
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


_process = _Process()
