"""`SAC_TRACE` tells each decision once per op and region kind; `decisions_of` gives the rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import sac
from sac.errors import ConfigError
from sac.reporting import decisions_of, group_label
from tests.support.blocks import alternate, llama_stack, policy, save, selective, tokens
from tests.support.model_zoo import tiny
from tests.support.recording import Recorder
from tests.support.training import built

VALUE = selective(policy(save("attention"), alternate("matmul", module="self_attn.**")))


def run(value: Any = VALUE, layers: int = 2, times: int = 2) -> nn.Module:
    model = sac.apply(built(lambda: llama_stack(layers)), value)
    for _ in range(times):
        model(*tokens()).sum().backward()
    return model


ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sac.reporting"]


def test_log_tells_each_decision_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SAC_TRACE", "1")
    caplog.set_level(logging.INFO, logger="sac.reporting")
    run()
    seen = lines(caplog)
    assert len(seen) == len(set(seen))
    assert [line for line in seen if "mm" in line or "attention_for" in line] == [
        "SAVE      aten.mm.default in blocks.0.self_attn.q_proj (rule rule-1)",
        "RECOMPUTE aten.mm.default in blocks.0.self_attn.k_proj (rule rule-1)",
        "SAVE      aten.mm.default in blocks.0.self_attn.v_proj (rule rule-1)",
        f"SAVE      {ATTENTION} in blocks.0.self_attn (rule rule-0)",
        "RECOMPUTE aten.mm.default in blocks.0.self_attn.o_proj (rule rule-1)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.gate_proj (default)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.up_proj (default)",
        "RECOMPUTE aten.mm.default in blocks.0.mlp.down_proj (default)",
    ]
    assert not any("blocks.1" in line for line in seen)  # of the same kind


@pytest.mark.parametrize("value", [None, "", "0", "false", "OFF", "no"])
def test_off(value: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SAC_TRACE", raising=False)
    if value is not None:
        monkeypatch.setenv("SAC_TRACE", value)
    caplog.set_level(logging.INFO, logger="sac.reporting")
    run()
    assert lines(caplog) == []


def test_file_gets_one_line_per_op(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv("SAC_TRACE", str(path))
    model = run()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["region"] for row in rows} == {"blocks.0"}
    attention = [row for row in rows if row["op"] == ATTENTION]
    assert attention == [
        {
            "region": "blocks.0",
            "module": "self_attn",
            "op": ATTENTION,
            "call": 0,
            "decision": "save",
            "rule": "rule-0",
            "reason": "rule rule-0",
            "bytes": attention[0]["bytes"],
            "flops": attention[0]["flops"],
            "shape": [2, 4, 8, 8],
            "dtype": "float32",
        }
    ]
    assert len(rows) == len(decisions_of(model))


def test_file_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "trace.jsonl"
    monkeypatch.setenv("SAC_TRACE", str(path))
    model = built(llama_stack)
    with pytest.raises(ConfigError) as caught:
        sac.apply(model, VALUE)
    assert str(caught.value) == (
        f'SAC_TRACE: "{path}" cannot be written: No such file or directory\n    legal: 1, or a path for JSON lines'
    )
    assert not any("forward" in vars(module) for module in model.modules())


def test_rows_are_the_ops_that_ran() -> None:
    model = built(lambda: llama_stack(1))
    recorder = Recorder()
    with recorder:
        model(*(x.requires_grad_() for x in tokens()))
    sac.apply(model, VALUE)
    model(*(x.requires_grad_() for x in tokens()))
    counted: dict[str, int] = {}
    for row in decisions_of(model):
        counted[row.op] = counted.get(row.op, 0) + 1
    made_by_the_test = {"aten.randn.default", "aten.detach.default"}
    assert {k: v for k, v in counted.items() if k not in made_by_the_test} == {
        k: v for k, v in recorder.ops.items() if k not in made_by_the_test
    }


def test_rows() -> None:
    model = run(times=1)
    rows = decisions_of(model)
    assert {row.region for row in rows} == {"blocks.0-1 (x2)"}
    gate = [row for row in rows if row.module == "mlp.gate_proj" and row.op == "aten.mm.default"]
    assert [(row.call, row.decision, row.rule, row.reason) for row in gate] == [(0, "recompute", "", "default")]
    assert [(row.bytes, row.flops) for row in gate] == [(4 * 16 * 64, 2 * 16 * 32 * 64)]
    views = [row for row in rows if row.op == "aten.view.default"]
    assert views
    assert {(row.decision, row.bytes) for row in views} == {("recompute", 0)}


def test_must_save_is_a_reason() -> None:
    model, inputs = tiny("mixtral")
    sac.apply(model, "full")
    model(**inputs)
    kept = {(row.op, row.reason) for row in decisions_of(model) if row.decision == "save"}
    assert ("aten.topk.default", "must-save") in kept
    assert {reason for _, reason in kept} == {"must-save"}


LABELS = {
    "one": (["model.layers.3"], "model.layers.3"),
    "the model": ([""], "(model)"),
    "range": ([f"model.layers.{i}" for i in range(32)], "model.layers.0-31 (x32)"),
    "holes": (["h.0", "h.1", "h.4", "h.6", "h.7"], "h.0-1,4,6-7 (x5)"),
    "order": (["h.10", "h.9", "h.8"], "h.8-10 (x3)"),
    "part": (["h.0.mlp", "h.1.mlp"], "h.0-1.mlp (x2)"),
    "two places": (["a.0.b.0", "a.1.b.1"], "a.0.b.0, … (x2)"),
    "each with each": ([f"a.{i}.b.{j}" for i in range(2) for j in range(3)], "a.0-1.b.0-2 (x6)"),
    "names": (["left", "right"], "left, … (x2)"),
    "lengths": (["h.0", "h.1.mlp"], "h.0, … (x2)"),
}


@pytest.mark.parametrize(("paths", "label"), LABELS.values(), ids=LABELS.keys())
def test_group_label(paths: list[str], label: str) -> None:
    assert group_label(paths) == label
