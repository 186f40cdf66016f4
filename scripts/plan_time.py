#!/usr/bin/env python3
"""How long `sac plan` takes for models larger than any machine here, next to what `import torch` takes here.

    .venv/bin/python scripts/plan_time.py                 both models, three rounds, some minutes
    .venv/bin/python scripts/plan_time.py --case 70B --rounds 1

CPU time is user and system time of the process and its children. Each round runs `import torch` and each plan once, so
that all see the same machine; the ratio is of the medians. Ends with 1 where a plan takes more than its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Sizes, ranks, budget, and the goal: so many times the CPU time of `import torch`.
CASES = {
    "70B": ((8192, 28672, 80, 64), 64, "40GiB", 15),
    "405B": ((16384, 53248, 126, 128), 512, "80GiB", 30),
}
MOST_GIB = 2.0


def taken(command: list[str]) -> tuple[float, float]:
    """Run a command; return its CPU seconds, and the most GiB that one of its processes has had."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    said = process.stderr.read().decode() if process.stderr is not None else ""
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}\n{said}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=[*CASES], default=[*CASES], help="only these")
    parser.add_argument("--rounds", type=int, default=3, help="of each command (3)")
    given = parser.parse_args()
    imports: list[float] = []
    plans: dict[str, list[tuple[float, float]]] = {case: [] for case in given.case}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(given.rounds):
            imports.append(taken([sys.executable, "-c", "import torch"])[0])
            for case in given.case:
                sizes, ranks, budget, _ = CASES[case]
                config = Path(folder, f"{case}.json")
                config.write_text(json.dumps({**LLAMA, **dict(zip(SIZES, sizes, strict=True))}), encoding="utf-8")
                words = f"--seq 8192 --dtype bfloat16 --device h100 --optimizer adamw --fsdp {ranks} --budget {budget}"
                command = [sys.executable, "-m", "sac.tools.cli", "plan", "--model", f"hf:{config}", *words.split()]
                plans[case].append(taken([*command, "--out", str(Path(folder, "policy.yaml"))]))
    base = median(imports)
    print(f"import torch: {base:.2f} s of CPU time, median of {given.rounds}")
    missed = False
    for case, found in plans.items():
        seconds, most = median(one[0] for one in found), max(one[1] for one in found)
        goal = CASES[case][3]
        missed |= seconds / base > goal or most > MOST_GIB
        print(f"{case}, --fsdp {CASES[case][1]}: {seconds:.1f} s, {seconds / base:.1f} x (goal {goal}), {most:.2f} GiB")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
