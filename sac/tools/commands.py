"""What the commands do: each checks its arguments, since a model takes minutes to build, and then prints a result."""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from sac.decision_log import check_trace_target
from sac.engine.table import ResolvedRule, resolve_policy
from sac.errors import ConfigError, Problem, nearest
from sac.extras import import_extra
from sac.planner.fakes import Build
from sac.policy.load import load_policy
from sac.policy.model import limits_of
from sac.tables import Table, count_text, screen_width
from sac.tools.cli import DONE, REFUSED
from sac.tools.comparison import NONE, Progress, Training, check_device, inputs_on
from sac.tools.comparison import compare as compare_modes
from sac.tools.measuring import check_value, trace_here
from sac.tools.models import BuiltModel, Scale, load_model
from sac.tools.pictures import save_picture
from sac.tools.plan_table import check_wish, plan_model, print_plan

PROGRESS_EVERY_S = 2.0


def check(arguments: argparse.Namespace) -> int:
    """Print the rules of a policy file, with what each means in this build of torch."""
    policy = load_policy(arguments.file)
    rules = [_meaning(resolved) for resolved in resolve_policy(policy).rules]
    missing = {name for rule in rules for name in rule["missing"]}
    if arguments.json:
        names = ("source", "extends", "models")
        about = {"policy": policy.name, "default": policy.default.value, "torch": torch.__version__}
        _print_json({**about, **{name: getattr(policy, name) for name in names}, "rules": rules})
        return DONE
    columns = ("rule", "do", "ops", "names here", "only where", "of policy", "place")
    rows = []
    for rule, meaning in zip(policy.rules, rules, strict=True):
        count = len(meaning["names"])
        here = f"{count} of {count + len(meaning['missing'])}" if rule.ops else "–"
        rows.append((rule.id, rule.do, rule.what_text, here, "; ".join(limits_of(rule)), rule.origin, rule.where()))
    parents = f", extends {', '.join(policy.extends)}" if policy.extends else ""
    families = f", for {', '.join(policy.models)}" if policy.models else ""
    print(f"{policy.source}: policy {policy.name}{parents}{families}")
    print(Table(columns, tuple(rows), ("names here",), optional=("place", "of policy")).text(screen_width()))
    print(f"everything else: {policy.default.value}")
    print("not checked without a model: modules, layers, functions and units (sac trace --model ... --policy FILE)")
    if missing:
        print(f"{count_text(len(missing), 'name')} not in this build of torch ({torch.__version__}): --json lists them")
    return DONE


def _meaning(resolved: ResolvedRule) -> dict[str, Any]:
    rule, missing = resolved.rule, resolved.matcher.missing
    names = dict.fromkeys(entry.pattern.text for entry in resolved.matcher.entries)
    return {
        "id": rule.id, "do": rule.do, "ops": rule.ops, "function": rule.function, "unit": rule.unit,
        "only_where": limits_of(rule), "of_policy": rule.origin, "place": rule.where(),
        "names": [name for name in names if name not in missing], "missing": missing,
    }  # fmt: skip


def trace(arguments: argparse.Namespace) -> int:
    """Print the decision for each op of a model."""
    check_device(arguments.device)
    check_value(arguments.policy, "--policy")
    with progress_lines() as progress:
        progress(0, 0, "building the model")
        built = _build(arguments)
        progress(0, 0, "forward and backward")
        inputs = inputs_on(arguments.device, built.inputs_of_step(0))
        decisions = trace_here(built.model.to(arguments.device), inputs, arguments.policy, built.name)
    if arguments.json:
        _print_json([asdict(row) for row in decisions.rows])
    else:
        print(decisions)
    return DONE


def compare(arguments: argparse.Namespace) -> int:
    """Measure a model under several modes, and print a table."""
    training = Training(arguments.steps, arguments.optimizer, device=arguments.device)
    modes = [mode.strip() for mode in arguments.modes.split(",") if mode.strip()]
    for mode in modes:
        if mode != NONE:
            check_value(mode, "--modes")
    if arguments.picture:
        _check_picture(Path(arguments.picture))
    with progress_lines() as progress:
        progress(0, 0, "building the model")
        comparison = compare_modes(_build(arguments), {mode: mode for mode in modes}, training, progress)
    if arguments.json:
        _print_json(comparison.to_dict())
    else:
        print(comparison)
    if arguments.picture:
        print(f"picture: {save_picture(comparison, arguments.picture)}", file=sys.stderr)
    return REFUSED if comparison.failed else DONE


def plan(arguments: argparse.Namespace) -> int:
    """Compute a policy for a memory budget; print it, or write it and print what it costs."""
    budget = check_wish(arguments)
    if arguments.out:
        _check_writable(Path(arguments.out))
    with progress_lines() as progress:
        progress(0, 0, "planning on tensors without data")
        planned = plan_model(arguments, budget, lambda build: _build(arguments, build))
    if arguments.out:
        Path(arguments.out).write_text(planned.policy_text(), encoding="utf-8")
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
    check_trace_target()
    scale = Scale(arguments.layers, arguments.seq, arguments.batch, arguments.vocab, arguments.dtype)
    return load_model(arguments.model, scale, build)


def _check_picture(path: Path) -> None:
    """Raise ``ConfigError`` if a picture cannot be saved at ``path``; creates its folder."""
    formats = sorted(import_extra("matplotlib.backend_bases", "tools").FigureCanvasBase.filetypes)
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in formats:
        problem = f"the picture cannot be saved: Format {ending!r} is not supported"
        raise ConfigError(Problem(str(path), problem, ", ".join(formats), nearest(ending, formats)))
    with suppress(OSError):  # the file cannot be written then
        path.parent.mkdir(parents=True, exist_ok=True)
    _check_writable(path)


def _check_writable(path: Path) -> None:
    """Raise ``ConfigError`` if a file cannot be written at ``path``."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(Problem(str(path), f"the file cannot be written: {error.strerror}")) from error
    if is_new:
        path.unlink()


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


@contextmanager
def progress_lines() -> Iterator[Progress]:
    """Yield a function that takes what runs now; a thread writes it to stderr every two seconds if it has changed."""
    current, ended = [""], threading.Event()

    def show() -> None:
        shown = ""
        while not ended.wait(PROGRESS_EVERY_S):
            if current[0] != shown:
                shown = current[0]
                print(shown, file=sys.stderr, flush=True)

    def note(done: int, total: int, label: str) -> None:
        current[0] = f"{label}: {done} of {total}" if total else label

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield note
    finally:
        ended.set()
        thread.join()
