"""Checks of a command's arguments before a model is built, which may take minutes and most of the memory."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from sac.config import parse_config, usable_policy
from sac.engine.op_trace import check_trace_target
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
    return Training(arguments.steps, arguments.optimizer, arguments.lr, arguments.seed, arguments.device)


def modes_of(arguments: argparse.Namespace) -> list[str]:
    """Return the modes that `sac compare` measures."""
    return [mode.strip() for mode in arguments.modes.split(",") if mode.strip()]


def check_trace(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` with all problems in the arguments of `sac trace`."""
    checks = [lambda: check_device(arguments.device), lambda: check_value(arguments.policy, "--policy")]
    refuse([*_of_model(arguments), *checks, *_of_output(arguments)])


def check_compare(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` with all problems in the arguments of `sac compare`."""
    checks: list[Check] = [lambda: training_of(arguments), lambda: _check_rate(arguments.lr)]
    checks += [partial(check_value, mode, "--modes") for mode in modes_of(arguments) if mode != NONE]
    refuse([*_of_model(arguments), *checks, *_of_output(arguments)])


def check_plan(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` with all problems in the arguments of `sac plan`."""
    checks: list[Check] = [lambda: check_wish(arguments)]
    if arguments.out:
        checks.append(lambda: check_writable(arguments.out))
    refuse([*_of_model(arguments), *checks, *_of_output(arguments)])


def check_value(value: Any, where: str) -> None:
    """Raise ``ConfigError`` if ``value`` is not a config value, or names a policy that cannot be used here."""
    try:
        config = parse_config(value)
        if config.policy is not None:
            usable_policy(config.policy)
    except SacError as error:
        wrong = [one if one.where != "activation_checkpointing" else _at(one, where) for one in error.problems]
        raise ConfigError(wrong) from error


def check_writable(path: str) -> None:
    """Raise ``ConfigError`` if a file cannot be written at ``path``."""
    file = Path(path)
    reason = ""
    if file.is_dir():
        reason = "Is a directory"
    elif not file.parent.exists():
        reason = "No such file or directory"
    elif not file.parent.is_dir():
        reason = "Not a directory"
    elif not os.access(file if file.exists() else file.parent, os.W_OK):
        reason = "Permission denied"
    if reason:
        raise ConfigError(Problem(path, f"the file cannot be written: {reason}"))


def check_picture(path: str) -> None:
    """Raise ``ConfigError`` if a picture cannot be saved at ``path``, whose folder is created on saving."""
    import_extra("matplotlib", "tools")
    formats: Sequence[str] = sorted(import_extra("matplotlib.backend_bases", "tools").FigureCanvasBase.filetypes)
    ending = Path(path).suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        found = (
            f"the picture cannot be saved: Format {ending!r} is not supported (supported formats: {', '.join(formats)})"
        )
        raise ConfigError(Problem(path, found, nearest=nearest(ending, formats)))
    check_creatable(path)


def check_creatable(path: str) -> None:
    """Raise ``ConfigError`` if a file cannot be written at ``path``, whose folder is created on saving."""
    if Path(path).is_dir():
        raise ConfigError(Problem(path, "the file cannot be written: Is a directory"))
    folder = next((one for one in Path(path).absolute().parents if one.exists()), None)
    if folder is not None and not folder.is_dir():
        raise ConfigError(Problem(path, "the file cannot be written: Not a directory"))
    if folder is not None and not os.access(folder, os.W_OK):
        raise ConfigError(Problem(path, "the file cannot be written: Permission denied"))


def _of_model(arguments: argparse.Namespace) -> list[Check]:
    return [
        lambda: scale_of(arguments),
        lambda: _check_seed(arguments.seed),
        lambda: _check_model(arguments),
        check_trace_target,
    ]


def _check_model(arguments: argparse.Namespace) -> None:
    try:
        scale = scale_of(arguments)
    except SacError:
        scale = Scale()  # the problems of the sizes are reported elsewhere
    check_spec(arguments.model, scale, text_path=arguments.text)


def _of_output(arguments: argparse.Namespace) -> list[Check]:
    picture = getattr(arguments, "picture", None)
    return [partial(check_picture, picture)] if picture else []


def _check_rate(rate: float) -> None:
    if not (isfinite(rate) and rate >= 0):
        raise ConfigError(Problem("--lr", f"{rate} is not a learning rate", "a number of 0 or more"))


def _check_seed(seed: int) -> None:
    if not -(2**63) <= seed < 2**64 - 1_000_000:  # later steps add their number
        raise ConfigError(Problem("--seed", f"{seed} is not a seed", "a whole number of at most 64 bits"))


def _at(problem: Problem, where: str) -> Problem:
    return Problem(where, problem.found, problem.expected, problem.nearest, problem.fix)


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
