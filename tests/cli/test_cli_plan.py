"""`sac plan`: what is printed, as text and as JSON, the files that it writes, and the whole text of every refusal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sac
from sac.planner.budget import LEGAL_BUDGET
from sac.planner.by_hand import ATTENTION_ALTERNATE, ATTENTION_MATMULS, SELECTIVE
from sac.planner.devices import DEVICES
from sac.planner.fakes import fake_build, fake_mode
from sac.planner.write_policy import EVERY_SECOND_LAYER
from sac.tools.cli import main
from sac.tools.models import Scale, load_model
from tests.unit.planner.plan_models import stack

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "examples" / "llama-3.2-1b.json"
MODELS = "tests.unit.planner.plan_models"
BASELINES = ["none", "full", EVERY_SECOND_LAYER, SELECTIVE, ATTENTION_ALTERNATE, ATTENTION_MATMULS]
REAL = "see that it runs without sac; if it does, but not without data: sac.plan(…, real=True), or --real"


def arguments(model: str, *more: str) -> list[str]:
    return ["plan", "--model", f"{MODELS}:{model}", *more]


def planned(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> dict[str, object]:
    assert main(arguments(model, *more, "--json")) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], model: str, *more: str) -> str:
    assert main(arguments(model, *more)) == 1
    streams = capsys.readouterr()
    assert streams.out == ""
    return streams.err.strip("\n")


@pytest.fixture
def tiny_llama(tmp_path: Path) -> list[str]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**json.loads(LLAMA.read_text()), **sizes, "head_dim": 8, "num_hidden_layers": 3}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    return ["--model", f"hf:{path}", "--vocab", "64", "--seq", "64", "--batch", "2"]


# What is printed and written


def test_a_table_with_the_plan_the_baselines_and_the_curve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments("stack", "--seq", "32", "--budget", "50%", "--out", "mine.yaml", "--picture", "c.svg")) == 0
    streams = capsys.readouterr()
    lines = streams.out.splitlines()
    assert lines[0] == f"{MODELS}:stack, argument 0 float32[4, 32, 16]"
    assert lines[1] == f"for cpu (a processor, rough figures), engine auto, torch {torch.__version__}"
    rows = [line.split("  ")[1].strip() for line in lines if line.endswith(("checked", "predicted"))]
    assert rows[:7] == ["plan", *BASELINES]
    assert rows[7:]
    assert all(row.endswith("% of the range") for row in rows[7:])
    assert lines[-1] == (
        f"policy: mine.yaml; try it: sac compare --model {MODELS}:stack --seq 32 --batch 1 --dtype float32 --seed 0 "
        "--modes none,full,selective,./mine.yaml"
    )
    assert "picture: c.svg\n" in streams.err
    picture = Path("c.svg").read_text()
    assert picture.startswith("<?xml")
    assert all(f"<!-- {label}: " in picture for label in ("plan", *BASELINES))
    assert sac.load_policy("./mine.yaml").plan is not None


def test_without_out_the_policy_follows_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(arguments("stack", "--budget", "50%")) == 0
    text = capsys.readouterr().out
    policy = text[text.index("# Planned by sac") :]
    (tmp_path / "policy.yaml").write_text(policy)
    assert sac.load_policy(tmp_path / "policy.yaml").name == "planned"
    assert f"# made by: sac plan --model {MODELS}:stack --budget 50%\n" in policy


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "policy.yaml"
    found = planned(capsys, "stack", "--budget", "50%", "--optimizer", "adamw", "--out", str(out))
    assert list(found) == [
        "model", "inputs", "made_by", "device", "engine", "torch", "budget_bytes", "least_peak_bytes",
        "most_peak_bytes", "static_bytes", "optimizer_bytes", "forward_s", "plan", "baselines", "curve", "notes",
        "explained", "policy",
    ]  # fmt: skip
    plan, baselines = found["plan"], found["baselines"]
    assert isinstance(plan, dict)
    assert isinstance(baselines, list)
    assert list(plan) == [
        "label", "peak_bytes", "kept_bytes", "recomputed_flops", "recompute_s", "of_forward", "fits", "is_checked"
    ]  # fmt: skip
    assert plan["is_checked"]
    assert plan["fits"]
    assert found["least_peak_bytes"] <= plan["peak_bytes"] <= found["budget_bytes"] < found["most_peak_bytes"]  # type: ignore[operator]
    assert found["optimizer_bytes"] == 2 * 4 * sum(p.numel() for p in stack()[0].parameters())
    assert [row["label"] for row in baselines] == BASELINES
    assert out.read_text() == found["policy"]


@pytest.mark.usefixtures("few_choices")
def test_a_planned_policy_is_compared_with_others(
    tiny_llama: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "policy.yaml")
    assert main(["plan", *tiny_llama, "--budget", "50%", "--out", out]) == 0
    command = capsys.readouterr().out.splitlines()[-1].partition("try it: sac ")[2].split()
    assert main([*command, "--steps", "2", "--json"]) == 0
    rows = {row["mode"]: row for row in json.loads(capsys.readouterr().out)["modes"]}
    assert rows[out]["max_gradient_difference"] == 0.0
    assert rows["full"]["kept_bytes"] < rows[out]["kept_bytes"] < rows["none"]["kept_bytes"]


def test_a_large_model_is_built_without_data() -> None:
    scale = Scale(layers=2, seq=8, dtype="bfloat16")
    one = load_model(f"hf:{LLAMA}", scale, build=fake_build(fake_mode()))
    parameters = [*one.model.parameters()]
    assert {parameter.dtype for parameter in parameters} == {torch.bfloat16}
    assert sum(parameter.numel() for parameter in parameters) > 384_000_000
    assert all(parameter.untyped_storage().device.type == "meta" for parameter in parameters)
    assert one.model.lm_head.weight is one.model.model.embed_tokens.weight


@pytest.mark.slow
def test_a_process_that_has_planned_ends_well(tiny_llama: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "sac.tools.cli", "plan", *tiny_llama, "--budget", "50%", "--json"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert (run.returncode, "FakeTensor" in run.stderr) == (0, False), run.stderr
    assert json.loads(run.stdout)["plan"]["fits"]


def test_the_same_layers_get_the_same_rules(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "stack", "--budget", "50%", "--same-layers")
    assert "layers:" not in str(found["policy"]).partition("\nrules:")[2]


def test_the_memory_of_a_device_less_a_margin_is_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    memory = DEVICES["h100"].memory_bytes
    assert planned(capsys, "stack", "--device", "h100")["budget_bytes"] == int(memory * 0.9)
    assert planned(capsys, "stack", "--device", "h100", "--margin", "25%")["budget_bytes"] == int(memory * 0.75)


def test_what_is_planned_for_a_gpu_is_compared_on_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = str(tmp_path / "p.yaml")
    assert main(arguments("stack", "--device", "h100", "--out", out)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith(f"--seed 0 --device cuda --modes none,full,selective,{out}")


def test_with_data_a_gpu_is_planned_for_by_the_ops_of_the_processor(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "stack", "--device", "h100", "--real")["notes"] == [
        "no checkpointing is needed",
        "with --real the ops are those that the CPU runs; plan without --real for those that h100 runs",
    ]


def test_a_budget_above_everything_needs_no_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("stack", "--budget", "1TiB")) == 0
    assert "note: no checkpointing is needed\n" in capsys.readouterr().out


def test_ops_without_a_formula_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "of_library", "--budget", "50%")["notes"] == [
        "no FLOPs formula is known for sac_tests_plan.twice.default: priced by the bytes they move, which is too low"
    ]


def test_what_asks_for_data_is_planned_with_data(capsys: pytest.CaptureFixture[str]) -> None:
    plain, looks = (planned(capsys, model, "--seq", "64", "--budget", "50%", "--real") for model in ("stack", "looks"))
    assert plain["plan"] == looks["plan"]


# What is refused


def test_a_budget_below_the_least_peak(capsys: pytest.CaptureFixture[str]) -> None:
    least = planned(capsys, "stack", "--budget", "50%")["least_peak_bytes"]
    text = refusal(capsys, "stack", "--budget", "10")
    first, legal, fix = text.splitlines()
    assert first.startswith("budget: 10 B is below the least peak of this model and these inputs, ")
    assert "are parameters, buffers, inputs and optimizer state; the peak is in the backward of layers." in first
    assert legal == f"    legal: {least} bytes or more"
    assert fix == (
        "    fix: give more, or shrink the batch, the sequence, or what checkpointing cannot: shard parameters, "
        "chunk the loss"
    )


def test_a_budget_that_is_no_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "stack", "--budget", "lots") == (
        f'budget: "lots" is not a budget: it is not a number with a unit\n    legal: {LEGAL_BUDGET}'
    )


def test_no_budget_for_a_processor(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "stack") == (
        f"--budget: it is missing, and the memory of a CPU is not known\n    legal: {LEGAL_BUDGET}"
    )


def test_margins_that_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "stack", "--budget", "1MiB", "--margin", "5%") == (
        "--margin: a margin is left free of a device's memory, but --budget already gives the memory to use\n"
        "    fix: give one of them"
    )
    for margin in ("5", "x%", "100%", "-1%", "nan%"):
        assert refusal(capsys, "stack", "--device", "h100", f"--margin={margin}") == (
            f'--margin: "{margin}" is not a margin\n    legal: a share of the device\'s memory: "0%" to "99%"'
        )


def test_unknown_devices(capsys: pytest.CaptureFixture[str]) -> None:
    legal = ", ".join(f"{device.name} ({device.title})" for device in DEVICES.values())
    assert refusal(capsys, "stack", "--device", "h1000") == (
        f"device: the planner has no figures for 'h1000'\n    did you mean: h100\n    legal: {legal}"
    )


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(capsys, "stack", "--device", "cuda") == (
        "--device: torch sees no CUDA device here\n    fix: name the GPU: --device h100"
    )


def test_a_picture_that_cannot_be_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, told in (
        (tmp_path / "curve.foo", "the picture cannot be saved: Format 'foo' is not supported (supported formats: "),
        (tmp_path / "file" / "curve.svg", "the file cannot be written: "),
    ):
        assert main(arguments("stack", "--budget", "50%", "--picture", str(path))) == 1
        assert capsys.readouterr().err.rpartition("\n\n")[2].strip("\n").startswith(f"{path}: {told}")


def test_inputs_of_the_wrong_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "wrong_width", "--budget", "50%") == (
        "Stack: its forward does not run with these inputs: RuntimeError: Given normalized_shape=[16], expected input "
        f"with shape [16], but got input of size torch.Size([4, 64, 17])\n    fix: {REAL}"
    )


def test_a_forward_that_needs_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "looks", "--budget", "50%") == (
        "Looks: aten._local_scalar_dense.default needs the data of a tensor, but a plan is made on tensors without "
        "data\n    fix: plan on real tensors: sac.plan(…, real=True), or --real"
    )


def test_a_model_without_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "no_blocks", "--budget", "50%") == (
        "NoBlocks: no transformer blocks were found in this model; it has no list of modules\n"
        "    legal: a ModuleList, Sequential or numbered ModuleDict of modules with parameters and parts; Hugging Face "
        "layers; a model that is one block\n"
        '    fix: name them, for example blocks: ["path.to.layers.*"], in the config, or under regions: in the policy'
    )


def test_files_that_cannot_be_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "none" / "policy.yaml")
    assert refusal(capsys, "stack", "--budget", "50%", "--out", path) == (
        f"{path}: the file cannot be written: No such file or directory"
    )
