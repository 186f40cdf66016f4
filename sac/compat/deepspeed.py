"""DeepSpeed's activation checkpointing (``deepspeed.checkpointing``), implemented with ``sac.checkpoint``.

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
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from sac.checkpointing import run_with
from sac.config import DEFAULT_CONFIG, FullConfig, refuse, settings_of
from sac.config_keys import CONFIG_KEYS, read_keys
from sac.engine.settings import Settings
from sac.errors import ConfigError, Problem
from sac.rng_tracker import CudaRNGStatesTracker, seed_model_parallel
from sac.rng_tracker import process_tracker as get_cuda_rng_tracker
from sac.torch_private import tree_leaves, when_backward_ends

__all__ = [
    "CheckpointFunction", "CudaRNGStatesTracker", "checkpoint", "configure", "get_cuda_rng_tracker", "is_configured",
    "model_parallel_cuda_manual_seed", "non_reentrant_checkpoint", "reset",
]  # fmt: skip

_NAME = "deepspeed.configure"
_OPTIONS: dict[str, Any] = {"use_reentrant": True, "get_rng_state_tracker": get_cuda_rng_tracker}

# The configuration of this process, which DeepSpeed keeps in globals; `flags` are arguments of `configure`.
_PLAIN = settings_of(DEFAULT_CONFIG, _NAME, **_OPTIONS)
_process = SimpleNamespace(settings=_PLAIN, config=DEFAULT_CONFIG, flags={}, mpu=None)

# The keys in the section of a config file, with the arguments of ``configure``.
_KEYS = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}
_READERS = dict.fromkeys(_KEYS.values(), CONFIG_KEYS["strict"]) | {"num_checkpoints": CONFIG_KEYS["num_checkpoints"]}


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
    path of a JSON file, with DeepSpeed's keys in the section ``activation_checkpointing``. The other arguments take
    precedence over it.

    ``partition_activations``: keep each floating-point argument scattered over the model-parallel group.
    ``contiguous_checkpointing``: in buffers of ``num_checkpoints`` slots, one buffer per argument.
    ``checkpoint_in_cpu``: in host memory. ``synchronize``: wait for the device at the beginning and end of a region's
    forward and backward. ``profile``: log how long these take, to the logger ``sac.deepspeed``.

    Raises ``ConfigError``; then nothing has changed.
    """
    given = {name: value for name, value in locals().items() if name in _READERS and value is not None}
    flags = _section_of(deepspeed_config) | read_keys(given, _NAME, _READERS)
    count = flags.pop("num_checkpoints", None)
    mpu, options = mpu_ if mpu_ is not None else _process.mpu, _OPTIONS
    if mpu is not None and _ask(mpu, "world_size") > 1 and flags.get("partition_activations"):
        options = options | {"distribute_saved_activations": True, "tp_group": _ask(mpu, "group")}
    words = {"host": "checkpoint_in_cpu", "contiguous": "contiguous_checkpointing"}
    store = "+".join(word for word, name in words.items() if flags.get(name)) or "whole"
    config = FullConfig(_is_activation, store, num_checkpoints=count if "contiguous" in store else None)
    settings = settings_of(config, _NAME, **options)
    vars(_process).update(settings=settings, config=config, flags=flags, mpu=mpu)


def _section_of(config: Any) -> dict[str, Any]:
    """Return the values in the section of a whole DeepSpeed config, a mapping or the path of a JSON file."""
    config, where = {} if config is None else config, "deepspeed_config"
    if isinstance(config, (str, os.PathLike)):
        where = os.fspath(config)
        try:
            config = json.loads(Path(where).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(Problem(where, f"it cannot be read as JSON: {error}")) from error
    section = config.get("activation_checkpointing", {}) if isinstance(config, Mapping) else config
    readers = {key: _READERS[name] for key, name in _KEYS.items()}
    values = read_keys(section, f"{where}: activation_checkpointing", readers)
    return {_KEYS[key]: value for key, value in values.items()}


def _ask(mpu: Any, what: str) -> Any:
    """Return the ``rank``, ``group`` or ``world_size`` of an ``mpu`` object; raises ``ConfigError`` if it has none."""
    names = (f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "slice", "model"))
    method: Any = next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)
    found, fix = f"a {type(mpu).__name__} has no get_model_parallel_{what}", "add it, or get_tensor_model_parallel_…"
    refuse([(method is None, "mpu_", found, fix)], _NAME)
    return method()


def _is_activation(position: int, tensor: torch.Tensor) -> bool:
    """Return whether an argument is stored elsewhere; ``no_checkpointing = True`` on a tensor prevents it."""
    return tensor.is_floating_point() and not getattr(tensor, "no_checkpointing", False)


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _process.config is not DEFAULT_CONFIG


def reset() -> None:
    """Free every slot of the contiguous buffers, for example after forwards whose backward will never run."""
    _process.config.reset()


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
        results = output if isinstance(output, (tuple, list)) else [output]
        all_outputs += results
        return output if isinstance(output, torch.Tensor) else tuple(filter(torch.is_tensor, results))


def _single(output: Any) -> Any:
    if type(output) not in (tuple, list):
        return output
    return output[0] if len(output) == 1 else tuple(output)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], settings: Settings) -> Any:
    theirs = sys.modules.get("deepspeed.runtime.activation_checkpointing.checkpointing")
    if theirs is not None:  # DeepSpeed's own layers fork its tracker
        settings = replace(settings, trackers=(*settings.trackers, theirs.get_cuda_rng_tracker))
    if not _process.flags.get("profile") and not _process.flags.get("synchronize"):
        return run_with(settings, function, args, kwargs)
    name, backward = getattr(function, "__qualname__", type(function).__name__), ExitStack()
    with _timed(f"{name}: forward"):
        output = run_with(settings, function, args, kwargs)

    # Backward takes from the first gradient of the outputs, recomputation included, until all inputs have theirs, or
    # the whole backward ends: a hook on a leaf would outlive the graph.
    def begin(grad: torch.Tensor) -> None:
        backward.enter_context(_timed(f"{name}: backward"))
        when_backward_ends(backward.close)

    register_multi_grad_hook(_computed(output), begin, mode="any")
    if sources := _computed((args, kwargs)):
        register_multi_grad_hook(sources, lambda grads: backward.close())
    return output


def _computed(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if getattr(leaf, "grad_fn", None) is not None]


@contextmanager
def _timed(name: str) -> Iterator[None]:
    """Wait for the device before and after the body; log how long it has taken, if this is asked for."""
    started = _now()
    yield
    took = (_now() - started) * 1e3
    if _process.flags.get("profile"):
        logging.getLogger("sac.deepspeed").info("%s %.3f ms", name, took)


def _now() -> float:
    """Wait for all work on the current accelerator, if there is one; return the time."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the default generator with ``seed``, and the stream ``model-parallel-rng`` with ``seed + 2718 + rank``.

    ``rank`` is this rank's position in the model-parallel group of the configured ``mpu_``, 0 without one. Other
    streams are replaced, as by ``sac.full.seed_model_parallel``. Raises ``ConfigError`` if ``seed`` is not a seed.
    """
    rank = 0 if _process.mpu is None else int(_ask(_process.mpu, "rank"))
    seed_model_parallel(seed, rank, tracker=get_cuda_rng_tracker())
