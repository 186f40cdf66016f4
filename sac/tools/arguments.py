"""Checks of a command's arguments before a model is built, which may take minutes and most of the memory."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from sac.config import parse_config
from sac.engine.op_trace import check_trace_target
from sac.engine.table import resolve_policy
from sac.errors import ConfigError, Problem, SacError, nearest
from sac.extras import import_extra
from sac.tools.comparison import NONE, Training, check_device
from sac.tools.models import Scale, check_spec
from sac.tools.plan_table import check_wish, smallest_batch


def scale_of(arguments: argparse.Namespace) -> Scale:
    """Return the sizes that the arguments ask for."""
    return Scale(arguments.layers, arguments.seq, smallest_batch(arguments.batch), arguments.vocab, arguments.dtype)


def training_of(arguments: argparse.Namespace) -> Training:
    """Return how `sac compare` trains."""
    return Training(arguments.steps, arguments.optimizer, device=arguments.device)


def modes_of(arguments: argparse.Namespace) -> list[str]:
    """Return the modes that `sac compare` measures."""
    return [mode.strip() for mode in arguments.modes.split(",") if mode.strip()]


def check_trace(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for what is wrong in the arguments of `sac trace`."""
    _check_model(arguments)
    check_device(arguments.device)
    check_value(arguments.policy, "--policy")


def check_compare(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for what is wrong in the arguments of `sac compare`."""
    _check_model(arguments)
    training_of(arguments)
    for mode in modes_of(arguments):
        if mode != NONE:
            check_value(mode, "--modes")
    if arguments.picture:
        _check_picture(arguments.picture)


def check_plan(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` or ``PlanError`` for what is wrong in the arguments of `sac plan`."""
    _check_model(arguments)
    check_wish(arguments)
    if arguments.out:
        _check_writable(Path(arguments.out))


def check_value(value: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``value`` is not a config value, or names a policy that cannot be used here."""
    try:
        config = parse_config(value)
        if config.policy is not None:
            resolve_policy(config.policy)
    except SacError as error:
        raise ConfigError(
            [replace(one, where=where) if one.where == "activation_checkpointing" else one for one in error.problems]
        ) from error


def _check_model(arguments: argparse.Namespace) -> None:
    check_spec(arguments.model, scale_of(arguments), text_path=getattr(arguments, "text", None))
    check_trace_target()


def _check_picture(path: str) -> None:
    """Raise ``ConfigError`` if a picture cannot be saved at ``path``, whose folder is created on saving."""
    formats = sorted(import_extra("matplotlib.backend_bases", "tools").FigureCanvasBase.filetypes)
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        found = f"the picture cannot be saved: Format {ending!r} is not supported"
        raise ConfigError(Problem(path, found, ", ".join(formats), nearest(ending, formats)))
    _check_writable(Path(path), next(one for one in Path(path).absolute().parents if one.exists()))


def _check_writable(path: Path, folder: Path | None = None) -> None:
    """Raise ``ConfigError`` if a file cannot be written at ``path``; ``folder`` is where missing ones are created."""
    folder = folder or path.parent
    reasons = {
        "Is a directory": path.is_dir(),
        "No such file or directory": not folder.exists(),
        "Not a directory": folder.exists() and not folder.is_dir(),
        "Permission denied": not os.access(path if path.exists() else folder, os.W_OK),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(Problem(str(path), f"the file cannot be written: {reason}"))
