"""The spellings of a budget in the config, and the errors for all others."""

from __future__ import annotations

from typing import Any

import pytest

from sac.config import parse_config
from sac.config_keys import STATES, StepBudget
from sac.errors import ConfigError

LEGAL = (
    'legal: a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB", a share of the range such as "50%", '
    "auto, or {device: 90%}"
)


def parsed(**keys: Any) -> StepBudget | None:
    return parse_config({"mode": "selective", **keys}).budget


def problem(**keys: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        parse_config({"mode": "selective", **keys})
    return str(raised.value)


@pytest.mark.parametrize(
    ("written", "bytes_", "share", "of_device", "told"),
    [
        ("60GiB", 60 * 2**30, None, None, "60GiB"),
        (4096, 4096, None, None, "4096"),
        ("50%", None, 0.5, None, "50%"),
        ("auto", None, None, 0.9, "auto"),
        (" Auto ", None, None, 0.9, "auto"),
        ({"device": "75%"}, None, None, 0.75, "{device: 75%}"),
    ],
)
def test_spellings(written: Any, bytes_: int | None, share: float | None, of_device: float | None, told: str) -> None:
    budget = parsed(budget=written)
    assert budget == StepBudget(bytes_, share, of_device, told)
    assert str(budget) == told
    assert parsed(budget=budget) is budget


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (
            "lots",
            "activation_checkpointing.budget: 'lots' is not a budget: it is not a number with a unit\n    " + LEGAL,
        ),
        ("120%", "activation_checkpointing.budget: '120%' is not a budget: a share is 0% to 100%\n    " + LEGAL),
        ({"device": "most"}, "{'device': 'most'} is not a budget: a share is a number with %"),
        ({"device": 0.9}, "{'device': 0.9} is not a budget: a share is 0% to 100%"),
        (
            {"devise": "90%"},
            "budget: {'devise': '90%'} is not a budget: it is not a number with a unit",
        ),
        (0, "activation_checkpointing.budget: 0 is not a budget: it is nothing\n    " + LEGAL),
        (True, "activation_checkpointing.budget: True is not a budget: it is not a number with a unit\n    " + LEGAL),
    ],
)
def test_no_budget(written: Any, message: str) -> None:
    assert message in problem(budget=written)


def test_full_has_nothing_to_choose_and_none_ignores_a_budget() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"mode": "full", "budget": "1GiB"})
    assert str(raised.value) == (
        "activation_checkpointing.budget: mode full leaves nothing to choose\n"
        "    fix: write `mode: selective`, or leave the budget out"
    )
    assert parse_config({"mode": "none", "budget": "1GiB"}).mode == "none"


def test_a_key_that_only_a_budget_needs() -> None:
    assert problem(optimizer="sgd") == (
        "activation_checkpointing.optimizer: it says how a budget is met, and there is none\n    fix: give a budget"
    )
    assert parsed(budget="1GiB", optimizer="sgd") is not None


def test_engine_rerun() -> None:
    assert problem(budget="1GiB", engine="rerun") == (
        "activation_checkpointing.engine: a budget is planned for the replay engine\n    fix: leave the engine out"
    )


def test_words() -> None:
    assert problem(budget="1GiB", optimizer="adamwx") == (
        'activation_checkpointing.optimizer: optimizer is "adamwx"\n'
        f"    did you mean: adamw\n    legal: {', '.join(STATES)}\n"
        '    fix: write "adamw"'
    )
