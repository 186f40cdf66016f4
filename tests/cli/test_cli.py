"""`sac check`, `sac trace` and the command as a whole: what is printed, as text and as JSON, and the exit codes."""

import json
from pathlib import Path

import pytest
import torch

from sac.policy.load import load_policy
from sac.policy.model import limits_of
from sac.tables import bytes_text, flops_text, parameters_text, seconds_text
from sac.tools.cli import main

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "examples" / "llama-3.2-1b.json"
POLICY = """\
schema: sac/v1
name: mine
models: [llama]
sets: {fast: [no_such_lib::kernel, aten.bmm]}
rules:
  - id: fast-ones
    ops: fast
    do: save
    optional: true
  - id: projections
    ops: [aten.mm, aten.addmm]
    module: "self_attn.{q,k}_proj"
    layers: {first: 2}
    call: {index: [0]}
    shape: [_, ">=64"]
    dtype: bfloat16
    do: alternate
"""


@pytest.fixture
def policy_file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def tiny_llama(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 8}
    config = {**json.loads(LLAMA.read_text()), **sizes, "num_key_value_heads": 2, "num_hidden_layers": 3}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    return ["--model", f"hf:{path}", "--vocab", "64", "--seq", "16"]


def test_check_prints_a_row_per_rule(policy_file, capsys):
    path = policy_file(POLICY)
    assert main(["check", path]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line for line in out.splitlines() if line.strip()}
    assert f"{path}: policy mine, for llama" in out
    assert "1 of 2" in lines["fast-ones"]
    assert "2 of 2" in lines["projections"]
    assert "alternate" in lines["projections"]
    assert f"1 name not in this build of torch ({torch.__version__}): --json lists them" in out
    assert "no_such_lib" not in out
    assert [limits_of(rule) for rule in load_policy(path).rules] == [
        ["optional: true"],
        [
            "module: 'self_attn.{q,k}_proj'",
            "layers: {first: 2}",
            "call: {index: [0]}",
            "shape: [_, '>=64']",
            "dtype: bfloat16",
        ],
    ]


def test_check_json_has_the_names_themselves(policy_file, capsys):
    path = policy_file(POLICY)
    assert main(["check", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    told = [found[key] for key in ("policy", "source", "models", "default")]
    assert told == ["mine", path, ["llama"], "recompute"]
    fast, projections = found["rules"]
    assert fast["names"] == ["aten.bmm"]
    assert fast["missing"] == ["no_such_lib.kernel"]
    assert projections["names"] == ["aten.mm", "aten.addmm"]
    assert projections["place"] == f"{path}:10:5"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"do: save": "do: sav", "optional: true": "optinal: true"}, ["mine.yaml:8:9: ", "mine.yaml:9:5: "]),
        ({"aten.addmm": "aten.admm"}, ["mine.yaml:11:20: ", "did you mean: aten.addmm"]),
    ],
)
def test_check_prints_all_problems_and_ends_with_one(changes, told, policy_file, capsys):
    text = POLICY
    for old, new in changes.items():
        text = text.replace(old, new)
    assert main(["check", policy_file(text)]) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    assert [one for one in told if one not in streams.err] == []


def test_trace_shows_each_op_of_one_region_kind_with_its_rule(tiny_llama, policy_file, capsys):
    path = policy_file(
        "schema: sac/v1\nname: one\nrules:\n  - {id: queries, ops: aten.mm, module: '**.q_proj', do: save}\n"
    )
    assert main(["trace", *tiny_llama, "--policy", path]) == 0
    out = capsys.readouterr().out
    assert f"LlamaForCausalLM (tiny.json) under {path}" in out
    assert out.splitlines().count("model.layers.0-2 (x3)") == 1
    (saved,) = [line.split() for line in out.splitlines() if "  save  " in line]
    assert saved == ["self_attn.q_proj", "aten.mm", "0", "save", "rule", "queries", "2.0", "KiB", "32.8", "kFLOP"]
    assert "  save: 1 call, 2.0 KiB, 32.8 kFLOP\n" in out


def test_trace_json_has_every_op(tiny_llama, capsys):
    assert main(["trace", *tiny_llama, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["region"] for row in rows} == {"model.layers.0-2 (x3)"}
    matmuls = [row for row in rows if row["op"] == "aten.mm.default"]
    assert [row["module"].rpartition(".")[2] for row in matmuls] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    assert {row["decision"] for row in rows} == {"save", "recompute"}
    assert any("view" in row["op"] for row in rows)


@pytest.mark.parametrize(
    ("write", "number", "text"),
    [
        (bytes_text, 1023, "1023 B"),
        (bytes_text, 1536, "1.5 KiB"),
        (bytes_text, -(2**20), "-1.0 MiB"),
        (flops_text, 999, "999 FLOP"),
        (flops_text, 7e12, "7.0 TFLOP"),
        (seconds_text, 0.01234, "12.3 ms"),
        (seconds_text, 1.234, "1.23 s"),
        (parameters_text, 12, "12"),
        (parameters_text, 243_300_000, "243.3 M"),
    ],
)
def test_numbers_as_people_read_them(write, number, text):
    assert write(number) == text
