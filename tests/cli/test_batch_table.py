"""scripts/batch_table.py: the largest batch is one that was run and the next one does not fit; times are not held."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.script_runs import run_script

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "batch_table.py"
QUICK = ("--quick", "--rounds", "1", "--case", "llama")
MIB = 2**20


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture
def refused(modules, monkeypatch, capsys) -> Callable[..., str]:
    """Calls the script in this process with arguments that it refuses; returns what it wrote to stderr."""
    from batch_table import main

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        try:
            status = main()
        except SystemExit as end:  # from argparse
            status = end.code
        assert status == 2
        error = capsys.readouterr().err
        return error[error.index("batch_table.py: ") :]

    return run


LINES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 50)), min_size=1, max_size=4)


@given(LINES, st.integers(1, 50), st.integers(0, 20_000))
def test_largest_batch_is_what_running_every_batch_would_find(modules, lines, slope, budget):
    from batch_search import largest_batch

    ran = []

    def peak(batch: int) -> int:
        ran.append(batch)
        return max(start + rise * batch for start, rise in [*lines, (0, slope)])

    fit = largest_batch(peak, budget)
    batch = 0
    while peak(batch + 1) <= budget:
        batch += 1
    assert fit.batch == batch
    assert fit.peaks == {size: peak(size) for size in fit.peaks}
    assert {fit.batch + 1} | ({fit.batch} if fit.batch else set()) <= set(fit.peaks)


def test_a_batch_is_run_once_and_few_are(modules):
    from batch_search import largest_batch

    ran: list[int] = []

    def peak(batch: int) -> int:
        ran.append(batch)
        return max(300, 100 + 7 * batch)

    assert largest_batch(peak, 1000).batch == 128
    assert len(ran) == len(set(ran)) <= 8
    assert max(ran) <= 4 * 128


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict:
    picture = tmp_path_factory.mktemp("picture") / "batches.png"
    done = run_script(SCRIPT, *QUICK, "--json", "--picture", str(picture))
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    return json.loads(done.stdout)


def test_the_largest_batch_fits_and_the_next_does_not(report):
    (case,) = report["cases"]
    assert report["memory_bytes"] == 136 * MIB
    for row in case["rows"]:
        assert row["largest_peak_bytes"] <= report["memory_bytes"] < row["next_peak_bytes"]
        ran = {point["batch"]: point["peak_bytes"] for point in case["points"] if point["mode"] == row["mode"]}
        assert ran[row["largest_batch"]] == row["largest_peak_bytes"]
        assert ran[row["largest_batch"] + 1] == row["next_peak_bytes"]
        assert ran[case["batch"]] == row["peak_bytes"]


def test_memory_counts_weights_gradients_and_optimizer_state(report):
    (case,) = report["cases"]
    assert case["held_bytes"] > 3 * 4 * case["parameters"]
    assert case["gradient_bytes"] == 4 * case["parameters"]
    for point in case["points"]:
        assert point["peak_bytes"] > case["held_bytes"] + case["gradient_bytes"]


def test_checkpointing_frees_memory_and_takes_larger_batches(report):
    (case,) = report["cases"]
    none, full, selective = case["rows"]
    assert none["mode"] == "none"
    assert none["largest_batch"] == case["batch"] < selective["largest_batch"] <= full["largest_batch"]
    assert 0 == none["freed_percent"] < selective["freed_percent"] <= full["freed_percent"]
    assert none["step_to_none"] == none["tokens_to_none"] == 1


def test_gradients_are_equal_in_every_mode(report):
    assert all(row["gradients_equal"] for case in report["cases"] for row in case["rows"])


def test_report_says_what_it_was_measured_on(report):
    assert report["torch"] == torch.__version__
    assert report["threads"] == 1
    assert report["command"].startswith(
        ".venv/bin/python scripts/batch_table.py --quick --rounds 1 --case llama --json"
    )


def test_a_mode_that_fits_nothing_has_a_row_and_says_what_it_needs(modules, report):
    from batch_rows import Result, Row
    from batch_table import cells

    row = Row("none", True, 300 * MIB, 0.0, 1.0, 1.0, 0, 0, 300 * MIB, 0.0, None)
    (found,) = cells(Result("T5", "", 1, 1, 1, 1, (row,), ()))
    assert found == ["none", "300.0 MiB", "0 %", "1.00 s", "1.00", "–", "300.0 MiB at 1", "–", "–", "yes"]


def test_the_closing_words_are_computed(modules):
    from batch_rows import Point, Result, Row
    from batch_verdict import verdict

    none = Row("none", True, 1000, 0.0, 2.0, 1.0, 8, 1000, 1100, 400.0, 1.0)
    full = Row("full", True, 640, 36.0, 2.8, 1.4, 30, 1000, 1100, 300.0, 0.75)
    points = (
        *(Point("none", 1, 300, 100.0), Point("none", 8, 1000, 400.0)),
        *(Point("full", 8, 640, 290.0), Point("full", 30, 1000, 300.0)),
    )
    assert verdict([Result("T5", "", 1, 1, 1, 8, (none, full), points)]) == (
        "The classic claim is 33-38 % of memory freed for 20-25 % of time, and 2-3x throughput from the larger batch.\n"
        "T5, full: 36 % of memory freed for 40 % more time; 3.8x the batch, 0.75x the throughput. "
        "The claim: memory yes, time no, throughput no.\n"
        "Throughput that a larger batch brings by itself, T5: none 4.00x from 1 to 8, full 1.03x from 8 to 30."
    )


def test_a_budget_below_what_is_always_held_is_an_error_that_says_the_least(refused):
    assert refused(*QUICK, "--memory", "64MiB") == (
        "batch_table.py: --memory: 64.0 MiB is less than weights, gradients and optimizer state of Llama take\n"
        "    legal: more than 110.3 MiB\n"
    )


def test_a_budget_that_holds_no_batch_is_an_error_that_says_the_least(refused):
    assert refused(*QUICK, "--memory", "110.5MiB") == (
        "batch_table.py: --memory: 110.5 MiB holds no batch of 1 of Llama in any mode\n"
        "    legal: at least 120.4 MiB, which is what none takes\n"
    )


def test_a_budget_that_is_no_size(refused):
    assert refused("--memory", "2 gigs") == (
        'batch_table.py: --memory: "2 gigs": the unit "gigs" is none of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB\n'
        '    legal: a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB"\n'
    )


def test_a_budget_above_what_there_is(refused):
    found = refused("--memory", "4096TiB")
    assert found.startswith("batch_table.py: --memory: 4096.0 TiB is more than this machine has\n    legal: at most ")


def test_a_mode_that_there_is_not(refused):
    assert "did you mean: full" in refused(*QUICK, "--modes", "ful")


@pytest.mark.parametrize("option", ["--rounds", "--layers", "--threads"])
def test_none_are_refused(refused, option):
    assert refused(option, "0").endswith(f"batch_table.py: error: {option} is 0; at least 1 is needed\n")


@pytest.mark.gpu
def test_memory_on_a_gpu_is_found_too():
    done = run_script(SCRIPT, *QUICK, "--device", "cuda")
    assert done.returncode == 0, done.stderr


def test_the_page_has_what_the_script_prints(modules):
    from batch_table import CASES
    from batch_verdict import CLAIM

    page = (ROOT / "docs" / "batch-table.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- batch-table -->\n```\n(.*?)```\n<!-- /batch-table -->", page, re.DOTALL)
    assert block.startswith("$ .venv/bin/python scripts/batch_table.py --picture docs/batch-table.png\n")
    assert CLAIM in block
    for case in CASES:
        assert re.search(rf"^{case.key}: {re.escape(case.label)}, ", block, re.MULTILINE)
        for mode in ("full", "selective"):
            assert f"{case.key}, {mode}: " in block
    assert re.search(r"torch \d.*, Python \d.*, \d+ cores of \S", block)
    assert (ROOT / "docs" / "batch-table.png").exists()
