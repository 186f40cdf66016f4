"""Policies, and the config value of one, for regions under the replay engine."""

from __future__ import annotations

from typing import Any

from tests.support.blocks import alternate, policy, save, selective

POLICIES = {
    "nothing": policy({**save("*", call={"index": 99}), "optional": True}),  # what may save is under the mode each time
    "matmuls": policy({**save("matmul"), "optional": True}),
    "every second op": policy(alternate("*")),
}


def replay(chosen: dict[str, Any], verify: str = "never", **more: Any) -> dict[str, Any]:
    """The config value of a policy under replay. Without `verify` nothing hides what the tape gets wrong."""
    return selective(chosen, engine="replay", verify=verify, **more)
