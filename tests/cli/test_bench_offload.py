"""What `scripts/bench_offload.py` simulates."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sac.planner import link_search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import bench_offload
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return bench_offload


def test_goals_on_an_h100(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At full's peak and 1 %, a step takes at most 0.91 times full's; inputs on the host halve full's peak for free."""
    monkeypatch.setattr(link_search, "CHANGES", 1500)
    machine, tokens = bench.MACHINES[0], 8192
    layer = bench.Layer(bench.LLAMA_8B, machine.device, tokens)

    def run(decisions: str, inputs: bool, window: int) -> Any:
        options = (layer.option(decisions, inputs=inputs),)
        windows = bench.Windows(0, window)
        return layer.problem(options, machine.link, 32).run((0,) * 32, windows)

    full, on_host = run(bench.FULL, False, 0), run(bench.FULL, True, 2 * layer.input.bytes)
    assert on_host.peak <= 0.55 * full.peak
    assert on_host.clocked.seconds <= 1.005 * full.clocked.seconds
    budget = int(1.01 * full.peak)
    problem = layer.problem(layer.options("kro", inputs=True), machine.link, 32)
    found = problem.best(budget)
    assert found.peak <= budget
    assert found.clocked.seconds <= 0.91 * full.clocked.seconds
    assert problem.bound(budget) <= found.clocked.seconds


def test_the_host_does_little_for_each_tensor(bench: Any) -> None:
    """Bytecodes, not times; they differ by a fifth between versions of Python."""
    assert 0 < bench.bytecodes_per_tensor() < 2600


def test_table(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_search, "CHANGES", 100)
    found = [*bench.simulated(replace(bench.LLAMA_8B, layers=4), bench.MACHINES[0], 8192)]
    assert len(found) == 9
    assert all(one.plan is not None for one in found)
    text = bench.table_of(found).text(120)
    assert "offload everything" in text
    assert len(bench.break_even().rows) == 9
