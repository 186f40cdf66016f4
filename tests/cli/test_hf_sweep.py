"""The sweep over Hugging Face families: it passes where it should, it can fail, and the page says what it found."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.script_runs import run_script, run_script_alone

transformers = pytest.importorskip("transformers", reason="the sweep is over transformers' families")

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "hf_sweep.py"
PAGE = ROOT / "docs" / "hf-sweep.md"
ORDER = ("passes", "FAILS", "not trainable", "cannot be built")

# Of each kind of model one: text, state spaces, experts, encoders, sound, vision, several towers, time series.
FAMILIES = (
    "llama", "mamba", "qwen3_moe", "bert", "t5", "wav2vec2", "vit", "resnet", "clip", "llava",
    "time_series_transformer",
)  # fmt: skip


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    return importlib.import_module("sweep.checking")


@pytest.fixture
def gpt2(checking: Any) -> Any:
    return checking.build("gpt2", time.process_time() + 60)


@pytest.mark.slow
def test_families_of_every_kind_pass() -> None:
    done = run_script_alone(SCRIPT, "--json", "-", "--family", *FAMILIES)
    rows = {row["family"]: row for row in json.loads(done.stdout)}
    assert list(rows) == [name for name in transformers.CONFIG_MAPPING if name in FAMILIES]
    assert {name: row["reason"] for name, row in rows.items() if row["status"] != "passes"} == {}
    assert done.returncode == 0
    for row in rows.values():
        assert row["kept_bytes"]["full"] < row["kept_bytes"]["none"]
        assert row["flops"]["none"] <= row["flops"]["selective"] <= row["flops"]["full"]
        assert row["blocks"]


def test_an_unknown_family_is_told() -> None:
    done = run_script(SCRIPT, "--family", "lama")
    assert done.returncode == 2
    assert f"transformers {transformers.__version__} does not know lama" in done.stderr


def row_of(checking: Any, built: Any) -> Any:
    row = checking.Row("gpt2", "cannot be built")
    checking._check(built, row)
    return row


def test_a_family_passes(checking: Any, gpt2: Any) -> None:
    row = row_of(checking, gpt2)
    assert (row.status, row.reason) == ("passes", "")
    assert row.blocks == {"transformer.h (GPT2Block)": 2}


def test_checkpointing_that_is_off_fails(checking: Any, gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking.sac, "apply", lambda model, mode: model)
    row = row_of(checking, gpt2)
    kept = row.kept_bytes["none"]
    assert row.status == "FAILS"
    assert row.reason == "; ".join(f"{mode}: {kept} bytes kept, {kept} without" for mode in ("full", "selective"))


def test_another_gradient_fails(checking: Any, gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = checking.sac.apply

    def disturb(model: Any, mode: str) -> Any:
        if mode == "full":
            weight = model.get_submodule("transformer.h.1.mlp.c_fc").weight
            weight.register_hook(lambda gradient: torch.nextafter(gradient, gradient + 1))
        return apply(model, mode)

    monkeypatch.setattr(checking.sac, "apply", disturb)
    row = row_of(checking, gpt2)
    assert row.status == "FAILS"
    assert re.fullmatch(
        r"full: 4 of \d+ differ: step 0: transformer.h.1.mlp.c_fc.weight, step 1: transformer.h.1.mlp.c_fc.weight, "
        r"step 2 in eval mode: transformer.h.1.mlp.c_fc.weight and 1 more",
        row.reason,
    )


def test_a_model_that_does_not_repeat_itself_is_not_trainable(checking: Any, gpt2: Any) -> None:
    calls = []

    def drift(module: Any, args: Any, output: Any) -> Any:
        calls.append(module)
        return output * (1 + len(calls) / 100)

    gpt2.model.transformer.wte.register_forward_hook(drift)
    with pytest.raises(checking.NotTrainable, match="two runs without sac differ: step 0: loss"):
        row_of(checking, gpt2)


def test_a_model_that_takes_one_step_only_is_not_trainable(checking: Any, gpt2: Any) -> None:
    kept = []

    def cache(module: Any, args: Any, output: Any) -> Any:
        kept.append(output)
        return kept[0]

    gpt2.model.transformer.h[0].mlp.register_forward_hook(cache)
    with pytest.raises(checking.NotTrainable, match="a second step without sac: RuntimeError: Trying to backward"):
        row_of(checking, gpt2)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("sam2_video", "the forward of Sam2VideoModel runs in inference mode"),
        ("inkling_audio", "nothing to recompute: it has embeddings and norms, and no layer"),
    ],
)
def test_a_model_with_nothing_to_train_or_recompute_is_not_trainable(checking: Any, family: str, reason: str) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    row = checking.check_family(family, 60)
    assert (row.status, row.reason) == ("not trainable", reason)


# The page


def page_rows() -> list[list[str]]:
    text = PAGE.read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| family \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]


def test_the_counts_of_the_page_are_those_of_its_rows() -> None:
    results = Counter(row[-1].partition(":")[0] for row in page_rows())
    assert set(results) <= set(ORDER)
    names = {"passes": "pass", "FAILS": "FAIL"}
    told = f"{results.total()} families: " + ", ".join(f"{results[name]} {names.get(name, name)}" for name in ORDER)
    assert told in PAGE.read_text(encoding="utf-8")


def test_every_family_that_did_not_pass_has_a_reason() -> None:
    for row in page_rows():
        status, _, reason = row[-1].partition(": ")
        assert (status == "passes") == (reason == ""), row


def test_the_page_has_a_row_for_every_family() -> None:
    (version,) = re.findall(r"transformers ([\d.]+),", PAGE.read_text(encoding="utf-8"))
    if version != transformers.__version__:
        pytest.skip(f"the page was written with transformers {version}")
    assert [row[0] for row in page_rows()] == list(transformers.CONFIG_MAPPING)
