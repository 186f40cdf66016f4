"""examples/*.py: the same losses in every mode, also of a training that is interrupted and taken up again."""

from __future__ import annotations

import functools
import runpy
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

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
@pytest.mark.usefixtures("few_choices", "few_steps")
def test_losses_are_those_without_checkpointing(name: str, package: str, value: str, tmp_path: Path) -> None:
    pytest.importorskip(package, reason=f"the example needs {package}")
    assert in_two_parts(name, VALUES[value], tmp_path / value) == without_checkpointing(name)


def test_every_example_has_a_test() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.stem}"' in text for path in (ROOT / "examples").glob("[!_]*.py"))
