"""`SAC_REPORT_EVERY`: one line in the log after every n-th forward with grad, and nothing else."""

from __future__ import annotations

import logging
from copy import deepcopy

import pytest
import torch

import sac
from sac.errors import ConfigError
from sac.policy.read import bytes_text
from tests.support.blocks import llama_stack, policy, save, selective, tokens
from tests.support.training import built

VALUE = selective(policy(save("attention"), save("matmul")))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "sac.reporting"]


def test_every_second_forward_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SAC_REPORT_EVERY", "2")
    caplog.set_level(logging.INFO)
    model = sac.apply(built(llama_stack), VALUE)
    for _ in range(5):
        model(*tokens()).sum().backward()
        with torch.no_grad():
            model(*tokens())
    report = sac.report(model)
    saved = report.saved_bytes_by_rule()
    kept = (
        f"{bytes_text(report.kept_bytes)} kept in 2 regions (rule-1 {bytes_text(saved['rule-1'])}, "
        f"rule-0 {bytes_text(saved['rule-0'])}, inputs {bytes_text(report.kept_bytes - sum(saved.values()))})"
    )
    assert lines(caplog) == [f"forward 2: {kept}", f"forward 4: {kept}"]


@pytest.mark.parametrize("text", ["", "0"])
def test_off(text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SAC_REPORT_EVERY", text)
    caplog.set_level(logging.INFO)
    sac.apply(built(llama_stack), VALUE)(*tokens())
    assert lines(caplog) == []


@pytest.mark.parametrize("text", ["often", "-1", "1.5"])
def test_what_is_not_a_number_is_refused_and_the_model_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAC_REPORT_EVERY", text)
    model = built(llama_stack)
    with pytest.raises(ConfigError) as error:
        sac.apply(model, "full")
    assert str(error.value) == (
        f'SAC_REPORT_EVERY: "{text}" is not a number of forwards\n    legal: 1, 2, 3, …; 0 turns it off'
    )
    assert sac.report(model).mode == "none"


def test_copies_report_for_themselves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("SAC_REPORT_EVERY", "1")
    caplog.set_level(logging.INFO)
    copy = deepcopy(sac.apply(built(llama_stack), "full"))
    copy(*tokens())
    assert [line.partition(":")[0] for line in lines(caplog)] == ["forward 1"]
