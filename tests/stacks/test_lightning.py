"""sac inside a Lightning Trainer: checkpoints, the callback, its report. What it trains is in test_matrix."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError

lightning_package = pytest.importorskip("lightning", reason="lightning is in the extra `stacks`")

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from sac.compat.lightning import SacCallback  # noqa: E402
from tests.stacks.lightning_module import QUIET, Module, batches, fit  # noqa: E402
from tests.support.training import assert_same  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
]


def resumed(first: str, then: str, path: Path) -> dict[str, Any]:
    """Train for two steps in one mode, and from the checkpoint for two more in another."""
    torch.manual_seed(0)
    fit(Module(first, rate=0.1), 2).save_checkpoint(path)
    module = Module(then, rate=0.1)
    fit(module, 4, ckpt_path=str(path))
    return module.state_dict()


def test_a_checkpoint_is_resumed_in_another_mode(tmp_path: Path) -> None:
    plain, ours = (resumed("none", mode, tmp_path / f"{mode}.ckpt") for mode in ("none", "selective"))
    assert_same(plain, ours)


def test_a_second_fit_finds_the_callback_done(caplog: Any) -> None:
    module, callback = Module(late=False), SacCallback("full")
    with caplog.at_level(logging.INFO, logger="sac.compat.lightning"):
        fit(module, callbacks=[callback])
        fit(module, callbacks=[callback])
    reports = [record.getMessage() for record in caplog.records if record.name == "sac.compat.lightning"]
    assert [text.partition(" (")[0] for text in reports] == [str(sac.report(module)).partition(" (")[0]] * 2
    assert reports[0].startswith("activation checkpointing: full, 2 regions")


def test_a_callback_beside_a_call_and_a_wrong_value_are_errors() -> None:
    module = sac.apply(Module(late=False), "full")
    with pytest.raises(sac.SacError, match="sac is on this module already"):
        fit(module, callbacks=[SacCallback("full")])
    with pytest.raises(sac.SacError, match="did you mean: selective"):
        SacCallback("selectiv")


def test_the_figures_of_the_report_reach_the_trainers_loggers() -> None:
    class Logger(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "sac/kept_bytes" in metrics:
                self.logged.append((step, metrics))

    module, logger = Module(late=False), Logger()
    fit(module, steps=4, callbacks=[SacCallback("selective", log_every=2)], logger=logger)
    assert logger.logged == [(step, sac.report(module).scalars()) for step in (2, 4)]
    with pytest.raises(
        ConfigError, match=r"SacCallback\.log_every: log_every is 0\n    legal: a whole number, 1 or more"
    ):
        SacCallback("selective", log_every=0)


def test_validation_alone_puts_nothing_on() -> None:
    module = Module(late=False)
    lightning_package.Trainer(callbacks=[SacCallback("full")], **QUIET).validate(module, batches())
    assert next(regions_of(module), None) is None
