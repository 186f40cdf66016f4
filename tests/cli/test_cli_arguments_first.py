"""Every argument of a command is checked before a model is built: here building one is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from sac.policy.load import shipped_policies
from sac.tools import comparison
from sac.tools.cli import main

LLAMA = "hf:examples/llama-3.2-1b.json"
TOY = "tests.unit.planner.plan_models:stack"
ALL = ("trace", "compare", "plan")
POLICIES = ", ".join(("none", "full", "selective", *shipped_policies()))
SIZE = "is not a size / legal: 1, 2, 3, …"
UNKNOWN = f': "lama" is not known / did you mean: llama / legal: {POLICIES}, a path to a YAML file, or a mapping'


class Built(AssertionError):
    """A model was built."""


@pytest.fixture(autouse=True)
def _no_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise Built(type(self).__name__)

    transformers = pytest.importorskip("transformers")
    # these files make modules when they are imported
    assert comparison
    assert transformers.LlamaForCausalLM
    assert transformers.ViTForImageClassification
    assert transformers.CLIPModel
    monkeypatch.setattr(nn.Module, "__init__", refuse)
    for kind, name in (("vit", "ViTForImageClassification"), ("clip", "CLIPModel")):
        (tmp_path / f"{kind}.json").write_text(json.dumps({"model_type": kind, "architectures": [name]}))
    (tmp_path / "mine.yaml").write_text("schema: sac/v1\nname: mine\nrules:\n  - {id: a, ops: matmull, do: save}\n")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err.strip("\n")


def command(name: str, *more: str, model: str = LLAMA) -> list[str]:
    budget = ["--budget", "50%"] if name == "plan" and "--budget" not in more else []
    return [name, *([] if "--model" in more else ["--model", model]), *budget, *more]


# The commands; what they are given (`*`: the folder of the test); how the error begins (` / ` begins a line of it).
TABLE = f"""
all           | --model {TOY} --dtype bfloat16 | --dtype: {TOY} takes no argument `dtype`, so this has no effect
all           | --model inspect:signature | --model: inspect:signature cannot be called: missing a required
all           | --layers 0 | --layers: 0 {SIZE}
all           | --seq=-1 | --seq: -1 {SIZE}
all           | --batch 0 | --batch: 0 {SIZE}
all           | --vocab 0 | --vocab: 0 {SIZE}
all           | --dtype bfloat | --dtype: unknown dtype 'bfloat' / did you mean: bfloat16 / legal: float32
all           | --model hf:nowhere.json | --model: cannot read nowhere.json: No such file or directory / legal: a
all           | --model tests.nowhere:f | --model: 'tests.nowhere:f': no module named 'tests.nowhere'
all           | --model {TOY[:-1]} | --model: '{TOY[:-1]}': module '{TOY[:-6]}' has no function 'stac'
all           | --model llama | --model: 'llama' is not a model spec
all           | --model hf:*/clip.json | --seq: CLIPModel has 77 positions, fewer than a row of 128 tokens / legal: 1
trace compare | --device gpu | --device: 'gpu' cannot be measured / legal: cpu, cuda, cuda:0
trace         | --policy lama | --policy{UNKNOWN}
compare       | --modes lama | --modes{UNKNOWN}
trace         | --policy */mine.yaml | */mine.yaml:4:
compare       | --modes */mine.yaml | */mine.yaml:4:
compare       | --steps 1 | --steps: 1 is too few: the first step warms up / legal: 2, 3, 4, …
compare       | --optimizer adam | --optimizer: unknown optimizer 'adam' / did you mean: adamw
compare       | --picture */mine.yaml/c.svg | */mine.yaml/c.svg: the file cannot be written: Not a directory
compare       | --picture */c.foo | */c.foo: the picture cannot be saved: Format 'foo' is not supported
plan          | --device h1000 | device: the planner has no figures for 'h1000' / did you mean: h100
plan          | --budget lots | budget: budget is "lots": it is not a number with a unit
plan          | --optimizer adamm | optimizer: 'adamm' is not known / did you mean: adam
plan          | --fsdp 1 | ranks: 1 ranks to shard over / legal: 2, 3, 4, …
plan          | --out nowhere/p.yaml | nowhere/p.yaml: the file cannot be written: No such file or directory
"""
CASES = [tuple(cell.strip() for cell in row.split("|")) for row in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("names", "given", "text"), CASES)
def test_refused(names: str, given: str, text: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if "--picture" in given:
        pytest.importorskip("matplotlib")
    more = given.replace("*", str(tmp_path)).split()
    expected = text.replace("*", str(tmp_path)).replace(" / ", "\n    ")
    for name in ALL if names == "all" else names.split():
        assert refusal(capsys, *command(name, *more)).startswith(expected)


def test_a_trace_file_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SAC_TRACE", str(tmp_path / "none" / "trace.jsonl"))
    assert refusal(capsys, *command("trace")).startswith("SAC_TRACE: ")


@pytest.mark.parametrize("name", ALL)
def test_with_nothing_wrong_a_model_is_built(name: str) -> None:
    with pytest.raises(Built):
        main(command(name, model=TOY))
