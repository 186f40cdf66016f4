"""The command ``sac``: its arguments, help and exit codes. Only a command itself imports torch, not its help."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sac.errors import SacError, SacWarning

FORMS = (
    "hf:CONFIG.json (a Hugging Face config file), hf:NAME (a shipped one), "
    "package.module:function (returns a model and its inputs)"
)

DONE, REFUSED, INTERRUPTED = 0, 1, 130
EXIT_CODES = f"""\
exit codes:
  {DONE}    done
  {REFUSED}    sac refused something, or a mode of `sac compare` failed: stderr or the table says which
  2    wrong usage: an unknown command or flag, or a missing one
  {INTERRUPTED}  interrupted (Ctrl-C)"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; see ``EXIT_CODES``. Exits for help and wrong usage."""
    arguments = _parser().parse_args(argv)
    arguments.typed = shlex.join(["sac", *(sys.argv[1:] if argv is None else argv)])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see modules in its working directory
    try:
        with _quiet_libraries():
            run: Callable[[argparse.Namespace], int] = getattr(import_module("sac.tools.commands"), arguments.command)
            return run(arguments)
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
    others = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, SacWarning):  # about what the user wrote, not about a line of code
            print(f"warning: {message}", file=sys.stderr)
        else:
            others(message, category, *place, **more)

    with warnings.catch_warnings(), ExitStack() as stack:
        if not sys.warnoptions:
            warnings.filterwarnings("ignore", ".*NumPy")  # which the commands do without
            for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
        import torch  # noqa: F401  # its import sets the level of its logger

        levels = {"": logging.ERROR, "sac": logging.WARNING}
        for name, level in (levels if "TORCH_LOGS" in os.environ else levels | {"torch": logging.ERROR}).items():
            stack.callback(logging.getLogger(name).setLevel, logging.getLogger(name).level)
            logging.getLogger(name).setLevel(level)
        warnings.showwarning = show
        yield


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sac",
        description="Activation checkpointing from a policy: check it, see what it decides, measure it.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"sac {_version()}")
    add = partial(
        parser.add_subparsers(required=True, metavar="COMMAND", dest="command").add_parser, allow_abbrev=False
    )
    check = add("check", help="read a policy file and show what its rules mean")
    check.add_argument("file", metavar="FILE", help="a policy file, or the name of a shipped policy")
    trace = add("trace", help="show the decision for each op of a model, and by which rule")
    _add_model_options(trace)
    trace.add_argument(
        "--policy", default="selective", metavar="VALUE",
        help="a mode, a policy's name, or a path to one (default: %(default)s)",
    )  # fmt: skip
    compare = add("compare", help="train copies of a model under several modes and measure them")
    _add_model_options(compare)
    _add_training_options(compare)
    plan = add("plan", help="compute a policy that fits a memory budget with little recomputation")
    _add_model_options(plan, "cpu, cuda, or whose figures price the ops: h100, h200, a100, b200, mi300x", ranges=True)
    _add_plan_options(plan)
    for command in (check, trace, compare, plan):
        command.add_argument("--json", action="store_true", help="write the same as JSON to stdout")
    return parser


def _version() -> str:
    try:
        return version("sac")
    except PackageNotFoundError:  # found on the path, as in a checkout
        return "(not installed)"


def _add_model_options(parser: argparse.ArgumentParser, devices: str = "cpu or cuda", *, ranges: bool = False) -> None:
    parser.add_argument("--model", required=True, metavar="SPEC", help=FORMS)
    parser.add_argument("--layers", type=int, metavar="N", help="layers per stack (default: as the config says)")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="tokens per row (default: %(default)s)")
    size, metavar, more = (_size, "N|A..B", "; A..B: the best of these") if ranges else (int, "N", "")
    parser.add_argument("--batch", type=size, default=1, metavar=metavar, help=f"rows (default: %(default)s){more}")
    parser.add_argument("--vocab", type=int, metavar="N", help="tokens in the vocabulary (default: as the config says)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, … (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help=f"{devices} (default: %(default)s)")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes", default="none,full,selective", metavar="LIST",
        help="config values with commas: none, full, selective, a policy's name or file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--optimizer", default="sgd", metavar="NAME", help="sgd, adamw (default: %(default)s)")
    parser.add_argument(
        "--picture", type=os.path.expanduser, metavar="FILE", help="save memory over the step (png, svg)"
    )


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", metavar="SIZE", help='peak of one step: "40GiB", bytes, or "50%%" of the way from the least peak '
        "to that without checkpointing (default: 90%% of the memory of --device)",
    )  # fmt: skip
    parser.add_argument("--optimizer", metavar="NAME", help="the one whose state counts: sgd, momentum, adam, adamw")
    parser.add_argument("--host-memory", metavar="SIZE", help="host memory in which saved values may wait for backward")
    parser.add_argument("--fsdp", type=int, metavar="N", help="plan for one of N ranks that shard the model by FSDP2")
    parser.add_argument("--explain", action="store_true", help="also show what is alive at the peak, and why")
    parser.add_argument(
        "--out", type=os.path.expanduser, metavar="FILE", help="write the policy here (default: stdout)"
    )


def _size(text: str) -> int | tuple[int, int]:
    """Return a size, or the ends of a range of sizes."""
    if ".." not in text:
        return int(text)
    low, _, high = text.partition("..")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) < int(high)):
        raise argparse.ArgumentTypeError(f"'{text}' is not a range of sizes; legal: A..B, such as 1..64")
    return int(low), int(high)
