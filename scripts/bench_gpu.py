#!/usr/bin/env python3
"""Step time, tokens per second and memory of each way to checkpoint, on blocks as large as Llama 3's of 8B, in eager.

    python scripts/bench_gpu.py                    on a CUDA device: both cases, bf16, a few minutes
    python scripts/bench_gpu.py --layers 2         where memory is short
    python scripts/bench_gpu.py --toy              tiny blocks: that it works; on CPU there is nothing else

One case has so few tokens that the host decides how long a step takes, the other so many that the GPU does. The ways
take turns, one step each; a ratio is the median of the ratios in single rounds. On CUDA the clock is events on the
stream, on CPU the process's CPU time on one thread. Before anything is timed, each way's gradients are compared with
those of the plain blocks, bit for bit, with torch's deterministic algorithms on (attention's backward on CUDA adds up
in no order otherwise); then they are off again. Needs torch and sac, no network and no other package.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes to stderr whenever it starts and stops
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for the same bits each time: read when CUDA starts

import bench_overhead as bench
import torch
from bench_overhead import BASELINE, TORCH_FULL, Case, Runner

from sac.memory_timeline import mark, measure_memory
from sac.tables import bytes_text

MODES = tuple(mode for mode in bench.WAYS if mode != "sac.context_fn")
DTYPE = torch.bfloat16
STEPS_COMPARED = 2
FORWARD_DONE = "forward done"

FEW_TOKENS = Case(
    "cpu-bound", d=4096, heads=32, kv_heads=8, hidden=14336, batch=1, seq=128, layers=4, rounds=50, warm_up=5
)
MANY_TOKENS = replace(FEW_TOKENS, key="gpu-bound", batch=2, seq=4096, rounds=10, warm_up=2)
FULL_RUN = (FEW_TOKENS, MANY_TOKENS)
TOY = {"d": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "layers": 2, "rounds": 3, "warm_up": 1, "threads": 1}
TOY_RUN = (replace(FEW_TOKENS, **TOY, seq=8), replace(MANY_TOKENS, **TOY, seq=128))


# A row is one way in one case. Times are medians; ratios are medians of those in single rounds. `host_ms`: until the
# host had given a step to the device; on CPU that is the step. `kept_bytes` live at the end of forward, `peak_bytes` at
# most in a step; both on top of parameters and their gradients, which were there before. `gradients_equal`: to those of
# the plain blocks; for these, of one step to those of another.


def measure(case: Case, modes: list[str], device: str, advance: Callable[[str], None]) -> dict[str, Any]:
    """Verify, warm up, time and weigh every way of one case."""
    blocks, x, weights = bench.build(case, device, DTYPE)
    clock = bench.CudaClock() if device == "cuda" else bench.CPU_TIME
    runners = {mode: bench.shared_runner(mode, blocks, x, weights, clock) for mode in modes}
    counted, equal = {}, {}
    reference = None
    torch.use_deterministic_algorithms(True, warn_only=True)  # the same bits each time, where torch has them
    for mode, runner in runners.items():
        advance(f"{case.key}: gradients of {mode}")
        counted[mode], gradients, equal[mode] = bench.warmed_up(runner, STEPS_COMPARED, reference)
        reference = reference or gradients
    torch.use_deterministic_algorithms(False)
    del reference, gradients
    memory = {}
    for mode, runner in runners.items():
        advance(f"{case.key}: memory of {mode}")
        for _ in range(case.warm_up):
            runner.run()
        memory[mode] = kept_and_peak_bytes(runner, device)
    times = bench.time_rounds(case, runners, advance)

    def row(mode: str) -> dict[str, Any]:
        steps = [each.step for each in times[mode]]
        kept, peak = memory[mode]
        return {
            "mode": mode,
            "step_ms": 1e3 * median(steps),
            "host_ms": 1e3 * median(each.host for each in times[mode]),
            "tokens_per_s": case.batch * case.seq / median(steps),
            "ratio_to_none": bench.ratio(times[mode], times[BASELINE]),
            "ratio_to_torch_full": bench.ratio(times[mode], times[TORCH_FULL]),
            "kept_bytes": kept,
            "peak_bytes": peak,
            "flops": counted[mode].flops,
            "gradients_equal": equal[mode],
        }

    return {
        "case": case.key,
        "label": case.label,
        "ops": counted[BASELINE].forward_ops,
        "rounds": case.rounds,
        "parameter_bytes": sum(parameter.nbytes for parameter in blocks.parameters()),
        "rows": [row(mode) for mode in modes],
    }


def kept_and_peak_bytes(runner: Runner, device: str) -> tuple[int, int]:
    """Bytes that live after the forward, and at most, on top of what lived before a step that adds to its gradients."""
    memory = measure_memory(lambda: runner.pass_through(lambda: mark(FORWARD_DONE)), device)
    return memory.at(FORWARD_DONE), memory.peak_bytes


def hardware(device: str) -> dict[str, Any]:
    """What the steps ran on, and the versions that matter in addition to torch's."""
    seen: dict[str, Any] = {"device": "cpu"}
    if device == "cuda":
        properties = torch.cuda.get_device_properties("cuda")
        seen = {"device": properties.name, "device_bytes": properties.total_memory, "cuda": torch.version.cuda}
    with contextlib.suppress(metadata.PackageNotFoundError):
        seen["torch_remat"] = metadata.version("torch_remat")
    return seen


def print_results(results: list[dict[str, Any]], skipped: dict[str, str], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    on_gpu = "cuda" in seen
    columns = ("way", "step", "÷ none", "÷ full", "tokens/s", *(["host"] if on_gpu else []), "kept", "peak", "equal")
    for result in results:
        print(f"\n{result['case']}: {result['label']}, bf16, eager")
        print(f"{result['ops']} ops in forward; {result['rounds']} rounds; ", end="")
        print(f"parameters {bytes_text(result['parameter_bytes'])}, gradients as much")
        bench.print_table(columns, [cells(row, on_gpu=on_gpu) for row in result["rows"]])
    print(*(f"{mode} {reason}" for mode, reason in skipped.items()), sep="\n")
    print(
        "step: median. ÷: median of the ratios in single rounds. kept: at the end of forward, peak: in the step, both\n"
        "on top of parameters and gradients. equal: gradients, to those of none in each bit; of none, to its own.\n"
        "stock SAC, sac rerun and sac replay hold attention and every 2nd matmul; torch_remat and sac whole module\n"
        "the attention module."
    )
    if on_gpu:
        print("host: until the step had been given to the GPU.")
        print(f"{seen['device']}, {bytes_text(seen['device_bytes'])}, CUDA {seen['cuda']}; ", end="")
    remat = f", torch_remat {seen['torch_remat']}" if "torch_remat" in seen else ""
    print(f"torch {seen['torch']}{remat}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}")


def cells(row: dict[str, Any], *, on_gpu: bool) -> list[str]:
    return [
        row["mode"],
        f"{row['step_ms']:.2f} ms",
        f"{row['ratio_to_none']:.2f}",
        f"{row['ratio_to_torch_full']:.2f}",
        f"{row['tokens_per_s']:.0f}",
        *([f"{row['host_ms']:.2f} ms"] if on_gpu else []),
        bytes_text(row["kept_bytes"]),
        bytes_text(row["peak_bytes"]),
        "yes" if row["gradients_equal"] else "NO",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toy", action="store_true", help="tiny blocks and few rounds; without CUDA always")
    parser.add_argument("--case", choices=[case.key for case in FULL_RUN], help="only this case")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--layers", type=int, help="blocks, one after the other")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = [
        replace(case, rounds=given.rounds or case.rounds, layers=given.layers or case.layers)
        for case in (TOY_RUN if given.toy or device == "cpu" else FULL_RUN)
        if given.case in (None, case.key)
    ]
    skipped = {mode: reason for mode, reason in bench.cannot_run().items() if mode in MODES}
    modes, results = [mode for mode in MODES if mode not in skipped], []
    with bench.progress_lines() as progress:
        advance = bench.counting(progress, sum(2 * len(modes) + case.rounds for case in cases))
        for case in cases:
            torch.set_num_threads(case.threads or bench.THREADS)
            results.append(measure(case, modes, device, advance))
    seen = {**bench.environment("bench_gpu.py"), **hardware(device)}
    if given.json:
        print(json.dumps({**seen, "skipped": skipped, "cases": results}, indent=2))
    else:
        print_results(results, skipped, seen)
    return 0 if all(row["gradients_equal"] for result in results for row in result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
