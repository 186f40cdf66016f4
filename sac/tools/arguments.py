"""Checks of a command's arguments before a model is built, which may take minutes and most of the memory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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

Check = Callable[[], object]


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
    """Raise ``ConfigError`` with all problems in the arguments of `sac trace`."""
    of_device, of_policy = lambda: check_device(arguments.device), lambda: check_value(arguments.policy, "--policy")
    refuse([*_of_model(arguments), of_device, of_policy])


def check_compare(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` with all problems in the arguments of `sac compare`."""
    checks = [*_of_model(arguments), lambda: training_of(arguments)]
    checks += [partial(check_value, mode, "--modes") for mode in modes_of(arguments) if mode != NONE]
    refuse([*checks, *([lambda: _check_picture(arguments.picture)] if arguments.picture else [])])


def check_plan(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` with all problems in the arguments of `sac plan`."""
    checks = [*_of_model(arguments), lambda: check_wish(arguments)]
    refuse([*checks, *([lambda: _check_writable(Path(arguments.out))] if arguments.out else [])])


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


def refuse(checks: Sequence[Check]) -> None:
    """Run all checks; raise one ``ConfigError`` with all that they find, each problem once."""
    problems: dict[Problem, None] = {}
    for check in checks:
        try:
            check()
        except SacError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise ConfigError(list(problems))


def _of_model(arguments: argparse.Namespace) -> list[Check]:
    def check_model() -> None:
        try:
            scale = scale_of(arguments)
        except SacError:
            scale = Scale()  # the problems of the sizes are reported elsewhere
        check_spec(arguments.model, scale, text_path=getattr(arguments, "text", None))

    return [lambda: scale_of(arguments), check_model, check_trace_target]


def _check_picture(path: str) -> None:
    """Raise ``ConfigError`` if a picture cannot be saved at ``path``, whose folder is created on saving."""
    import_extra("matplotlib", "tools")
    formats: list[str] = sorted(import_extra("matplotlib.backend_bases", "tools").FigureCanvasBase.filetypes)
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        legal = f"(supported formats: {', '.join(formats)})"
        found = f"the picture cannot be saved: Format {ending!r} is not supported {legal}"
        raise ConfigError(Problem(path, found, nearest=nearest(ending, formats)))
    folder = next(one for one in Path(path).absolute().parents if one.exists())
    _check_writable(Path(path), folder)


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
