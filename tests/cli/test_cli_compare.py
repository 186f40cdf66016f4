"""`sac compare`: what it measures, held against counts by hand, and what it says when a mode fails."""

import json

import pytest
import torch

from sac.errors import ConfigError
from sac.extras import import_extra
from sac.tools.cli import main
from sac.tools.comparison import Training, compare
from sac.tools.models import BuiltModel
from tests.unit.planner.plan_models import WIDTH, stack

SPEC, ROWS, BLOCKS = "tests.unit.planner.plan_models:stack", 4 * 64, 3


def build() -> BuiltModel:
    torch.manual_seed(0)
    model, (x,) = stack()
    return BuiltModel(model.train(), lambda step: (x + step,), "stack")


@pytest.fixture(scope="module")
def comparison():
    return compare(build(), {"full": "full", "selective": "selective"}, Training(steps=4, optimizer="adamw"), None)


def test_gradients_and_losses_are_equal_in_every_mode(comparison):
    assert not comparison.failed
    losses = {row.losses for row in comparison.rows}
    assert len(losses) == 1
    assert len(set(losses.pop())) == 4  # it trains: no two losses are the same
    assert [row.max_gradient_difference for row in comparison.rows] == [0.0, 0.0, 0.0]


def test_recompute_is_what_a_step_costs_more_than_none(comparison):
    none, full, selective = comparison.rows
    assert none.recompute_flops == 0
    assert full.recompute_flops == full.step_flops - none.step_flops
    assert selective.recompute_flops == selective.step_flops - none.step_flops < full.recompute_flops
    assert full.recompute_flops == BLOCKS * 2 * ROWS * WIDTH * 4 * WIDTH  # all but the last product of a block


def test_less_is_kept_the_more_is_recomputed_and_full_keeps_one_hidden_state_per_block(comparison):
    none, full, selective = comparison.rows
    assert full.kept_bytes < selective.kept_bytes < none.kept_bytes
    hidden, generator_state = ROWS * WIDTH * 4, torch.get_rng_state().nbytes
    assert hidden <= full.kept_bytes / BLOCKS <= 1.5 * hidden + generator_state + 64


def test_the_table_has_at_most_80_columns_and_says_what_each_mode_costs(comparison):
    lines = comparison.table().text().splitlines()
    assert lines[0].split() == ["mode", "kept", "peak", "recomputed", "step", "grads"]
    assert max(map(len, str(comparison).splitlines())) <= 80
    assert [line.split()[-1] for line in lines[2:]] == ["equal"] * 3


def test_progress_counts_every_pass_of_every_mode():
    seen = []
    compare(build(), {"full": "full"}, Training(steps=2), lambda *state: seen.append(state))
    assert [done for done, _, _ in seen] == list(range(8))
    assert {total for _, total, _ in seen} == {8}
    assert seen[0][2] == "none: step 1"


def test_mode_that_fails_keeps_its_row_and_the_others_run():
    result = compare(build(), {"no-such-policy": "no-such-policy", "full": "full"}, Training(steps=2), None)
    failed, full = result.rows[1:]
    assert result.failed
    assert failed.to_dict() == {"mode": "no-such-policy", "error": failed.error}
    assert "no-such-policy" in failed.error
    assert full.max_gradient_difference == 0.0


def test_json_has_the_numbers_of_the_table(capsys):
    assert main(["compare", "--model", SPEC, "--steps", "3", "--json", "--modes", "full"]) == 0
    found = json.loads(capsys.readouterr().out)
    none, full = found["modes"]
    assert (found["model"], found["steps"], found["torch"]) == (SPEC, 3, torch.__version__)
    assert found["parameters"] == sum(parameter.numel() for parameter in build().model.parameters())
    assert full["recompute_flops"] == full["step_flops"] - none["step_flops"] > 0
    assert full["losses"] == none["losses"]


def test_picture_is_saved_in_a_new_folder(tmp_path, capsys):
    path = tmp_path / "new" / "memory.png"
    assert main(["compare", "--model", SPEC, "--steps", "2", "--picture", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert f"picture: {path}" in capsys.readouterr().err


def test_cuda_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError, match="--device: torch sees no CUDA device here\n    legal: cpu\n    fix: --device"
    ):
        Training(device="cuda")


@pytest.mark.gpu
def test_comparison_on_cuda_measures_the_same_things():
    rows = compare(build(), {"full": "full"}, Training(steps=2, device="cuda"), None).rows
    none, full = rows
    assert full.kept_bytes < none.kept_bytes
    assert full.recompute_flops > 0
    assert full.max_gradient_difference == 0.0


def test_missing_extra_says_how_to_get_it():
    with pytest.raises(ConfigError, match="'no_such_package' is not installed\n    fix: pip install 'sac\\[tools\\]'"):
        import_extra("no_such_package.part", "tools")
