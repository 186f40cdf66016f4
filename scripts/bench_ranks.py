#!/usr/bin/env python3
"""What checkpointing costs on layers that two ranks share: under tensor parallelism with DTensor, and under FSDP2.

    .venv/bin/python scripts/bench_ranks.py                      all cases, about two minutes
    .venv/bin/python scripts/bench_ranks.py --rounds 5           few rounds: that it works, not how fast it is
    .venv/bin/python scripts/bench_ranks.py --before DIRECTORY   in addition with the sac of another checkout

The ranks are processes on this machine, connected by gloo over loopback; each sac that is measured has its own pair.
The pairs take turns, and in them the ways, one step each. A ratio is the median, over rounds and ranks, of the ratios
of the CPU time of one process in single rounds: other programs and waiting for the other rank do not count. Before
anything is timed, each rank compares the gradients of each way with those of the plain layers, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist
from bench_terminal import counting, environment, print_table, shown_progress
from overhead_ways import TORCH_FULL
from rank_rounds import CASES, LABEL, LIMIT, RANKS, WAYS, Case

from tests.support.ranks import environment as ranks_environment

ROOT = Path(__file__).resolve().parents[1]
HERE, BEFORE = "here", "before"
AT_ONCE = 2 * len(WAYS)  # each way begins a round as often as any other
ANSWER_SECONDS = 300.0
POLL_SECONDS = 0.01


class RankEndedError(Exception):
    """A rank has ended, or has not answered; the message holds the end of what it has written."""


class Pair:
    """The ranks that use one sac: `tree` is the checkout that it is imported from."""

    def __init__(self, store: dist.TCPStore, name: str, tree: Path) -> None:
        self.store, self.asked = dist.PrefixStore(name, store), 0
        variables = {**os.environ, **ranks_environment(), "PYTHONPATH": str(tree)}
        self.written: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(RANKS)]  # noqa: SIM115 - ends with them
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "scripts/rank_rounds.py"), str(store.port), name, str(rank)],
                env=variables,
                stdout=written,
                stderr=written,
            )
            for rank, written in enumerate(self.written)
        ]

    def ask(self, what: str, case: Case) -> list[Any]:
        """What each rank answers."""
        self.store.set(f"ask {self.asked}", json.dumps({"what": what, "case": asdict(case)}))
        keys = [f"answer {self.asked} {rank}" for rank in range(RANKS)]
        self.asked += 1
        limit = time.monotonic() + ANSWER_SECONDS
        while not self.store.check(keys):
            for rank, process in enumerate(self.processes):
                if process.poll() is not None or time.monotonic() > limit:
                    raise RankEndedError(f"rank {rank} ended or hung while asked to {what}:\n{self.last_words(rank)}")
            time.sleep(POLL_SECONDS)
        return [json.loads(self.store.get(key)) for key in keys]

    def last_words(self, rank: int) -> str:
        self.written[rank].seek(0)
        return self.written[rank].read().decode(errors="replace")[-4000:]

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process, written in zip(self.processes, self.written, strict=True):
            process.wait()
            written.close()


@contextlib.contextmanager
def started(trees: dict[str, Path]) -> Iterator[dict[str, Pair]]:
    """The pairs by name; they end with the context."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    pairs: dict[str, Pair] = {}
    try:
        for name, tree in trees.items():
            pairs[name] = Pair(store, name, tree)
        yield pairs
    finally:
        for pair in pairs.values():
            pair.end()


@dataclass(frozen=True, slots=True)
class Row:
    """One way in one case. `step_ms` is of the first sac; ratios are by the name of the pair that uses it."""

    mode: str
    step_ms: float
    ratios_to_torch_full: dict[str, float]
    matmuls: int
    collectives: str
    gradients_equal: bool


@dataclass(frozen=True, slots=True)
class Result:
    case: str
    label: str
    rounds: int
    rows: tuple[Row, ...]


def measure(case: Case, pairs: dict[str, Pair], advance: Callable[[str], None]) -> Result:
    """Verify and time every way of one case; the pairs take turns of a few rounds."""
    built = {}
    for name, pair in pairs.items():
        built[name] = pair.ask("build", case)
        advance(f"{case.key}: gradients, {name}")
    seconds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in pairs}
    for begin in range(0, case.rounds, AT_ONCE):
        some = replace(case, rounds=min(AT_ONCE, case.rounds - begin))
        for name, pair in pairs.items():
            seconds[name] += pair.ask("rounds", some)
            advance(f"{case.key}: round {begin + some.rounds}, {name}")

    def row(way: str) -> Row:
        first = next(iter(pairs))
        return Row(
            way,
            1e3 * median(step for found in seconds[first] for step in found[way]),
            {name: ratio(found, way) for name, found in seconds.items()},
            built[first][0][way]["matmuls"],
            " or ".join(dict.fromkeys(rank[way]["collectives"] for ranks in built.values() for rank in ranks)),
            all(rank[way]["gradients_equal"] for ranks in built.values() for rank in ranks),
        )

    return Result(case.key, case.label, case.rounds, tuple(map(row, WAYS)))


def ratio(seconds: list[dict[str, list[float]]], way: str) -> float:
    """The median over rounds and ranks of a way's CPU time to that of torch full, in the same round and process."""
    return median(
        mine / theirs for found in seconds for mine, theirs in zip(found[way], found[TORCH_FULL], strict=True)
    )


def print_results(results: list[Result], names: list[str], seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}\n{LABEL}; {RANKS} ranks over gloo, CPU time of a rank, one thread each")
    columns = ("way", "step", *([f"÷ full, {names[0]}", *names[1:]] if len(names) > 1 else ["÷ full"]))
    for result in results:
        print(f"\n{result.case}: {result.label}, {result.rounds} rounds")
        print_table((*columns, "matmuls", "collectives", "equal"), [cells(row) for row in result.rows])
    print(
        f"\nstep: median{f', {names[0]}' if len(names) > 1 else ''}. ÷ full: median of the ratios to torch full in "
        "single rounds of one process.\n"
        "matmuls: matrix products that a step runs on a rank. collectives: those of forward + backward; as many in\n"
        'each column and on each rank, unless there is an "or". equal: gradients of both ranks, to those without\n'
        "checkpointing, in each bit. stock SAC, sac rerun and sac replay hold attention and every 2nd matmul."
    )
    if BEFORE in names:
        print(f"before: the sac of {seen['before']}")
    print(f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}")


def cells(row: Row) -> list[str]:
    ratios = [f"{each:.2f}" for each in row.ratios_to_torch_full.values()]
    counts = [str(row.matmuls), row.collectives]
    return [row.mode, f"{row.step_ms:.2f} ms", *ratios, *counts, "yes" if row.gradients_equal else "NO"]


def commit_of(tree: Path) -> str:
    """The commit that a checkout is at, with its date; where there is none, the directory."""
    command = ["git", "-C", str(tree), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or str(tree)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), help="only this case")
    parser.add_argument("--rounds", type=int, default=120, help="rounds of each case")
    parser.add_argument("--before", type=Path, metavar="DIRECTORY", help="one more, with the sac of this checkout")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds is {given.rounds}; at least 1 is needed")
    if given.before is not None and not (given.before / "sac/__init__.py").is_file():
        parser.error(f"--before is {given.before}, which has no sac/__init__.py")
    trees = {HERE: ROOT}
    trees |= {BEFORE: given.before.resolve()} if given.before is not None else {}
    seen = environment("bench_ranks.py")
    seen |= {"before": commit_of(given.before)} if given.before is not None else {}
    warm_up = 2 if given.rounds < 20 else 10
    cases = [Case(key, label, given.rounds, warm_up) for key, label in CASES.items() if given.case in (None, key)]
    turns = len(trees) * (1 + -(-given.rounds // AT_ONCE))
    with shown_progress(quiet=given.json) as progress, started(trees) as pairs:
        advance = counting(progress, turns * len(cases))
        results = [measure(case, pairs, advance) for case in cases]
    if given.json:
        print(json.dumps({**seen, "cases": [asdict(result) for result in results]}, indent=2))
    else:
        print_results(results, list(trees), seen)
    return 0 if all(row.gradients_equal for result in results for row in result.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
