"""The spellings of a budget in the config, and the errors for all others."""

from __future__ import annotations

from typing import Any

import pytest

from sac.config import parse_config
from sac.config_keys import StepBudget
from sac.errors import ConfigError


def parsed(**keys: Any) -> StepBudget | None:
    return parse_config({"mode": "selective", **keys}).budget


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


LEGAL = (
    ' / legal: a whole number of bytes, or text such as "64KiB", "1MiB", "1.5GB", a share of the range such as "50%", '
    "auto, or {device: 90%}"
)
# The keys, and what is told (` / ` begins a line of it).
ILLEGAL: list[tuple[dict[str, Any], str]] = [
    ({"budget": "lots"}, f'budget: budget is "lots": it is not a number with a unit{LEGAL}'),
    ({"budget": "120%"}, 'budget: budget is "120%" / legal: a share, 0% to 100%'),
    ({"budget": {"device": "most"}}, 'budget.device: budget.device is "most" / legal: a share, 0% to 100%'),
    ({"budget": {"device": 0.9}}, "budget.device: budget.device is 0.9 / legal: a share, 0% to 100%"),
    ({"budget": {"devise": "90%"}}, 'budget: unknown key "devise" in budget / did you mean: device'),
    ({"budget": 0}, f"budget: budget is 0{LEGAL}"),
    ({"budget": True}, f"budget: budget is true: it is not a number with a unit{LEGAL}"),
    ({"mode": "full", "budget": "1GiB"}, "budget: mode full leaves nothing to choose / fix: write `mode: selective`, "),
    ({"optimizer": "sgd"}, "optimizer: it says how a budget is met, and there is none / fix: give a budget"),
    ({"budget": "1GiB", "engine": "rerun"}, "engine: a budget is planned for the replay engine / fix: leave the eng"),
    (
        {"budget": "1GiB", "policy": "llama"},
        "policy: a budget chooses among all ops / fix: leave out the policy, or the b",
    ),
    ({"budget": "1GiB", "optimizer": "adamwx"}, 'optimizer: optimizer is "adamwx" / did you mean: '),
    ({"budget": "1GiB", "host_memory": "most"}, 'host_memory: host_memory is "most": it is not a number with a unit'),
]


@pytest.mark.parametrize(("keys", "text"), ILLEGAL)
def test_what_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config({"mode": "selective", **keys})
    assert str(raised.value).replace("\n    ", " / ").startswith(f"activation_checkpointing.{text}")


def test_none_ignores_a_budget() -> None:
    assert parse_config({"mode": "none", "budget": "1GiB"}).mode == "none"
