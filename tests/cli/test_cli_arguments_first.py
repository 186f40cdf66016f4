"""Every argument of a command is checked before a model is built: here building one is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sac.policy.load import shipped_policies
from sac.tools.cli import main

LLAMA = "hf:examples/llama-3.2-1b.json"
TOY = "tests.unit.planner.plan_models:stack"
ALL = ("trace", "compare", "plan")
POLICIES = ", ".join(("none", "full", "selective", *shipped_policies()))


class Built(AssertionError):
    """A model was built."""


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise Built(type(self).__name__)

    transformers = pytest.importorskip("transformers")
    # their files make modules when they are imported
    assert transformers.LlamaForCausalLM
    assert transformers.ViTForImageClassification
    assert transformers.CLIPModel
    monkeypatch.setattr(nn.Module, "__init__", refuse)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err.strip("\n")


def command(name: str, *more: str, model: str = LLAMA) -> list[str]:
    budget = ["--budget", "50%"] if name == "plan" and "--budget" not in more else []
    return [name, "--model", model, *budget, *more]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--layers", "0"], "--layers: 0 is not a size\n    legal: 1, 2, 3, …"),
        (["--seq=-1"], "--seq: -1 is not a size\n    legal: 1, 2, 3, …"),
        (["--batch", "0"], "--batch: 0 is not a size\n    legal: 1, 2, 3, …"),
        (["--vocab", "0"], "--vocab: 0 is not a size\n    legal: 1, 2, 3, …"),
        (
            ["--dtype", "bfloat"],
            "--dtype: unknown dtype 'bfloat'\n    did you mean: bfloat16\n"
            "    legal: float32, bfloat16, float16, float64",
        ),
    ],
)
def test_sizes(name: str, given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command(name, *given)) == text


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            "hf:nowhere.json",
            "--model: cannot read nowhere.json: No such file or directory\n    legal: a config.json file",
        ),
        ("tests.nowhere:f", "--model: 'tests.nowhere:f': no module named 'tests.nowhere'"),
        ("tests.unit.planner.plan_models:stak", "--model: 'tests.unit.planner.plan_models:stak': module "),
        ("llama", "--model: 'llama' is not a model spec"),
    ],
)
def test_models(name: str, model: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command(name, model=model)).startswith(text)


def test_a_text_is_for_models_that_read_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "vit.json"
    path.write_text(json.dumps({"model_type": "vit", "architectures": ["ViTForImageClassification"]}))
    text = refusal(capsys, *command("compare", "--text", "examples/text.txt", model=f"hf:{path}"))
    assert text == "--text: ViTForImageClassification reads 'pixel_values', not tokens\n    fix: leave it out"


@pytest.mark.parametrize("name", ALL)
def test_rows_longer_than_the_table_of_positions(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "clip.json"
    path.write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    assert refusal(capsys, *command(name, model=f"hf:{path}")) == (
        "--seq: CLIPModel has 77 positions, fewer than a row of 128 tokens\n    legal: 1 to 77\n    fix: --seq 77"
    )


@pytest.mark.parametrize("name", ["trace", "compare"])
def test_devices(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command(name, "--device", "gpu")) == (
        "--device: 'gpu' cannot be measured\n    legal: cpu, cuda"
    )


@pytest.mark.parametrize(("name", "flag"), [("trace", "--policy"), ("compare", "--modes")])
def test_policies(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command(name, flag, "lama")) == (
        f'{flag}: "lama" is not known\n    did you mean: llama\n'
        f"    legal: {POLICIES}, a path to a YAML file, or a mapping"
    )


@pytest.mark.parametrize(("name", "flag"), [("trace", "--policy"), ("compare", "--modes")])
def test_policy_files(name: str, flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("schema: sac/v1\nname: mine\nrules:\n  - {id: a, ops: matmull, do: save}\n")
    assert refusal(capsys, *command(name, flag, str(path))).startswith(f"{path}:4:")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--steps", "1"], "--steps: 1 steps cannot be timed: the first one warms up\n    legal: 2, 3, 4, …"),
        (
            ["--optimizer", "adam"],
            "--optimizer: unknown optimizer 'adam'\n    did you mean: adamw\n    legal: sgd, adamw",
        ),
        (["--text", "nowhere"], "--text: cannot read nowhere: No such file or directory\n    legal: a text file"),
        (
            ["--text", "examples/text.txt", "--vocab", "200"],
            "--vocab: 200 tokens cannot hold the bytes of a text\n    legal: 256 or more",
        ),
    ],
)
def test_training(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command("compare", *given)) == text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--device", "h1000"], "device: the planner has no figures for 'h1000'\n    did you mean: h100"),
        (["--budget", "lots"], 'budget: "lots" is not a budget: it is not a number with a unit'),
        (["--optimizer", "adamm"], "optimizer: 'adamm' is not known\n    did you mean: adam"),
        (["--fsdp", "1"], "ranks: 1 ranks to shard over\n    legal: 2, 3, 4, …"),
        (["--out", "nowhere/p.yaml"], "nowhere/p.yaml: the file cannot be written: No such file or directory"),
    ],
)
def test_plans(given: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *command("plan", *given)).startswith(text)


@pytest.mark.parametrize("name", ["compare"])
def test_pictures(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    foo, inside = tmp_path / "curve.foo", tmp_path / "file" / "curve.svg"
    text = refusal(capsys, *command(name, "--picture", str(foo)))
    assert text.startswith(f"{foo}: the picture cannot be saved: Format 'foo' is not supported (supported formats: ")
    assert refusal(capsys, *command(name, "--picture", str(inside))) == (
        f"{inside}: the file cannot be written: Not a directory"
    )


def test_a_trace_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAC_TRACE", str(tmp_path / "none" / "trace.jsonl"))
    assert refusal(capsys, *command("trace")).startswith("SAC_TRACE: ")


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = refusal(capsys, *command("compare", "--layers", "0", "--modes", "lama", "--steps", "1"))
    assert [line.partition(":")[0] for line in text.splitlines() if not line.startswith(" ")] == [
        "--layers", "--steps", "--modes",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ALL)
def test_with_nothing_wrong_a_model_is_built(name: str) -> None:
    with pytest.raises(Built):
        main(command(name, model=TOY))
