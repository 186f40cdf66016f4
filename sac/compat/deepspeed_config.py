"""The ``activation_checkpointing`` section of a DeepSpeed config, and what regions are told by it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from sac.errors import ConfigError, Problem, listing, nearest
from sac.full import ContiguousBuffer
from sac.full.checks import check_flag, problems_in
from sac.region.stores.groups import group_problem, process_group
from sac.region.stores.host import Host
from sac.region.stores.placements import Here, Keeping, Origin, Placed, Placement
from sac.region.stores.scatter import FirstCalls, Scattered

SECTION = "activation_checkpointing"


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """The section, with DeepSpeed's keys and defaults.

    ``partition_activations``: keep each floating-point argument scattered over the model-parallel group.
    ``contiguous_memory_optimization``: in buffers of ``number_checkpoints`` slots, one buffer per argument.
    ``cpu_checkpointing``: in host memory. ``synchronize_checkpoint_boundary``: wait for the device where a region's
    forward or backward begins and ends. ``profile``: measure how long they take.
    """

    partition_activations: bool = False
    number_checkpoints: int | None = None
    contiguous_memory_optimization: bool = False
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False


KEYS = tuple(one.name for one in fields(ActivationCheckpointing))
# The names that ``configure`` has for the same.
ARGUMENTS = {
    "partition_activations": "partition_activations",
    "contiguous_checkpointing": "contiguous_memory_optimization",
    "num_checkpoints": "number_checkpoints",
    "checkpoint_in_cpu": "cpu_checkpointing",
    "synchronize": "synchronize_checkpoint_boundary",
    "profile": "profile",
}


def read_section(source: Any) -> ActivationCheckpointing:
    """Return the section of a whole DeepSpeed config: a mapping, the path of a JSON file, or an object.

    An object has the keys as attributes, or has another one with them as ``activation_checkpointing_config``. What is
    not said is as by default. Raises ``ConfigError`` with all that is wrong.
    """
    if isinstance(source, (str, os.PathLike)):
        return _section_of(_read_json(Path(source)), str(Path(source)))
    if isinstance(source, Mapping):
        return _section_of(source, "deepspeed_config")
    holder = getattr(source, f"{SECTION}_config", source)
    given = {key: getattr(holder, key) for key in KEYS if hasattr(holder, key)}
    if not given:
        found = f"a {type(source).__name__} has none of the keys of {SECTION} as attributes"
        raise ConfigError(Problem("deepspeed_config", found, "a mapping, the path of a JSON file, such an object"))
    return _checked(given, "deepspeed_config")


def _section_of(config: Any, where: str) -> ActivationCheckpointing:
    if not isinstance(config, Mapping):
        raise ConfigError(Problem(where, f"it holds a {type(config).__name__}", expected="a mapping"))
    strays = [key for key in config if key in KEYS]
    if strays:
        fix = f"put it into {SECTION}"
        raise ConfigError([Problem(f"{where}.{key}", f"it stands outside of {SECTION}", fix=fix) for key in strays])
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(Problem(f"{where}.{SECTION}", f"{section!r} is no mapping", expected="a mapping"))
    return _checked(section, f"{where}.{SECTION}")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigError(Problem(str(path), f"it cannot be read: {error.strerror}")) from error
    except json.JSONDecodeError as error:
        raise ConfigError(Problem(f"{path}:{error.lineno}:{error.colno}", f"it is no JSON: {error.msg}")) from error
    except (UnicodeDecodeError, _DuplicateKeyError) as error:
        raise ConfigError(Problem(str(path), f"it is no JSON: {error}")) from error


class _DuplicateKeyError(Exception):
    """A key that stands twice in one object: Python's reader would take the last."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _DuplicateKeyError(f"key {key!r} stands twice in one object")
        found[key] = value
    return found


def _checked(given: Mapping[Any, Any], where: str) -> ActivationCheckpointing:
    problems = [problem for key, value in given.items() for problem in value_problems(f"{where}.{key}", key, value)]
    if problems:
        raise ConfigError(problems)
    return ActivationCheckpointing(**given)


def value_problems(where: str, key: Any, value: Any) -> list[Problem]:
    """Return what is wrong with a value for ``key`` of the section, or with the key."""
    if key not in KEYS:
        return [Problem(where, "it is not known", listing(KEYS), nearest(str(key), KEYS))]
    if key == "number_checkpoints":
        return [replace(problem, where=where) for problem in problems_in({"num_checkpoints": value}, "")]
    finding = check_flag(value)
    return [Problem(where, *finding)] if finding is not None else []


def contradictions(section: ActivationCheckpointing, where: str) -> list[Problem]:
    """Return which values of the section do not go together."""
    if not section.contiguous_memory_optimization:
        return []
    problems = []
    name = f"{where}.contiguous_checkpointing"
    if not section.partition_activations:
        found = "contiguous buffers hold partitioned activations, and activations are not partitioned"
        problems.append(Problem(name, found, fix="set partition_activations too"))
    if section.number_checkpoints is None:
        found = "contiguous buffers need the number of layers whose checkpoints they hold"
        fix = "give num_checkpoints (number_checkpoints in a file)"
        problems.append(Problem(name, found, fix=fix))
    return problems


def model_parallel_rank(mpu: Any) -> int:
    """Return this rank's place in the model-parallel group of an ``mpu`` object; 0 without one."""
    ask = None if mpu is None else _question(mpu, "rank")
    return int(ask()) if ask is not None else 0


def _question(mpu: Any, what: str) -> Callable[[], Any] | None:
    names = (f"get_tensor_model_parallel_{what}", f"get_slice_parallel_{what}", f"get_model_parallel_{what}")
    return next((getattr(mpu, name) for name in names if hasattr(mpu, name)), None)


def mpu_problems(mpu: Any, section: ActivationCheckpointing, where: str) -> list[Problem]:
    """Return what is wrong with an ``mpu`` object: what it cannot be asked, and its group if that is needed."""
    missing = [what for what in ("rank", "group", "world_size") if mpu is not None and _question(mpu, what) is None]
    if missing:
        found = f"a {type(mpu).__name__} has no {' and no '.join(f'get_model_parallel_{what}' for what in missing)}"
        return [Problem(f"{where}.mpu_", found, fix="add it; get_tensor_model_parallel_… will do too")]
    if mpu is None or not section.partition_activations:
        return []
    group = model_parallel_group(mpu)
    problems = group_problem(group, where) if group is not None else []
    return [replace(problem, where=f"{where}.mpu_") for problem in problems]


def model_parallel_group(mpu: Any) -> Any:
    """Return the model-parallel group of an ``mpu`` object; None where nothing is parallel."""
    size, group = (_question(mpu, what) if mpu is not None else None for what in ("world_size", "group"))
    return group() if size is not None and group is not None and size() > 1 else None


def keeping_of(section: ActivationCheckpointing, mpu: Any) -> Keeping | None:
    """Return where regions keep their inputs by this section; None: where the caller holds them."""
    placement: Placement | None = Host() if section.cpu_checkpointing else None
    if section.partition_activations:
        if section.contiguous_memory_optimization and section.number_checkpoints is not None:
            placement = SlotsByArgument(section.number_checkpoints, on_host=section.cpu_checkpointing)
        group = model_parallel_group(mpu)
        if group is not None:
            inner = placement if placement is not None else Here()
            placement = Scattered.over(process_group(group), inner, verify=FirstCalls(), prefetch=0) or placement
    return Keeping(placement, _is_activation) if placement is not None else None


def _is_activation(position: int, tensor: torch.Tensor) -> bool:
    """Return whether an argument is kept elsewhere: ``no_checkpointing = True`` on a tensor says no."""
    return tensor.is_floating_point() and not getattr(tensor, "no_checkpointing", False)


class SlotsByArgument:
    """One contiguous buffer per argument: arguments differ in size, an argument of equal layers does not."""

    def __init__(self, num_checkpoints: int, *, on_host: bool) -> None:
        self.num_checkpoints = num_checkpoints
        self.on_host = on_host
        self._buffers: dict[str, ContiguousBuffer] = {}

    def accepts(self, tensor: torch.Tensor) -> bool:
        """Any tensor will do."""
        return True

    def put(self, flat: torch.Tensor, name: Origin) -> Placed:
        """Copy ``flat`` into a free slot of its argument's buffer."""
        buffer = self._buffers.setdefault(name(), ContiguousBuffer(self.num_checkpoints, on_host=self.on_host))
        return buffer.put(flat, name)

    def describe(self) -> str:
        """Say where inputs are kept."""
        return f"in buffers of {self.num_checkpoints} slots{' in host memory' if self.on_host else ''}"

    def reset(self) -> None:
        """Take every slot back."""
        for buffer in self._buffers.values():
            buffer.reset()
