"""Where one way to checkpoint spends more time than the block needs: by pass, per op, by file and function."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench_blocks import Case, build
from bench_rounds import CPU_TIME, Counted, Runner, Times, shared_runner, time_rounds, warmed_up
from bench_terminal import Progress, counting, print_table
from overhead_ways import BASELINE, STOCK, TORCH_FULL

FUNCTIONS_SHOWN, FILES_SHOWN = 25, 12
PLACE_WIDTH = 46
FOLDERS = (f"{Path(__file__).resolve().parents[1]}/", "/site-packages/", "/lib/python")

Place = tuple[str, int, str]  # file, line and name of a function, as pstats has them
Cost = tuple[float, float]  # calls, and microseconds in the function itself
NOTHING: Cost = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PassRow:
    """One way. Microseconds are medians; `more` is the median difference to no checkpointing in single rounds.

    `ops_again`: ops that its backward runs on top of those without checkpointing. `per_op_us`: the difference, divided
    by the ops of forward or by those; none where there are none.
    """

    mode: str
    forward_us: float
    forward_more_us: float
    forward_ops: int
    forward_per_op_us: float | None
    backward_us: float
    backward_more_us: float
    ops_again: int
    backward_per_op_us: float | None


@dataclass(frozen=True, slots=True)
class CostRow:
    """One function or file: its own time in a step, not that of what it calls, less what `none` spends there."""

    place: str
    forward_calls: float
    forward_us: float
    backward_calls: float
    backward_us: float


@dataclass(frozen=True, slots=True)
class Where:
    """What was found of one way; `functions` and `files` are those that cost most, then one row for all others."""

    way: str
    case: str
    label: str
    rounds: int
    passes: tuple[PassRow, ...]
    files: tuple[CostRow, ...]
    functions: tuple[CostRow, ...]


def where(way: str, case: Case, progress: Progress) -> Where:
    """Time both passes of the way, in turns with three known ones; then profile it and the plain block."""
    modes = list(dict.fromkeys((BASELINE, TORCH_FULL, STOCK, way)))
    advance = counting(progress, len(modes) + 2 * case.rounds)
    blocks, x, weights = build(case)
    runners = {mode: shared_runner(mode, blocks, x, weights, CPU_TIME) for mode in modes}
    counted = {}
    for mode, runner in runners.items():
        advance(mode)
        counted[mode], _, _ = warmed_up(runner, case.warm_up, None)
    times = time_rounds(case, runners, advance)
    passes = tuple(pass_row(mode, times, counted) for mode in modes)
    forward, again = profiled(runners[way], runners[BASELINE], case.rounds, advance)
    files = dearest(by_name(forward, file_of), by_name(again, file_of), FILES_SHOWN)
    functions = dearest(by_name(forward, label), by_name(again, label), FUNCTIONS_SHOWN)
    return Where(way, case.key, case.label, case.rounds, passes, files, functions)


def pass_row(mode: str, times: dict[str, list[Times]], counted: dict[str, Counted]) -> PassRow:
    rounds = list(zip(times[mode], times[BASELINE], strict=True))
    forward_more = 1e6 * median(mine.forward - plain.forward for mine, plain in rounds)
    backward_more = 1e6 * median(backward(mine) - backward(plain) for mine, plain in rounds)
    forward_ops = counted[mode].forward_ops
    again = counted[mode].backward_ops - counted[BASELINE].backward_ops
    return PassRow(
        mode,
        1e6 * median(each.forward for each in times[mode]),
        forward_more,
        forward_ops,
        forward_more / forward_ops if mode != BASELINE else None,
        1e6 * median(backward(each) for each in times[mode]),
        backward_more,
        again,
        backward_more / again if again else None,
    )


def backward(times: Times) -> float:
    return times.step - times.forward


def profiled(
    mine: Runner, plain: Runner, steps: int, advance: Callable[[str], None]
) -> tuple[dict[Place, Cost], dict[Place, Cost]]:
    """Own time of functions in the forward and in the backward of the one, less that in the other."""
    profiles = {runner: (cProfile.Profile(), cProfile.Profile()) for runner in (mine, plain)}
    for index in range(steps):
        for runner, passes in profiles.items():
            profile_step(runner, *passes)
        advance(f"profiled step {index + 1}")
    forward, backward = (
        difference(own_times(profiles[mine][index], steps), own_times(profiles[plain][index], steps))
        for index in (0, 1)
    )
    return forward, backward


def profile_step(runner: Runner, forward: cProfile.Profile, backward: cProfile.Profile) -> None:
    """One step; on CPU its backward runs on this thread, where the profiler sees Python's functions."""

    def change_over() -> None:
        forward.disable()
        backward.enable()

    runner.clear()
    forward.enable()
    try:
        runner.pass_through(change_over)
    finally:
        forward.disable()
        backward.disable()


def own_times(profile: cProfile.Profile, steps: int) -> dict[Place, Cost]:
    stats: Any = pstats.Stats(profile)
    return {place: (cost[1] / steps, 1e6 * cost[2] / steps) for place, cost in stats.stats.items()}


def difference(mine: dict[Place, Cost], plain: dict[Place, Cost]) -> dict[Place, Cost]:
    """The first less the second; a function that only one of the two has called cost the other nothing."""
    found = {}
    for place in mine.keys() | plain.keys():
        (calls, us), (plain_calls, plain_us) = mine.get(place, NOTHING), plain.get(place, NOTHING)
        found[place] = (calls - plain_calls, us - plain_us)
    return found


def by_name(costs: dict[Place, Cost], name: Callable[[Place], str]) -> dict[str, Cost]:
    """Costs added up over the places that have one name."""
    sums: dict[str, Cost] = {}
    for place, (calls, us) in costs.items():
        before = sums.get(name(place), NOTHING)
        sums[name(place)] = (before[0] + calls, before[1] + us)
    return sums


def dearest(forward: dict[str, Cost], backward: dict[str, Cost], shown: int) -> tuple[CostRow, ...]:
    """The names by how much they cost in both passes, and a last row for those that are not shown."""
    names = forward.keys() | backward.keys()
    rows = [CostRow(name, *forward.get(name, NOTHING), *backward.get(name, NOTHING)) for name in names]
    rows.sort(key=lambda row: (-abs(row.forward_us + row.backward_us), row.place))
    rest = rows[shown:]
    sums = [sum(getattr(row, name) for row in rest) for name in CostRow.__slots__[1:]]
    return (*rows[:shown], CostRow(f"{len(rest)} others", *sums))


def file_of(place: Place) -> str:
    """The file, from the root of this repository or of the package; what is written in C has none."""
    file, line, _ = place
    if not line:
        return "in C: torch's ops and Python's own functions"
    for folder in FOLDERS:
        file = file.rpartition(folder)[2]
    return cut(file)


def label(place: Place) -> str:
    """The function's name and where it stands."""
    _, line, name = place
    return cut(f"{file_of(place)}:{line} {name}" if line else name.strip("<>").removeprefix("built-in method "))


def cut(text: str) -> str:
    """What fits into the column, from the right."""
    return text if len(text) <= PLACE_WIDTH else f"…{text[1 - PLACE_WIDTH :]}"


PASS_COLUMNS = ("way", "forward", "− none", "ops", "per op", "backward", "− none", "again", "per op")
COST_COLUMNS = ("forward us", "calls", "backward us", "calls")


def print_where(found: Where, seen: dict[str, Any]) -> None:
    print(f"$ {seen['command']}\n\n{found.case}: {found.label}, one thread, CPU time, {found.rounds} rounds, in us")
    print_table(PASS_COLUMNS, [pass_cells(row) for row in found.passes])
    print(f"\n{found.way}, less none: own time in one step, under Python's profiler")
    for column, rows in (("file", found.files), ("function", found.functions)):
        print_table((column, *COST_COLUMNS), [cost_cells(row) for row in rows])
    print(
        "\nforward, backward: medians. − none: median of the differences in single rounds. ops: those of forward.\n"
        "again: ops that backward runs more than none's. per op: the difference, divided by them. The profiler makes\n"
        "Python's functions look dearer than they are: read its times as shares, and the first table as times.\n"
        f"torch {seen['torch']}, Python {seen['python']}, {seen['cores']} cores of {seen['cpu']}"
    )


def pass_cells(row: PassRow) -> list[str]:
    def per_op(us: float | None) -> str:
        return "–" if us is None else f"{us:.1f}"

    return [
        row.mode,
        f"{row.forward_us:.0f}",
        f"{row.forward_more_us:.0f}",
        str(row.forward_ops),
        per_op(row.forward_per_op_us),
        f"{row.backward_us:.0f}",
        f"{row.backward_more_us:.0f}",
        str(row.ops_again),
        per_op(row.backward_per_op_us),
    ]


def cost_cells(row: CostRow) -> list[str]:
    calls = f"{row.forward_calls:.1f}", f"{row.backward_calls:.1f}"
    return [row.place, f"{row.forward_us:.0f}", calls[0], f"{row.backward_us:.0f}", calls[1]]
