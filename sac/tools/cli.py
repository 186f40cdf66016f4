"""The command ``sac``: check a policy file, show decisions, compare modes, plan for a budget, build the C++ library."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

from sac.errors import SacError
from sac.planner.fakes import Build
from sac.tools.comparison import OPTIMIZERS
from sac.tools.models import FORMS, BuiltModel, load_model


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return 0, 1 if sac refused something (its text is on stderr), or 2 for wrong usage."""
    arguments = _parser().parse_args(argv)
    arguments.typed = shlex.join(["sac", *(sys.argv[1:] if argv is None else argv)])
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes to stderr at start and stop
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a console script does not see modules in its working directory
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        return command(arguments)
    except BrokenPipeError:  # the reader of a long table closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the interpreter complains on flush
        return 1
    except SacError as error:
        print(error, file=sys.stderr)
        return 1


def _check(arguments: argparse.Namespace) -> int:
    from sac.tools.check import check_file

    return check_file(arguments.file, verbose=arguments.verbose, as_json=arguments.json)


def _trace(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_trace
    from sac.tools.render import print_trace

    check_trace(arguments)
    return print_trace(_build(arguments), arguments.policy, device=arguments.device, as_json=arguments.json)


def _compare(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_compare, modes_of, training_of
    from sac.tools.comparison import compare
    from sac.tools.pictures import save_picture
    from sac.tools.render import print_comparison, progress_bar

    check_compare(arguments)
    with progress_bar() as progress:
        comparison = compare(lambda: _build(arguments), modes_of(arguments), training_of(arguments), progress=progress)
    if arguments.json:
        _print_json(comparison.to_dict())
    else:
        print_comparison(comparison)
    if arguments.picture:
        print(f"picture: {save_picture(comparison, arguments.picture)}", file=sys.stderr)
    return 1 if comparison.failed else 0


def _plan(arguments: argparse.Namespace) -> int:
    from sac.tools.arguments import check_plan
    from sac.tools.pictures import save_plan_picture
    from sac.tools.plan_table import PlanRequest, plan_model, print_plan, save_policy
    from sac.tools.render import progress_bar

    request = PlanRequest(**{field.name: getattr(arguments, field.name) for field in fields(PlanRequest)})
    check_plan(arguments, request)
    if arguments.calibrate:
        return _calibrate(arguments)
    with progress_bar() as progress:
        planned = plan_model(lambda build: _build(arguments, build), request, arguments.typed, progress)
    text = planned.policy_text()
    if arguments.out:
        save_policy(text, arguments.out)
    if arguments.json:
        _print_json(planned.to_dict())
    else:
        print_plan(planned)
        if arguments.out:
            print(f"policy: {arguments.out}; try it: {_comparison(arguments)}")
        else:
            print(f"\n{text}", end="")
    if arguments.picture:
        title = f"{planned.model}, {planned.inputs}"
        print(f"picture: {save_plan_picture(planned.plan, title, arguments.picture)}", file=sys.stderr)
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from sac.planner.cost import save_calibration
    from sac.tools.plan_table import calibrate_model

    arguments.layers = arguments.layers or 1  # only the first layer is timed
    calibration = calibrate_model(_build(arguments), arguments.device)
    save_calibration(calibration, arguments.out)
    if arguments.json:
        _print_json(asdict(calibration))
    else:
        reached = ", ".join(f"{name} {share:.1%}" for name, share in calibration.efficiencies.items())
        print(f"{len(calibration.ops)} calls timed on {calibration.device}; reached of its figures: {reached}")
        print(f"calibration: {arguments.out}; plan with it: sac plan … --calibration {shlex.quote(arguments.out)}")
    return 0


def _build_native(arguments: argparse.Namespace) -> int:
    from sac.tools.native import build_library, check_library

    return check_library() if arguments.check else build_library(force=arguments.force)


class _Version(argparse.Action):
    """``--version``, whose text is made only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from sac.tools.native import version_text

        print(version_text())
        parser.exit()


def _comparison(arguments: argparse.Namespace) -> str:
    """Return the command that measures a planned policy next to the modes, on the same model."""
    words = ["sac", "compare"]
    for name in ("model", "layers", "seq", "batch", "vocab", "dtype", "text", "seed"):
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    if arguments.device != "cpu" and not arguments.real:
        words += ["--device", "cuda"]  # a CPU runs other ops and refuses the policy
    path = arguments.out if os.path.isabs(arguments.out) else os.path.join(os.curdir, os.path.normpath(arguments.out))
    return shlex.join([*words, "--modes", f"none,full,selective,{path}"])


def _build(arguments: argparse.Namespace, build: Build | None = None) -> BuiltModel:
    from sac.tools.arguments import scale_of

    return load_model(arguments.model, scale_of(arguments), text_path=arguments.text, seed=arguments.seed, build=build)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sac", description="Activation checkpointing from a policy: check it, see what it decides, measure it."
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="show the version, and whether the C++ library is on"
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
    plan = commands.add_parser("plan", help="compute a policy that fits a memory budget with the least recomputation")
    _add_model_options(plan, "cpu, cuda, or whose figures price the ops: h100, h200, a100, b200, mi300x")
    _add_plan_options(plan)
    plan.set_defaults(command=_plan)
    native = commands.add_parser("build", help="compile the optional C++ library for the installed torch and Python")
    how = native.add_mutually_exclusive_group()
    how.add_argument("--check", action="store_true", help="only show whether there is one; exit with 1 if not")
    how.add_argument("--force", action="store_true", help="compile it even if there is one")
    native.set_defaults(command=_build_native)
    for command in (check, trace, compare, plan):
        command.add_argument("--json", action="store_true", help="write the same as JSON to stdout")
    return parser


def _add_model_options(parser: argparse.ArgumentParser, devices: str = "cpu or cuda") -> None:
    parser.add_argument("--model", required=True, metavar="SPEC", help=FORMS)
    parser.add_argument("--layers", type=int, metavar="N", help="layers per stack (default: as the config says)")
    parser.add_argument("--seq", type=int, default=128, metavar="N", help="tokens per row (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="rows (default: %(default)s)")
    parser.add_argument("--vocab", type=int, metavar="N", help="tokens in the vocabulary (default: as the config says)")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, … (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="train on the bytes of this file (default: random tokens)")
    parser.add_argument("--device", default="cpu", help=f"{devices} (default: %(default)s)")
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


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--budget", metavar="SIZE", help='peak of one step: "40GiB", bytes, or "50%%" of the way from the least peak '
        "to that without checkpointing (default: the memory of --device less --margin)",
    )  # fmt: skip
    parser.add_argument("--margin", metavar="SHARE", help='of the device\'s memory to leave free (default: "10%%")')
    parser.add_argument("--optimizer", metavar="NAME", help="the one whose state counts: sgd, momentum, adam, adamw")
    parser.add_argument(
        "--engine",
        default="auto",
        choices=("auto", "replay", "rerun"),
        help="engine to use (default: %(default)s)",
    )
    parser.add_argument("--same-layers", action="store_true", help="use the same rules on all layers of a region group")
    parser.add_argument("--real", action="store_true", help="run on tensors with data (default: on shapes alone)")
    parser.add_argument(
        "--exact", action="store_true", help="for a CPU: run large ops too, to measure what their kernels allocate"
    )
    parser.add_argument("--fsdp", type=int, metavar="N", help="plan for one of N ranks that shard the model by FSDP2")
    parser.add_argument("--accumulate", action="store_true", help="gradients of earlier micro-batches exist")
    parser.add_argument(
        "--in-flight", type=int, default=1, metavar="N", help="micro-batches that a pipeline stage holds at once"
    )
    parser.add_argument("--calibrate", action="store_true", help="time a block on --device, store it in --out, and end")
    parser.add_argument("--calibration", metavar="FILE", help="the file that --calibrate wrote")
    parser.add_argument("--out", metavar="FILE", help="write the policy here (default: to stdout, after the table)")
    parser.add_argument("--picture", metavar="FILE", help="save recompute time over peak (png, svg, pdf)")


if __name__ == "__main__":
    sys.exit(main())
