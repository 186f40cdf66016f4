"""A training that is taken up again under the same conditions makes the same decisions: they are in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sac.fitting.plan_files import directory_of
from tests.unit.fitting.small_training import Trained, controller_of, ends, share, trained, within


def decisions(found: Trained) -> tuple[tuple[int, ...] | None, ...]:
    fitted = controller_of(found.model).fitted
    assert fitted is not None
    return fitted.saved


def test_resumed_training_makes_the_same_decisions(tmp_path: Path) -> None:
    config = within(share(0.5), plan_cache=str(tmp_path / "plans"))
    first = trained(config, steps=2)
    (file,) = (tmp_path / "plans").iterdir()
    resumed = trained(config, steps=2, resume=first)
    assert decisions(resumed) == decisions(first)
    assert resumed.is_equal(trained(None, steps=2, resume=first))

    written = json.loads(file.read_text())
    assert written["policy"].startswith("schema: sac/v1")
    full = [[] for _ in decisions(first)]
    file.write_text(json.dumps({**written, "saved": full}))
    assert decisions(trained(config, steps=2)) == tuple(map(tuple, full))


@pytest.mark.parametrize("text", ["", "{}", '{"saved": [null]}', '{"saved": 3}', '{"saved": [null, null, null, null]}'])
def test_file_that_does_not_fit_is_replaced(tmp_path: Path, text: str) -> None:
    config = within(share(0.5), plan_cache=tmp_path)
    first = trained(config, steps=2)
    (file,) = tmp_path.iterdir()
    before = file.read_text()
    file.write_text(text)
    assert decisions(trained(config, steps=2)) == decisions(first)
    assert file.read_text() == before


def test_each_budget_has_its_own_file(tmp_path: Path) -> None:
    for part in (0.3, 0.6):
        trained(within(share(part), plan_cache=tmp_path), steps=2)
    assert len([*tmp_path.iterdir()]) == 2


def test_plans_without_a_place_for_files(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert max(trained(within(ends()[1], plan_cache=tmp_path / "taken"), steps=2).peaks) <= ends()[1]


def test_default_directory_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAC_CACHE_DIR", str(tmp_path))
    assert directory_of(None) == tmp_path / "sac" / "plans"
    assert directory_of(False) is None
