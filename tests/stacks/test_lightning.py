"""sac.apply inside a Lightning Trainer: in `configure_model`, before it, and by a callback."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import sac
from sac.blocks.install import regions_of
from sac.errors import ConfigError
from tests.stacks.composition import Outcome, assert_full_and_selective, differences
from tests.stacks.other_trainers import lightning, lightning_ddp, lightning_fsdp2
from tests.support.ranks import run_ranks

lightning_package = pytest.importorskip("lightning", reason="lightning is in the extra `stacks`")

from lightning.pytorch.loggers.logger import DummyLogger  # noqa: E402

from sac.compat.lightning import SacCallback  # noqa: E402
from tests.stacks.lightning_module import QUIET, Configured, Plain, batches, fit  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.rank_zero.LightningDeprecationWarning"),
]


@pytest.mark.parametrize("way", ["configure_model", "apply", "callback", "callback and configure_model"])
def test_gradients_are_equal_and_kept_bytes_fall(way: str) -> None:
    assert_full_and_selective(functools.partial(lightning, way=way))


@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}],
    ids=["bf16-mixed", "bf16-true", "accumulate"],
)
def test_options_of_the_trainer(options: dict[str, Any]) -> None:
    assert_full_and_selective(functools.partial(lightning, **options))


def least(found: list[Outcome]) -> int:
    """Of the rank that saw the fewest bytes: some buffers are freed by gloo's threads, unseen."""
    return min(one.kept_bytes for one in found)


def on_ranks(function: Any, mode: str) -> list[Outcome]:
    return run_ranks(2, function, mode)


@pytest.mark.slow
@pytest.mark.parametrize("function", [lightning_ddp, lightning_fsdp2], ids=lambda function: function.__name__)
def test_strategies_over_two_processes(function: Any) -> None:
    plain, full, selective = (on_ranks(function, mode) for mode in ("none", "full", "selective"))
    for ours in (full, selective):
        assert [differences(one, reference) for one, reference in zip(ours, plain, strict=True)] == [[], []]
        assert ours[0].collectives.get("gloo:all_reduce") == plain[0].collectives.get("gloo:all_reduce")
    assert plain[0].flops < selective[0].flops < full[0].flops
    assert least(full) < least(selective) < least(plain)


def trained(value: str, steps: int, ckpt_path: str | None = None, **options: Any) -> tuple[dict[str, Any], Any]:
    torch.manual_seed(0)
    module = Configured(value, rate=0.1)
    trainer = fit(module, steps, ckpt_path, **options)
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}, trainer


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def resumed(first: str, then: str, path: Path) -> dict[str, Any]:
    """Train for two steps in one mode, and from the checkpoint for two more in another."""
    _, trainer = trained(first, 2)
    trainer.save_checkpoint(path)
    state, _ = trained(then, 4, ckpt_path=str(path))
    return state


@pytest.mark.parametrize(("first", "then"), [("none", "selective"), ("selective", "none"), ("full", "full")])
def test_a_checkpoint_is_resumed_in_any_mode(first: str, then: str, tmp_path: Path) -> None:
    reference = resumed("none", "none", tmp_path / "reference.ckpt")
    assert equal(resumed(first, then, tmp_path / "ours.ckpt"), reference)
    assert not equal(trained(first, 2)[0], reference)


def test_a_second_fit_finds_the_callback_done(caplog: pytest.LogCaptureFixture) -> None:
    module, callback = Plain(), SacCallback("full")
    with caplog.at_level(logging.INFO, logger="sac.compat.lightning"):
        fit(module, callbacks=[callback])
        fit(module, callbacks=[callback])
    reports = [record.getMessage() for record in caplog.records if record.name == "sac.compat.lightning"]
    assert [text.partition(" (")[0] for text in reports] == [str(sac.report(module)).partition(" (")[0]] * 2
    assert reports[0].startswith("activation checkpointing: full, 2 regions")


def test_a_callback_beside_a_call_is_an_error() -> None:
    module = sac.apply(Plain(), "full")
    with pytest.raises(sac.SacError) as error:
        fit(module, callbacks=[SacCallback("full")])
    assert str(error.value) == (
        "net.blocks.0: sac.apply has been called on this model before\n    fix: call sac.remove(model) first"
    )


def test_the_figures_of_the_report_reach_the_trainers_loggers() -> None:
    class Logger(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int, dict[str, float]]] = []

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            if "sac/kept_bytes" in metrics:
                self.logged.append((step, metrics))

    module, logger = Plain(), Logger()
    fit(module, steps=4, callbacks=[SacCallback("selective", log_every=2)], logger=logger)
    assert logger.logged == [(step, sac.report(module).scalars()) for step in (2, 4)]
    with pytest.raises(ConfigError, match=r"SacCallback\.log_every: 0 is not a number of steps"):
        SacCallback("selective", log_every=0)


def test_a_wrong_value_is_an_error_where_the_callback_is_built() -> None:
    with pytest.raises(sac.SacError, match="did you mean: selective"):
        SacCallback("selectiv")


def test_validation_alone_puts_nothing_on() -> None:
    module = Plain()
    lightning_package.Trainer(callbacks=[SacCallback("full")], **QUIET).validate(module, batches())
    assert next(regions_of(module), None) is None
