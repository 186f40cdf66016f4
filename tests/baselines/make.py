#!/usr/bin/env python3
"""Writes tests/baselines/before.json: what sac kept, ran again and cost before the engine was replaced.

    .venv/bin/python tests/baselines/make.py DIRECTORY      everything, about an hour on two free cores
    .venv/bin/python tests/baselines/make.py DIRECTORY --part policies
    .venv/bin/python tests/baselines/make.py DIRECTORY --part policies --compare   prints what is worse

DIRECTORY collects the JSON of each part; a part that is there already is not run again. All parts run without the C++
library. Ratios of time are to torch's full checkpointing in the same run; bytes and FLOPs are the same in every run.
In before.json, 102 families of the sweep were measured at 83dbc8d, and agree with the page of the sweep there; the rows
without figures have the status of that page. The file goes with the last of the issues that compare with it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.update(SAC_NATIVE="0", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402 - behind the settings of the environment
from torch import nn  # noqa: E402

import sac  # noqa: E402
from tests.policies.families import FAMILIES, STRANGERS, Family, loss_of  # noqa: E402
from tests.policies.training import DROPOUT, turn_off_cache  # noqa: E402
from tests.support.accountant import StepAccount, account_step  # noqa: E402

BEFORE = Path(__file__).with_name("before.json")


class _Loss(nn.Module):
    """Returns the loss of a family's model on its inputs."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self) -> torch.Tensor:
        return loss_of(self.model, self.inputs)


def policies() -> dict[str, Any]:
    """Return kept bytes and recomputed FLOPs of each policy on its families, in modes none, full and selective."""
    rows = {}
    for family in (*FAMILIES, *STRANGERS):
        plain, inputs = family.build(DROPOUT)
        turn_off_cache(plain)
        none, full, selective = (_account(plain, inputs, value) for value in (None, "full", _value(family)))
        rows[str(family)] = {
            "none": {"kept_bytes": none.kept_bytes, "flops": none.forward_flops + none.backward_flops},
            "full": {"kept_bytes": full.kept_bytes, "recomputed_flops": full.recomputed_flops(none)},
            "selective": {"kept_bytes": selective.kept_bytes, "recomputed_flops": selective.recomputed_flops(none)},
        }
    return rows


def _value(family: Family) -> dict[str, Any]:
    return {"mode": "selective", **({"policy": "general"} if family.policy == "general" else {})}


def _account(plain: nn.Module, inputs: dict[str, Any], value: Any) -> StepAccount:
    model = copy.deepcopy(plain)
    if value is not None:
        sac.apply(model, value)
    torch.manual_seed(0)
    return account_step(_Loss(model, inputs), ())


def sweep(directory: Path) -> dict[str, Any]:
    """Return for each family of transformers its status, kept bytes by mode, and FLOPs of a step by mode."""
    path = directory / "sweep_rows.json"
    if not path.exists():
        _run(directory, "hf_sweep.py", "--jobs", "2", "--json", str(path), output=False)
    rows = json.loads(path.read_text(encoding="utf-8"))
    return {row["family"]: [row["status"], row["kept_bytes"], row["flops"]] for row in rows}


def matrix(directory: Path) -> dict[str, Any]:
    """Return per stack and mode: gradients, and FLOPs, kept bytes and collectives to those without sac."""
    stacks = _run(directory, "composition_matrix.py", "--json")["stacks"]
    names = ("gradients", "flops", "kept", "sent", "missing", "error")
    return {row["stack"]: {cell["mode"]: [cell[name] for name in names] for cell in row["cells"]} for row in stacks}


def overhead(directory: Path) -> dict[str, Any]:
    """Return per case and way: time of a step to torch's full checkpointing, and products that a step runs."""
    cases = _run(directory, "bench_overhead.py", "--json")["cases"]
    return {
        case["case"]: {row["mode"]: [row["ratio_to_torch_full"], row["matmuls"]] for row in case["rows"]}
        for case in cases
    }


def ranks(directory: Path) -> dict[str, Any]:
    """Return the same for two ranks, with the collectives of forward + backward."""
    cases = _run(directory, "bench_overhead.py", "--ranks", "--json")["cases"]
    return {
        case["case"]: {
            row["mode"]: [row["ratio_to_torch_full"], row["matmuls"], row["collectives"]] for row in case["rows"]
        }
        for case in cases
    }


def _run(directory: Path, script: str, *arguments: str, output: bool = True) -> Any:
    """Run a script of scripts/, and return the JSON that it prints; an exit of 1 means that it reports a difference."""
    print(f"{script} {' '.join(arguments)}", file=sys.stderr)
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, cwd=ROOT)
    if done.returncode > 1:
        raise SystemExit(f"{script} ended with {done.returncode}")
    return json.loads(done.stdout) if output else None


PARTS: dict[str, Callable[[Path], Any]] = {
    "policies": lambda directory: policies(),
    "overhead": overhead,
    "ranks": ranks,
    "matrix": matrix,
    "sweep": sweep,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be repeated")
    parser.add_argument(
        "--compare", action="store_true", help="print what is worse than in before.json; 1 if anything is"
    )
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    warnings.simplefilter("ignore")
    for name in options.part or PARTS:
        path = options.directory / f"{name}.json"
        if not path.exists():
            path.write_text(json.dumps(PARTS[name](options.directory)), encoding="utf-8")
    if options.compare:
        sys.exit(_print_worse(json.loads(BEFORE.read_text()), options.directory, options.part or list(PARTS)))
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    known = {
        name: json.loads(path.read_text()) for name in PARTS if (path := options.directory / f"{name}.json").exists()
    }
    machine = {"commit": commit.stdout.strip(), "torch": torch.__version__, "cores": os.cpu_count()}
    BEFORE.write_text(_one_row_a_line({"machine": machine, **known}), encoding="utf-8")


def _print_worse(before: dict[str, Any], directory: Path, parts: list[str]) -> int:
    """Print the rows that are worse than before: more bytes or FLOPs, another status, another gradient, more time."""
    worse = 0
    for part in parts:
        after = json.loads((directory / f"{part}.json").read_text())
        for name, row in before[part].items():
            reasons = _differences(part, row, after.get(name))
            worse += bool(reasons)
            for reason in reasons:
                print(f"{part} {name}: {reason}")
        print(f"{part}: {len(before[part])} rows compared")
    return int(worse > 0)


def _differences(part: str, before: Any, after: Any) -> list[str]:
    if after is None:
        return ["is missing"]
    if part == "sweep":
        return [f"{before[0]} became {after[0]}"] if before[0] != after[0] else []
    if part == "matrix":
        return [
            f"{mode}: {cell[:1]} became {after[mode]}" for mode, cell in before.items() if after[mode][0] != cell[0]
        ]
    if part == "policies":
        pairs = [(mode, key) for mode in ("full", "selective") for key in before[mode]]
        return [f"{m} {k}: {before[m][k]} became {after[m][k]}" for m, k in pairs if after[m][k] > before[m][k]]
    return [f"{way}: {cell} became {after[way]}" for way, cell in before.items() if after[way][0] > cell[0] + 0.05]


def _one_row_a_line(known: dict[str, Any]) -> str:
    parts = []
    for name, rows in known.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main()
