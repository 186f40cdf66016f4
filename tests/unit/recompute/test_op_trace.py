"""`SAC_TRACE` tells each decision once per op and region kind; `decisions_of` gives the rows."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.errors import ConfigError
from sac.reporting import decisions_of, group_label
from tests.support.blocks import alternate, llama_stack, policy, save, selective, tokens
from tests.support.recording import Recorder
from tests.support.training import built

VALUE = selective(policy(save("attention"), alternate("matmul", module="self_attn.**")))
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def run(times: int = 2) -> nn.Module:
    model = sac.apply(built(llama_stack), VALUE)
    for _ in range(times):
        model(*tokens()).sum().backward()
    return model


@pytest.fixture
def log(caplog: Any) -> Iterator[Any]:
    with caplog.at_level(logging.INFO, logger="sac.reporting"):
        yield caplog


def test_log_tells_each_decision_once(monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setenv("SAC_TRACE", "1")
    run()
    assert len(log.messages) == len(set(log.messages))
    assert [line for line in log.messages if "mm" in line or "attention_for" in line] == [
        "SAVE      aten.mm.default in blocks.0.self_attn.q_proj (rule rule-1)",
        "RECOMPUTE aten.mm.default in blocks.0.self_attn.k_proj (rule rule-1)",
        "SAVE      aten.mm.default in blocks.0.self_attn.v_proj (rule rule-1)",
        f"SAVE      {ATTENTION} in blocks.0.self_attn (rule rule-0)",
        "RECOMPUTE aten.mm.default in blocks.0.self_attn.o_proj (rule rule-1)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.gate_proj (default)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.up_proj (default)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.down_proj (default)",
    ]
    assert not any("blocks.1" in line for line in log.messages)  # of the same kind


@pytest.mark.parametrize("value", ["", "0", "false", "OFF", "no"])
def test_off(value: str, monkeypatch: pytest.MonkeyPatch, log: Any) -> None:
    monkeypatch.setenv("SAC_TRACE", value)
    run()
    assert log.messages == []


def test_file_gets_one_line_per_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("SAC_TRACE", str(path))
    model = run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len(decisions_of(model))
    assert {row["region"] for row in rows} == {"blocks.0"}
    (attention,) = (row for row in rows if row["op"] == ATTENTION)
    assert attention.pop("bytes") > 0
    assert attention.pop("flops") > 0
    assert attention == {
        "region": "blocks.0",
        "module": "self_attn",
        "op": ATTENTION,
        "call": 0,
        "decision": "save",
        "rule": "rule-0",
        "reason": "rule rule-0",
        "shape": [2, 4, 8, 8],
        "dtype": "float32",
    }


def test_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SAC_TRACE", str(tmp_path / "no" / "such" / "trace.jsonl"))
    model = built(llama_stack)
    with pytest.raises(ConfigError, match=r'SAC_TRACE: ".*trace.jsonl" cannot be written: No such file or directory'):
        sac.apply(model, VALUE)
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_are_the_ops_that_ran() -> None:
    model, given, recorder = built(lambda: llama_stack(1)), tokens(), Recorder()
    with recorder:
        model(given[0].requires_grad_())
    sac.apply(model, VALUE)
    model(*given)
    del recorder.ops["aten.detach.default"]  # what a mode sees of autograd's own
    assert Counter(row.op for row in decisions_of(model)) == recorder.ops


LABELS = {
    "model.layers.0-31 (x32)": [f"model.layers.{i}" for i in range(32)],
    "h.0-1,4,6-7 (x5)": ["h.0", "h.1", "h.4", "h.6", "h.7"],
    "a.0.b.0, … (x2)": ["a.0.b.0", "a.1.b.1"],
    "a.0-1.b.0-2 (x6)": [f"a.{i}.b.{j}" for i in range(2) for j in range(3)],
}


@pytest.mark.parametrize("label", LABELS)
def test_group_label(label: str) -> None:
    assert group_label(LABELS[label]) == label
