"""examples/*.py: the same losses in every mode, also of a training that is interrupted and taken up again."""

from __future__ import annotations

import functools
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.example_ranks import hf_trainer_fsdp2, losses_of
from tests.docs.example_ranks import in_two_parts as ranks_in_two_parts
from tests.docs.pages import ROOT
from tests.support.ranks import environment as ranks_environment
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VALUES = {
    "full": ["--checkpointing", "full"],
    "selective": ["--checkpointing", "selective"],
    "plan": ["--budget", "50%"],
}


def example(name: str) -> Callable[[list[str]], list[float]]:
    main: Callable[[list[str]], list[float]] = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"]
    return main


def in_two_parts(name: str, value: list[str], folder: Path) -> list[float]:
    """Return the losses of four steps, with an interruption after two."""
    run = example(name)
    folder.mkdir()
    if name in ("training_loop", "diffusion_transformer"):
        state = ["--state", str(folder / "state.pt")]
        return [*run([*value, *state, "--steps", "2"]), *run([*value, *state, "--steps", "4"])]
    out = ["--out", str(folder)]
    if name in ("hf_trainer", "trl_sft"):
        run([*value, *out, "--steps", "2", "--save-steps", "2"])
        return run([*value, *out, "--steps", "4", "--resume"])
    return [*run([*value, *out, "--steps", "2"]), *run([*value, *out, "--steps", "4", "--resume"])]


@functools.cache
def without_checkpointing(name: str) -> list[float]:
    """Return the losses of the same training, with the same interruption: Lightning begins its data anew after it."""
    with tempfile.TemporaryDirectory() as folder:
        losses = in_two_parts(name, ["--checkpointing", "none"], Path(folder) / "none")
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("training_loop", "torch"),
        ("hf_trainer", "transformers"),
        ("lightning_fit", "lightning"),
        ("trl_sft", "trl"),
        ("diffusion_transformer", "diffusers"),
    ],
)
def test_losses_are_those_without_checkpointing(name: str, package: str, value: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"the example needs {package}")
    assert in_two_parts(name, VALUES[value], tmp_path / value) == without_checkpointing(name)


@pytest.fixture(scope="module")
def ranks_without_checkpointing(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[float]]]:
    """The losses of each rank of an example of several processes, without checkpointing."""
    return functools.cache(lambda name: on_ranks(name, ["--checkpointing", "none"], tmp_path_factory.mktemp(name)))


def on_ranks(name: str, value: list[str], folder: Path) -> list[list[float]]:
    """Return the losses of four steps on each rank, with an interruption after two."""
    if name == "hf_trainer":
        given = [*value, "--out", str(folder)]
        found = run_ranks(
            2, hf_trainer_fsdp2, [*given, "--steps", "2", "--save-steps", "2"], [*given, "--steps", "4", "--resume"]
        )
        assert (folder / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir(), "the model was sharded"
    else:
        given = [*value, "--state", str(folder / "state")]
        found = run_ranks(4, ranks_in_two_parts, name, [*given, "--steps", "2"], [*given, "--steps", "4"])
        assert found[0] == found[1] != found[2] == found[3], "each row of ranks reads its own part of the batch"
    assert all(len(losses) == 4 for losses in found)
    return found


@pytest.mark.parametrize("value", VALUES)
def test_the_trainer_with_fsdp2_on_two_ranks(
    value: str, tmp_path: Path, ranks_without_checkpointing: Callable[[str], list[list[float]]]
) -> None:
    pytest.importorskip("transformers", reason="the example needs transformers")
    assert on_ranks("hf_trainer", VALUES[value], tmp_path) == ranks_without_checkpointing("hf_trainer")


@pytest.mark.parametrize("value", ["full", "selective"])
def test_fsdp2_and_tensor_parallelism_on_four_ranks(
    value: str, tmp_path: Path, ranks_without_checkpointing: Callable[[str], list[list[float]]]
) -> None:
    name = "fsdp2_tensor_parallel"
    assert on_ranks(name, VALUES[value], tmp_path) == ranks_without_checkpointing(name)


def test_a_plan_for_one_rank_of_four_and_a_start_by_torchrun(
    tmp_path: Path, ranks_without_checkpointing: Callable[[str], list[list[float]]]
) -> None:
    name, policy, state = "fsdp2_tensor_parallel", tmp_path / "planned.yaml", ["--state", str(tmp_path / "state")]
    file, value = str(ROOT / "examples" / f"{name}.py"), ["--checkpointing", str(policy)]
    environment = {**os.environ, **ranks_environment()}
    run = functools.partial(subprocess.run, check=True, timeout=300, capture_output=True, text=True, env=environment)
    run([sys.executable, file, *value, "--budget", "30%"])
    assert policy.read_text().startswith("# Planned by sac")
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    out = run([*start, file, *value, *state, "--steps", "2"]).stdout
    losses = ranks_without_checkpointing(name)
    assert [line for line in out.splitlines() if line.startswith("step ")] == [
        f"step {step}: loss {losses[0][step]:.4f}" for step in range(2)
    ]
    rest = run_ranks(4, losses_of, name, [*value, *state, "--steps", "4"])
    assert rest == [of_rank[2:] for of_rank in losses]


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.stem}"' in text for path in (ROOT / "examples").glob("[!_]*.py"))
