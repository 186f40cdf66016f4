"""The command ``sac``: check a policy file, show decisions, compare modes."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from sac.errors import SacError
from sac.measuring.built_model import BuiltModel, Scale
from sac.measuring.mode_run import OPTIMIZERS, Training
from sac.measuring.modelspec import FORMS, load_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, or 1 when sac refused something (its text is on stderr), or 2 for wrong usage."""
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr whenever it starts and stops
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see the modules of the folder that it is run in
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except BrokenPipeError:  # the reader of a long table has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 1
    except SacError as error:
        print(error, file=sys.stderr)
        return 1


def _check(arguments: argparse.Namespace) -> int:
    from sac.commands.check import check_file

    return check_file(arguments.file, verbose=arguments.verbose, as_json=arguments.json)


def _trace(arguments: argparse.Namespace) -> int:
    from sac.commands.trace import print_trace

    return print_trace(_build(arguments), arguments.policy, device=arguments.device, as_json=arguments.json)


def _compare(arguments: argparse.Namespace) -> int:
    from sac.commands.picture import save_picture
    from sac.commands.render import print_comparison, progress_bar
    from sac.measuring.compare import compare

    training = Training(arguments.steps, arguments.optimizer, arguments.lr, arguments.seed, arguments.device)
    modes = [mode.strip() for mode in arguments.modes.split(",") if mode.strip()]
    with progress_bar() as progress:
        comparison = compare(lambda: _build(arguments), modes, training, progress=progress)
    if arguments.json:
        _print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    if arguments.picture:
        print(f"picture: {save_picture(comparison, arguments.picture)}", file=sys.stderr)
    return 1 if comparison.failed else 0


def _build(arguments: argparse.Namespace) -> BuiltModel:
    scale = Scale(arguments.layers, arguments.seq, arguments.batch, arguments.vocab, arguments.dtype)
    return load_model(arguments.model, scale, text_path=arguments.text, seed=arguments.seed)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sac", description="Activation checkpointing from a policy: check it, see what it decides, measure it."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="read a policy file and show what its rules mean")
    check.add_argument("file", metavar="FILE", help="a policy file, or the name of a shipped policy")
    check.add_argument("--verbose", action="store_true", help="also list ops that this build of torch lacks")
    check.set_defaults(command=_check)
    trace = commands.add_parser("trace", help="show the decision for each op of a model, and by which rule")
    _add_model_options(trace)
    trace.add_argument("--policy", default="selective", metavar="VALUE", help="config value (default: %(default)s)")
    trace.set_defaults(command=_trace)
    compare = commands.add_parser("compare", help="train copies of a model under several modes and measure them")
    _add_model_options(compare)
    _add_training_options(compare)
    compare.set_defaults(command=_compare)
    for command in (check, trace, compare):
        command.add_argument("--json", action="store_true", help="write the same as JSON to stdout")
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="SPEC", help=FORMS)
    parser.add_argument("--layers", type=int, metavar="N", help="layers per stack (default: as the config says)")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    parser.add_argument("--vocab", type=int, metavar="N", help="tokens in the vocabulary (default: as the config says)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, … (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="train on the bytes of this file (default: random tokens)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="for weights, data and dropout")


def _add_training_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--modes", default="none,full,selective", metavar="LIST",
        help="config values with commas: none, full, selective, a policy's name or file (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--optimizer", default="sgd", metavar="NAME", help=", ".join(OPTIMIZERS))
    parser.add_argument("--lr", type=float, default=1e-2, metavar="RATE", help="learning rate (default: %(default)s)")
    parser.add_argument("--picture", metavar="FILE", help="save memory over the step per mode (png, svg, pdf)")


if __name__ == "__main__":
    sys.exit(main())
