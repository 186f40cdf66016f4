"""What was measured of the ops of a block, as a file: ``{schema, device, torch, efficiencies, ops}`` in JSON."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from sac.errors import PlanError, Problem, SacWarning, nearest
from sac.planner.op_classes import CLASSES
from sac.planner.profile import Entry

SCHEMA = "sac/calibration/v1"
_FIELDS = ("device", "torch", "efficiencies", "ops")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured on one device with one version of torch.

    ``efficiencies`` are the shares of the device's figures that were reached, by class of op; ``ops`` the seconds that
    one run of a call took, by ``call_key``.
    """

    device: str
    torch: str
    efficiencies: Mapping[str, float] = field(hash=False)
    ops: Mapping[str, float] = field(hash=False)


def call_key(entry: Entry) -> str:
    """Return what a measured time is stored under: the op, its first result, and its FLOPs and bytes.

    An entry does not hold the shapes of an op's arguments. Its FLOPs and bytes stand for them: two products with equal
    results and FLOPs have equal operands.
    """
    causal = " causal" if entry.is_causal else ""
    return f"{entry.op} {entry.dtype}{[*entry.shape]} {entry.flops} FLOP {entry.moved_bytes} B{causal}"


def save_calibration(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write ``calibration`` to a file; raises ``PlanError`` where it cannot be written."""
    text = json.dumps({"schema": SCHEMA, **asdict(calibration)}, indent=1) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(Problem(os.fspath(path), f"the file cannot be written: {error.strerror}")) from error


def load_calibration(path: str | os.PathLike[str]) -> Calibration:
    """Return the calibration that a file holds; warns where another version of torch ran it.

    Raises ``PlanError`` with all that is wrong where the file cannot be read, or is no calibration.
    """
    where = os.fspath(path)
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(Problem(where, f"the file cannot be read: {error.strerror}")) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem(where, f"this is not JSON: {error}", "a calibration file")) from error
    problems = [Problem(where, found, legal, near) for found, legal, near in _problems_of(raw)]
    if problems:
        raise PlanError(problems)
    calibration = Calibration(**{name: raw[name] for name in _FIELDS})
    if calibration.torch != torch.__version__:
        found = f"{where}: it was measured with torch {calibration.torch}, and this is torch {torch.__version__}"
        warnings.warn(f"{found}; calibrate again", SacWarning, stacklevel=2)
    return calibration


def _problems_of(raw: Any) -> Iterator[tuple[str, str, str]]:
    """Yield what was found, what is legal, and the nearest spelling."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = (
            f"schema is {_shown(raw, 'schema')}" if isinstance(raw, dict) and "schema" in raw else "it has no schema"
        )
        yield f"this is not a calibration file: {found}", f'schema: "{SCHEMA}"', ""
        return
    for name in ("device", "torch"):
        if not isinstance(raw.get(name), str):
            yield f'"{name}" is {_shown(raw, name)}', "text", ""
    for name, unit in (("efficiencies", "class of op"), ("ops", "call")):
        if not isinstance(raw.get(name), dict):
            yield f'"{name}" is {_shown(raw, name)}', f"a mapping with a number per {unit}", ""
            continue
        for key, value in raw[name].items():
            if name == "efficiencies" and key not in CLASSES:
                yield f'"{name}" has "{key}"', ", ".join(CLASSES), nearest(key, CLASSES)
            elif type(value) not in (int, float) or not isfinite(value) or value <= 0:
                yield f'"{name}" has {json.dumps(value)} for "{key}"', "a number above 0", ""


def _shown(raw: Mapping[str, Any], name: str) -> str:
    return json.dumps(raw[name])[:40] if name in raw else "missing"
