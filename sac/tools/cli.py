"""The command ``sac``: check a policy file, show decisions, compare modes, plan for a budget."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sac.errors import SacError, SacWarning
from sac.tools.parser import DONE, INTERRUPTED, REFUSED, Command, parse

if TYPE_CHECKING:  # these import torch, which help does not need
    from sac.planner.fakes import Build
    from sac.tools.models import BuiltModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see ``EXIT_CODES`` of ``sac.tools.parser``."""
    arguments = parse(argv, _COMMANDS)
    arguments.typed = shlex.join(["sac", *(sys.argv[1:] if argv is None else argv)])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see modules in its working directory
    command: Command = arguments.command
    try:
        with _quiet_libraries():
            return command(arguments)
    except BrokenPipeError:  # the reader of a long table closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter complains on flush
        return REFUSED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except SacError as error:
        print(error, file=sys.stderr)
        return REFUSED


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Hold back what other libraries log below errors, and what they warn of for their own developers.

    Nothing is held back that the user asks for with ``TORCH_LOGS``, ``TRANSFORMERS_VERBOSITY``, ``PYTHONWARNINGS``
    or ``python -W``.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")  # torch warns that there is no NumPy, which the commands do without
        import torch  # noqa: F401  # its import sets the level of its logger
    levels = {"": logging.ERROR, "sac": logging.WARNING}
    if "TORCH_LOGS" not in os.environ:
        levels["torch"] = logging.ERROR
    before = {name: logging.getLogger(name).level for name in levels}
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, SacWarning):  # about what the user wrote, not about a line of code
            print(f"warning: {message}", file=sys.stderr)
        else:
            others(message, category, *place, **more)

    with warnings.catch_warnings():
        for category in () if sys.warnoptions else (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        warnings.showwarning = show
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        try:
            yield
        finally:
            for name, level in before.items():
                logging.getLogger(name).setLevel(level)


def _check(arguments: argparse.Namespace) -> int:
    from sac.tools.check import check_file

    return check_file(arguments.file, verbose=arguments.verbose, as_json=arguments.json)


def _trace(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_trace
    from sac.tools.comparison import inputs_on
    from sac.tools.measuring import trace_here
    from sac.tools.render import progress_bar

    check_trace(arguments)
    with progress_bar() as progress:
        progress(0, 2, "building the model")
        built = _build(arguments)
        progress(1, 2, "forward and backward")
        inputs = inputs_on(arguments.device, built.inputs_of_step(0))
        found = trace_here(built.model.to(arguments.device), inputs, arguments.policy, built.name)
    if arguments.json:
        _print_json([asdict(row) for row in found.rows])
    else:
        print(found)
    return DONE


def _compare(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_compare, modes_of, training_of
    from sac.tools.comparison import compare
    from sac.tools.pictures import save_picture
    from sac.tools.render import progress_bar

    check_compare(arguments)
    with progress_bar() as progress:
        progress(0, 0, "building the model")
        training = training_of(arguments)
        comparison = compare(lambda: _build(arguments), modes_of(arguments), training, progress=progress)
    if arguments.json:
        _print_json(comparison.to_dict())
    else:
        print(comparison)
    if arguments.picture:
        print(f"picture: {save_picture(comparison, arguments.picture)}", file=sys.stderr)
    return REFUSED if comparison.failed else DONE


def _plan(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_plan
    from sac.tools.plan_table import plan_model, print_plan, save_policy
    from sac.tools.render import progress_bar

    check_plan(arguments)
    with progress_bar() as progress:
        progress(0, 0, "planning on tensors without data")
        planned = plan_model(arguments, lambda build: _build(arguments, build))
    if arguments.out:
        save_policy(planned.policy_text(), arguments.out)
    if arguments.json:
        _print_json(planned.to_dict())
        return DONE
    print_plan(planned)
    if arguments.out:
        path = arguments.out if os.path.isabs(arguments.out) else os.path.join(os.curdir, arguments.out)
        print(f"policy: {arguments.out}; try it on this model: sac compare --modes none,full,selective,{path}")
    else:
        print(f"\n{planned.policy_text().rstrip()}")
    return DONE


def _build(arguments: argparse.Namespace, build: Build | None = None) -> BuiltModel:
    from sac.tools.arguments import scale_of
    from sac.tools.models import load_model

    return load_model(arguments.model, scale_of(arguments), text_path=getattr(arguments, "text", None), build=build)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


_COMMANDS: dict[str, Command] = {
    "check": _check,
    "trace": _trace,
    "compare": _compare,
    "plan": _plan,
}
