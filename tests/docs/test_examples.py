"""examples/*.py: the same losses in every mode, also of a training that is interrupted and taken up again."""

from __future__ import annotations

import functools
import os
import re
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.docs.pages import ROOT
from tests.support.ranks import environment as ranks_environment
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

VALUES = {
    "full": ["--checkpointing", "full"],
    "selective": ["--checkpointing", "selective"],
    "plan": ["--budget", "50%"],
}
NONE = ["--checkpointing", "none"]
# By example: the package it needs.
EXAMPLES = {
    "training_loop": "torch",
    "diffusion_transformer": "diffusers",
    "lightning_fit": "lightning",
    "hf_trainer": "transformers",
    "trl_sft": "trl",
}
TRAINERS = ("hf_trainer", "trl_sft")  # the losses of both runs are in the second's log
RANKS = "fsdp2_tensor_parallel"


def losses_of(name: str, arguments: list[str]) -> list[float]:
    """Return what the `main` of an example returns; on ranks, that of this rank."""
    found: list[float] = runpy.run_path(str(ROOT / "examples" / f"{name}.py"))["main"](arguments)
    return found


def in_two_parts(name: str, value: list[str], folder: Path, *, parts: int = 2) -> list[float]:
    """Return the losses of four steps, with an interruption after two, or of the first two; on ranks, of this rank."""
    folder.mkdir(exist_ok=True)
    if name in ("training_loop", "diffusion_transformer", RANKS):
        first, second = [[*value, "--state", str(folder / "state.pt"), "--steps", steps] for steps in ("2", "4")]
    else:
        first = [*value, "--out", str(folder), "--steps", "2", *(["--save-steps", "2"] if name in TRAINERS else [])]
        second = [*value, "--out", str(folder), "--steps", "4", "--resume"]
    before = losses_of(name, first)
    if parts == 1:
        return before
    after = losses_of(name, second)
    return after if name in TRAINERS else [*before, *after]


@functools.cache
def without_checkpointing(name: str) -> list[float]:
    """Return the losses of the same training, with the same interruption: Lightning begins its data anew after it."""
    with tempfile.TemporaryDirectory() as folder:
        losses = in_two_parts(name, NONE, Path(folder))
    assert len(losses) == 4
    return losses


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", EXAMPLES)
def test_losses_are_those_without_checkpointing(name: str, value: str, tmp_path: Path) -> None:
    pytest.importorskip(EXAMPLES[name], reason=f"the example needs {EXAMPLES[name]}")
    parts = 1 if value == "plan" and name in ("diffusion_transformer", "trl_sft") else 2  # a plan takes seconds
    assert in_two_parts(name, VALUES[value], tmp_path, parts=parts) == without_checkpointing(name)[: 2 * parts]


def trainer_with_fsdp2(value: list[str], folder: Path) -> list[float]:
    """Return the losses of the Trainer on this rank.

    On a CPU accelerate takes DDP, whatever it is asked for; here its plugin for FSDP2 is put into force.
    """
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from tests.stacks.test_accelerate import its_state

    made = AcceleratorState.__init__

    def with_plugin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    common = ["--fsdp", *value, "--out", str(folder)]
    with mock.patch.object(AcceleratorState, "__init__", with_plugin):
        for arguments in (["--steps", "2", "--save-steps", "2"], ["--steps", "4", "--resume"]):
            with its_state():
                losses = losses_of("hf_trainer", [*common, *arguments])
    return losses


def on_ranks(name: str, value: list[str], folder: Path) -> list[list[float]]:
    """Return the losses of four steps on each rank, with an interruption after two."""
    if name == "hf_trainer":
        found = run_ranks(2, trainer_with_fsdp2, value, folder)
        assert (folder / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir(), "the model was sharded"
    else:
        found = run_ranks(4, in_two_parts, name, value, folder)
        assert found[0] == found[1] != found[2] == found[3], "each row of ranks reads its own part of the batch"
    assert all(len(losses) == 4 for losses in found)
    return found


@functools.cache
def ranks_without_checkpointing(name: str) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(name, NONE, Path(folder))


@pytest.mark.parametrize(("name", "value"), [("hf_trainer", "full"), (RANKS, "selective")])
def test_losses_on_ranks_are_those_without_checkpointing(name: str, value: str, tmp_path: Path) -> None:
    """The Trainer with FSDP2 on two; FSDP2 and tensor parallelism on four."""
    pytest.importorskip("transformers", reason="the example needs transformers")
    assert on_ranks(name, VALUES[value], tmp_path) == ranks_without_checkpointing(name)


def test_a_plan_for_one_rank_of_four(tmp_path: Path) -> None:
    policy = tmp_path / "planned.yaml"
    losses_of(RANKS, ["--checkpointing", str(policy), "--budget", "30%"])
    assert policy.read_text().startswith("# Planned by sac")
    planned = run_ranks(4, losses_of, RANKS, ["--checkpointing", str(policy), "--steps", "2"])
    assert planned == [of_rank[:2] for of_rank in ranks_without_checkpointing(RANKS)]


def test_a_start_by_torchrun() -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    example = [str(ROOT / "examples" / f"{RANKS}.py"), "--checkpointing", "full", "--steps", "1"]
    environment = {**os.environ, **ranks_environment()}
    run = subprocess.run([*start, *example], check=True, timeout=300, capture_output=True, text=True, env=environment)
    [said] = [line for line in run.stdout.splitlines() if line.startswith("step ")]
    assert re.fullmatch(r"step 0: loss \d\.\d{4}", said)


def test_every_example_has_a_test() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("[!_]*.py")} == {*EXAMPLES, RANKS}
