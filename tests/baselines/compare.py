#!/usr/bin/env python3
"""Prints which policies keep or recompute more on a family than before the engine was replaced (`before.json`).

    .venv/bin/python tests/baselines/compare.py      about fifteen minutes on a free core; 1 if anything is worse

`before.json` was written at 83dbc8d without the C++ library. Its other parts hold the status of each family of the
sweep (`scripts/hf_sweep.py --json`), the matrix of stacks (`scripts/composition_matrix.py --json`), and times relative
to torch's full checkpointing (`scripts/bench_overhead.py --json`). It goes with the last issue that
compares with it.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch  # noqa: E402 - behind the settings of the environment
from torch import nn  # noqa: E402

import sac  # noqa: E402
from sac.blocks.kv_cache import turn_off_cache  # noqa: E402
from tests.policies.families import FAMILIES, STRANGERS, Family, loss_of  # noqa: E402
from tests.policies.training import DROPOUT  # noqa: E402
from tests.support.accountant import StepAccount, account_step  # noqa: E402


class _Loss(nn.Module):
    """Returns the loss of a family's model on its inputs."""

    def __init__(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs

    def forward(self) -> torch.Tensor:
        return loss_of(self.model, self.inputs)


def account(plain: nn.Module, inputs: dict[str, Any], value: Any) -> StepAccount:
    model = copy.deepcopy(plain)
    if value is not None:
        sac.apply(model, value)
    torch.manual_seed(0)
    return account_step(_Loss(model, inputs), ())


def measured(family: Family) -> dict[str, dict[str, int]]:
    """Return kept bytes and recomputed FLOPs of the family under full and under its policy."""
    plain, inputs = family.build(DROPOUT)
    turn_off_cache(plain)
    policy = {"policy": "general"} if family.policy == "general" else {}
    none = account(plain, inputs, None)
    found = {"full": account(plain, inputs, "full")}
    found["selective"] = account(plain, inputs, {"mode": "selective", **policy})
    return {
        mode: {"kept_bytes": one.kept_bytes, "recomputed_flops": one.recomputed_flops(none)}
        for mode, one in found.items()
    }


def main() -> int:
    warnings.simplefilter("ignore")
    before, is_worse = json.loads(Path(__file__).with_name("before.json").read_text())["policies"], False
    for family in (*FAMILIES, *STRANGERS):
        after = measured(family)
        for mode, figures in after.items():
            for name, figure in figures.items():
                if figure > (then := before[str(family)][mode][name]):
                    print(f"{family}, {mode}: {name} {then} became {figure}")
                    is_worse = True
    return int(is_worse)


if __name__ == "__main__":
    sys.exit(main())
