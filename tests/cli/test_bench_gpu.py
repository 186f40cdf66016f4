"""scripts/bench_gpu.py runs at toy size, on whatever device there is; its gradients, bytes and matmuls are held."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.machine import missing_in_bfloat16_attention
from tests.support.script_runs import run_script

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_gpu.py"
WAYS = ["none", "torch full", "torch_remat", "stock SAC", "sac full", "sac rerun", "sac replay", "sac whole module"]
CASES = ["cpu-bound", "gpu-bound"]
LAYERS = 2
MATMULS = {"none": 21, "torch full": 27, "sac full": 27, "stock SAC": 24, "sac rerun": 24}  # of one layer


@pytest.fixture(scope="module")
def report() -> dict:
    if not torch.cuda.is_available() and (problem := missing_in_bfloat16_attention()):
        pytest.skip(f"torch has no attention in bfloat16 here: {problem}")
    done = run_script(SCRIPT, "--toy", "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module", params=CASES)
def rows(request: pytest.FixtureRequest, report: dict) -> dict:
    """The rows of one case by their way."""
    case = report["cases"][CASES.index(request.param)]
    return {row["mode"]: row for row in case["rows"]}


def test_every_case_holds_a_row_for_every_way_that_can_run(report, rows):
    assert [case["case"] for case in report["cases"]] == CASES
    assert list(rows) == [way for way in WAYS if way not in report["skipped"]]
    assert set(report["skipped"]) <= {"torch_remat", "sac whole module"}


def test_gradients_are_those_of_no_checkpointing_in_every_bit(rows):
    assert all(row["gradients_equal"] for row in rows.values())


def test_times_and_ratios_are_of_the_same_rounds(rows):
    assert rows["none"]["ratio_to_none"] == rows["torch full"]["ratio_to_torch_full"] == 1
    for row in rows.values():
        assert row["quartiles_ms"][0] <= row["step_ms"] <= row["quartiles_ms"][1]
        assert row["host_ms"] > 0
        assert row["tokens_per_s"] > 0


def test_tokens_are_those_of_a_step(report):
    for case, tokens in zip(report["cases"], (8, 256), strict=True):
        for row in case["rows"]:
            assert row["tokens_per_s"] * row["step_ms"] / 1e3 == pytest.approx(tokens)


def test_every_way_recomputes_what_it_should(rows):
    assert {way: rows[way]["matmuls"] for way in MATMULS} == {way: LAYERS * count for way, count in MATMULS.items()}
    assert LAYERS * MATMULS["none"] < rows["sac replay"]["matmuls"] <= rows["sac rerun"]["matmuls"]


def test_every_way_keeps_less_than_no_checkpointing_and_more_than_full(rows):
    for way in {"stock SAC", "sac rerun", "sac replay"}:
        assert rows["torch full"]["kept_bytes"] < rows[way]["kept_bytes"] < rows["none"]["kept_bytes"]
    assert rows["sac full"]["kept_bytes"] <= rows["torch full"]["kept_bytes"]
    for way in {"sac rerun", "sac replay"}:
        assert rows[way]["kept_bytes"] <= rows["stock SAC"]["kept_bytes"]
    for row in rows.values():
        assert row["kept_bytes"] <= row["peak_bytes"]


def test_peak_is_lower_where_less_is_kept(report):
    rows = {row["mode"]: row for row in report["cases"][CASES.index("gpu-bound")]["rows"]}
    for way in {"torch full", "sac full", "sac rerun", "sac replay"}:
        assert rows[way]["peak_bytes"] < rows["none"]["peak_bytes"]


def test_report_says_what_it_was_measured_on(report):
    assert report["torch"] == torch.__version__
    assert report["cores"] == os.cpu_count()
    assert report["cpu"]
    assert report["device"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    assert report["command"] == ".venv/bin/python scripts/bench_gpu.py --toy --json"


def test_table_is_printed_with_its_command_and_versions():
    done = run_script(SCRIPT, "--toy", "--case", "cpu-bound", "--rounds", "1", "--layers", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "$ .venv/bin/python scripts/bench_gpu.py --toy --case cpu-bound --rounds 1 --layers 1\n"
        "\ncpu-bound: d=64, 4 heads (2 KV), MLP 128, batch 1, 8 tokens, bf16, eager\n"
    )
    assert f"torch {torch.__version__}" in done.stdout
    assert max(map(len, done.stdout.split("torch ")[0].splitlines())) <= 110


@pytest.mark.parametrize("option", ["--rounds", "--layers"])
def test_none_are_refused(option):
    done = run_script(SCRIPT, option, "0")
    assert done.returncode == 2
    assert done.stderr.endswith(f"bench_gpu.py: error: {option} is 0; at least 1 is needed\n")


@pytest.fixture(scope="module")
def modules() -> Iterator[None]:
    """The modules of scripts/ can be imported."""
    sys.path.insert(0, str(SCRIPT.parent))
    yield
    sys.path.remove(str(SCRIPT.parent))


class CountingEvent:
    """In place of CUDA's: one is recorded each millisecond, and nothing is known before it is waited for."""

    recorded = 0
    waited_for = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        CountingEvent.recorded += 1
        self.at_ms = CountingEvent.recorded

    def synchronize(self) -> None:
        CountingEvent.waited_for = self.at_ms

    def elapsed_time(self, end: "CountingEvent") -> float:
        assert end.at_ms <= CountingEvent.waited_for, "CUDA raises here: the event is not done"
        return float(end.at_ms - self.at_ms)


def test_cuda_events_stand_around_both_passes(modules, monkeypatch):
    from bench_blocks import build
    from bench_gpu import TOY_RUN
    from bench_rounds import CudaClock, shared_runner

    monkeypatch.setattr(torch.cuda, "Event", CountingEvent)
    plain = shared_runner("none", *build(TOY_RUN[0]), CudaClock())
    for _ in range(2):
        times = plain.run()
        assert (times.forward, times.step) == (0.001, 0.002)
        assert times.host > 0


def test_cuda_bytes_are_the_allocators_on_top_of_what_there_was(modules, monkeypatch):
    from bench_blocks import build
    from bench_gpu import TOY_RUN, kept_and_peak_bytes
    from bench_rounds import CPU_TIME, shared_runner

    allocated = iter([1000, 1600])
    calls = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2500)
    plain = shared_runner("none", *build(TOY_RUN[0]), CPU_TIME)
    assert kept_and_peak_bytes(plain, "cuda") == (600, 1500)
    assert calls == ["synchronize", "reset_peak_memory_stats", "synchronize"]


def test_cuda_device_is_printed_and_the_hosts_time(modules, monkeypatch, capsys):
    from bench_gpu import Result, Row, print_results
    from bench_terminal import hardware

    device = SimpleNamespace(name="Some GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    row = Row("none", 20.0, (19.0, 21.0), 4.0, 400.0, 1.0, 0.5, 2**20, 2**30, 21, True)
    result = Result("cpu-bound", "a block", 67, 3, 2**20, (row,))
    seen = {"command": "c", "torch": "t", "python": "p", "cores": 2, "cpu": "C", **hardware("cuda")}
    print_results([result], {"torch_remat": "cannot run: No module named 'torch_remat'"}, seen)
    printed = capsys.readouterr().out
    assert "Some GPU, 80.0 GiB, CUDA 13.0; torch t" in printed
    assert "torch_remat cannot run: No module named 'torch_remat'\n" in printed
    header, _, cells = printed.split("gradients as much\n")[1].strip().splitlines()[:3]
    assert " ".join(header.split()) == "way step ÷ none ÷ full tokens/s host kept peak equal"
    assert " ".join(cells.split()) == "none 20.00 ms 1.00 0.50 400 4.00 ms 1.0 MiB 1.0 GiB yes"


def test_deterministic_algorithms_are_as_they_were(modules):
    from bench_gpu import deterministic

    before = torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert torch.are_deterministic_algorithms_enabled() is before


@pytest.mark.gpu
def test_on_a_gpu_the_clock_is_the_gpus(report):
    assert report["cuda"] == torch.version.cuda
    assert report["device_bytes"] > 0
