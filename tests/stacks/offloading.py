"""Train in a stack on a simulated device, with everything that rules offload on the host."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.stacks.composition import Outcome
from tests.support.blocks import policy
from tests.support.simulated_streams import simulated_streams

OFFLOADS: dict[str, Any] = {
    "mode": "selective",
    "policy": policy({"ops": "matmul", "do": "offload"}),
    "store": "host",
}


def on_a_device(stack: str, options: dict[str, Any]) -> tuple[Outcome, int, list[str]]:
    """Return what the rank has after training, how often it has copied, and what it has read too early."""
    module, _, function = stack.rpartition(":")
    train = getattr(importlib.import_module(f"tests.stacks.{module}"), function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "LIMITS", TransferLimits(smallest=1, in_flight=0, ahead=1 << 20))
        with simulated_streams(patch) as device:
            found = train(OFFLOADS, **options)
        return found, sum("copies" in line for line in device.log), device.races
