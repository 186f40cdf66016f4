"""`sac.trace` and `sac.compare`: the commands of these names, for a model that a program has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.applying import refuse_second
from sac.checkpointing import apply
from sac.config import parse_config
from sac.engine.table import resolve_policy
from sac.errors import ConfigError, ModelError, Problem, SacError
from sac.planner.fakes import Inputs, arguments_of
from sac.policy.model import Policy
from sac.reporting import Trace, decisions_of
from sac.tools.comparison import Comparison, Progress, Training, forward_backward, inputs_on
from sac.tools.comparison import compare as compare_copies
from sac.tools.models import BuiltModel


def trace(
    model: nn.Module, inputs: Any, policy: Any = "selective", *, loss_fn: Callable[[Any], Tensor] | None = None
) -> Trace:
    """Return the decision for each op of ``model`` under ``policy``, and the rule that made it.

    A copy of the model runs one forward and backward. The model, its gradients and the random state stay as they are.

    ``inputs``: the arguments of the model, as a tuple or a dict. ``policy``: any config value. ``loss_fn``: the loss is
    ``loss_fn(output)``, else ``output.loss``, else the mean square of the first tensor. The result prints as a table
    per region group; its ``rows`` hold the same as ``OpTraceRow``, sizes in bytes.

    Raises ``ConfigError`` for inputs or a value that cannot be used; ``ModelError`` for a model that sac is already on
    or that has no blocks; ``PolicyError`` for the policy.
    """
    given, device = _checked(model, inputs)
    parse_config(policy)
    with torch.random.fork_rng([] if device == "cpu" else [device]):
        return trace_here(deepcopy(model), inputs_on(device, given), policy, type(model).__name__, loss_fn)


def trace_here(
    model: nn.Module, inputs: Inputs, policy: Any, name: str, loss_fn: Callable[[Any], Tensor] | None = None
) -> Trace:
    """Apply ``policy`` to ``model`` itself, run one forward and backward, and return the decisions."""
    apply(model, policy)
    forward_backward(model, inputs, loss_fn)
    return Trace(name, label_of(policy), decisions_of(model))


def compare(
    model: nn.Module,
    inputs: Any,
    modes: str | Policy | Iterable[Any] | Mapping[str, Any] = ("none", "full", "selective"),
    *,
    steps: int = 5,
    optimizer: str = "sgd",
    lr: float = 1e-2,
    seed: int = 0,
    loss_fn: Callable[[Any], Tensor] | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Train copies of ``model`` under each of ``modes`` and return their memory, recomputation, time and gradients.

    ``modes``: config values (words, paths, mappings, policies), or a dict of them by the label of their row; or one
    word or policy. ``none`` is always measured, first. Every copy starts from the weights of ``model``, sees the same
    ``inputs`` in all ``steps``, and draws the same random numbers; the model and the random state stay as they are.
    There is a copy of the weights per mode. ``inputs`` and ``loss_fn`` are as for ``sac.trace``; ``optimizer`` is
    ``sgd`` or ``adamw``.

    A mode that sac refuses for this model keeps its row, with the error. Raises ``ConfigError`` for arguments that
    cannot be used and for modes that do not exist, ``ModelError`` for a model that sac is already on.
    """
    given, device = _checked(model, inputs)
    values = _labelled([modes] if isinstance(modes, str | Policy) else modes)
    for value in values.values():
        check_value(value, "modes")
    try:
        training = Training(steps, optimizer, lr, seed, device, loss_fn)
    except ConfigError as error:
        raise _located(error, "--", "") from None
    with torch.random.fork_rng([] if device == "cpu" else [device]):
        built = BuiltModel(deepcopy(model).train(), lambda step: given, type(model).__name__)
        return compare_copies(built, values, training, progress)


def check_value(value: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``value`` is not a config value, or names a policy that cannot be used here."""
    try:
        config = parse_config(value)
        if config.policy is not None:
            resolve_policy(config.policy)
    except SacError as error:
        raise _located(error, "activation_checkpointing", where) from error


def _located(error: SacError, old: str, new: str) -> ConfigError:
    """Return the error with another begin of its paths of keys; places in files, which have a colon, stay."""

    def place(where: str) -> str:
        return new + where.removeprefix(old) if where.startswith(old) and ":" not in where else where

    return ConfigError([replace(each, where=place(each.where)) for each in error.problems])


def _labelled(modes: Iterable[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by label; of values with the same label, such as two plans, the later ones get their place."""
    if isinstance(modes, Mapping):
        return dict(modes)
    values: dict[str, Any] = {}
    for value in modes:
        label = label_of(value)
        values[f"{label} ({len(values) + 1})" if label in values else label] = value
    return values


def label_of(value: Any) -> str:
    """Return a short text for a config value: the word, the path, the name of the policy, or the keys and values."""
    if isinstance(value, Policy):
        return value.name
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {label_of(one)}" for key, one in value.items())
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _checked(model: nn.Module, inputs: Any) -> tuple[Inputs, str]:
    refuse_second(model)
    arguments = arguments_of(inputs, ConfigError)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        found = f"its parameters are on {', '.join(sorted(devices))}"
        raise ModelError(Problem(type(model).__name__, found, "one device that holds data"))
    return arguments, next(iter(devices), "cpu")
