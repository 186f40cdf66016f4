#!/usr/bin/env python3
"""What checkpointing itself costs: step time (forward + backward) of one block, in one run, for each way to do it.

    .venv/bin/python scripts/bench_overhead.py            both cases, about two minutes
    .venv/bin/python scripts/bench_overhead.py --quick    a few rounds of small cases: that it works, not how fast it is

The ways take turns, one step each, and begin with another one in every round. A ratio is the median of the ratios in
single rounds. With one thread the clock is the process's CPU time, which other programs do not disturb; with several
it is the wall's. Before anything is timed, each way's gradients are compared with those of the plain block, bit for
bit, and the matrix products that one step runs are counted: that is how much it recomputes.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from overhead_ways import AROUND_BOTH_PASSES, BASELINE, MATMULS, SAC_FULL, STOCK, TORCH_FULL, WAYS, missing
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.semantics.blocks import LlamaLikeBlock

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One block and one input; `threads` is 0 where torch's own choice stays."""

    key: str
    d: int
    heads: int
    hidden: int
    batch: int
    seq: int
    rounds: int
    warm_up: int
    threads: int

    @property
    def label(self) -> str:
        return f"d={self.d}, {self.heads} heads, MLP {self.hidden}, batch {self.batch}, {self.seq} tokens"


SMALL = Case("small", d=32, heads=4, hidden=64, batch=2, seq=8, rounds=400, warm_up=20, threads=1)
LAYER = Case("layer", d=1024, heads=16, hidden=4096, batch=2, seq=256, rounds=10, warm_up=1, threads=0)
FULL_RUN = (SMALL, LAYER)
QUICK_RUN = (
    replace(SMALL, rounds=5, warm_up=2),
    replace(LAYER, d=128, heads=4, hidden=512, seq=64, rounds=2),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one case. `step_ms` is the median; ratios are medians of those in single rounds."""

    mode: str
    step_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to_none: float
    ratio_to_stock: float
    matmuls: int
    gradients_equal: bool


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of one case; `ops` are those that one plain forward dispatches."""

    case: str
    label: str
    ops: int
    threads: int
    clock: str
    rounds: int
    sac_full_to_torch_full: float
    rows: tuple[Row, ...]


class Runner:
    """One way, on a block of its own with the same weights as everybody's."""

    def __init__(self, mode: str, block: nn.Module, x: Tensor, weights: Tensor, clock: Callable[[], float]) -> None:
        self.block = copy.deepcopy(block)
        self.step = WAYS[mode](self.block)
        self.around = AROUND_BOTH_PASSES.get(mode, contextlib.nullcontext)
        self.x = x.clone().requires_grad_()
        self.weights = weights
        self.clock = clock

    def run(self) -> float:
        """One forward and backward from no gradients; returns its seconds."""
        self.x.grad = None
        for parameter in self.block.parameters():
            parameter.grad = None
        started = self.clock()
        with self.around():
            self.step(self.x).backward(self.weights)
        return self.clock() - started

    def gradients(self) -> list[Tensor]:
        """Those of the last step."""
        tensors = [self.x, *self.block.parameters()]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]


class Count(TorchDispatchMode):
    """Counts ops, and matrix products among them."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.matmuls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        self.matmuls += func in MATMULS
        return func(*args, **(kwargs or {}))


def build(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """The block, its input, and the gradient of its output."""
    torch.manual_seed(0)
    block = LlamaLikeBlock(case.d, case.heads, case.hidden)
    rotary = block.self_attn
    again = -(-case.seq // len(rotary.cos))
    rotary.cos, rotary.sin = rotary.cos.repeat(again, 1), rotary.sin.repeat(again, 1)  # positions start over: same cost
    shape = (case.batch, case.seq, case.d)
    return block, torch.randn(shape), torch.randn(shape)


def measure(case: Case, modes: list[str], advance: Callable[[str], None]) -> Result:
    """Verify, count, warm up and time every way of one case."""
    alone = torch.get_num_threads() == 1
    block, x, weights = build(case)
    with Count() as plain:
        block(x)
    clock = time.process_time if alone else time.perf_counter
    runners = {mode: Runner(mode, block, x, weights, clock) for mode in modes}
    matmuls = {}
    for mode, runner in runners.items():
        advance(f"{case.key}: {mode}")
        matmuls[mode] = warmed_up(runner, case.warm_up)
    reference = runners[BASELINE].gradients()
    equal = {mode: same(runner.gradients(), reference) for mode, runner in runners.items()}
    seconds = time_rounds(case, runners, advance)
    return Result(
        case=case.key,
        label=case.label,
        ops=plain.ops,
        threads=torch.get_num_threads(),
        clock="CPU time" if alone else "wall time",
        rounds=case.rounds,
        sac_full_to_torch_full=ratio(seconds[SAC_FULL], seconds[TORCH_FULL]),
        rows=tuple(row(mode, seconds, matmuls[mode], equal[mode]) for mode in modes),
    )


def warmed_up(runner: Runner, steps: int) -> int:
    """Run some steps, the last one uncounted; returns the matrix products of the one before it."""
    for _ in range(steps):
        runner.run()
    with Count() as counted:
        runner.run()
    runner.run()
    return counted.matmuls


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two lists of gradients are the same bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def time_rounds(case: Case, runners: dict[str, Runner], advance: Callable[[str], None]) -> dict[str, list[float]]:
    """Seconds of each way, by round. Python's cycle collector runs between rounds, not inside a step."""
    seconds: dict[str, list[float]] = {mode: [] for mode in runners}
    order = list(runners)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for index in range(case.rounds):
            turn = index % len(order)
            for mode in order[turn:] + order[:turn]:
                seconds[mode].append(runners[mode].run())
            gc.collect()
            advance(f"{case.key}: round {index + 1}")
    finally:
        gc.enable()
        gc.unfreeze()
    return seconds


def row(mode: str, seconds: dict[str, list[float]], matmuls: int, gradients_equal: bool) -> Row:
    times = sorted(1000 * second for second in seconds[mode])
    return Row(
        mode,
        median(times),
        (times[len(times) // 4], times[-1 - len(times) // 4]),
        ratio(seconds[mode], seconds[BASELINE]),
        ratio(seconds[mode], seconds[STOCK]),
        matmuls,
        gradients_equal,
    )


def ratio(left: list[float], right: list[float]) -> float:
    """The median over rounds of the ratio of two ways."""
    return median(mine / theirs for mine, theirs in zip(left, right, strict=True))


@contextlib.contextmanager
def threads(wanted: int) -> Iterator[None]:
    """Run with this many threads inside an op; 0 leaves torch's choice."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_all(cases: list[Case], modes: list[str], progress: Progress) -> list[Result]:
    """Every case in turn."""
    total = sum(len(modes) + case.rounds for case in cases)
    done = 0

    def advance(label: str) -> None:
        nonlocal done
        done += 1
        progress(done, total, label)

    results = []
    for case in cases:
        with threads(case.threads):
            results.append(measure(case, modes, advance))
    return results


def environment(script: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "command": shlex.join([".venv/bin/python", f"scripts/{script}", *sys.argv[1:]]),
    }


def cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


COLUMNS = ("way", "step", "quartiles", "÷ none", "÷ stock SAC", "matmuls run", "gradients equal")


def cells(row: Row) -> list[str]:
    low, high = row.quartiles_ms
    ratios = [f"{row.ratio_to_none:.2f}", f"{row.ratio_to_stock:.2f}"]
    equal = "yes" if row.gradients_equal else "NO"
    return [row.mode, f"{row.step_ms:.2f} ms", f"{low:.2f}–{high:.2f}", *ratios, str(row.matmuls), equal]


def has_rich() -> bool:
    try:
        import rich  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def print_table(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """Through rich where it is installed, else in plain columns."""
    if has_rich():
        from sac.commands.render import print_rows

        print_rows(columns, rows, right=columns[1:])
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    for row in (list(columns), *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_results(results: list[Result], skipped: dict[str, str], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}")
    for result in results:
        how = f"{result.threads} thread(s), {result.clock}, {result.rounds} rounds"
        print(f"\n{result.case}: {result.ops} ops in forward, {result.label}, {how}")
        print_table(COLUMNS, [cells(row) for row in result.rows])
        print(f"sac full ÷ torch full: {result.sac_full_to_torch_full:.2f}")
    print()
    for mode, reason in skipped.items():
        print(f"{mode} was skipped: {reason}")
    print(
        "step: median. ÷: median of the ratios in single rounds.\n"
        "stock SAC, sac selective and sac.context_fn hold attention and every 2nd matmul; torch_remat the whole\n"
        "attention module; the empty dispatch mode is on in both passes of a block that recomputes nothing.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


@contextlib.contextmanager
def shown_progress(*, quiet: bool) -> Iterator[Progress]:
    """A bar after two seconds, where rich is installed and somebody looks at stderr."""
    if quiet or not sys.stderr.isatty() or not has_rich():
        yield lambda done, total, label: None
        return
    from sac.commands.render import progress_bar

    with progress_bar() as progress:
        yield progress


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few rounds of small cases")
    parser.add_argument("--case", choices=[case.key for case in FULL_RUN], help="only this case")
    parser.add_argument("--rounds", type=int, help="rounds of each case")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    if given.rounds is not None and given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; at least 1 is needed")
    chosen = QUICK_RUN if given.quick else FULL_RUN
    cases = [replace(case, rounds=given.rounds or case.rounds) for case in chosen if given.case in (None, case.key)]
    skipped = missing()
    with shown_progress(quiet=given.json) as progress:
        results = measure_all(cases, [mode for mode in WAYS if mode not in skipped], progress)
    seen = environment("bench_overhead.py")
    if given.json:
        print(json.dumps({**seen, "skipped": skipped, "cases": [asdict(result) for result in results]}, indent=2))
    else:
        print_results(results, skipped, seen)
    return 0 if all(row.gradients_equal for result in results for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
