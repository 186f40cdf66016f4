"""Regions that are recomputed on two threads at once: what belongs to a thread is not mixed up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sac
from tests.support.runs import Noted

WAIT = 60  # seconds until a test that hangs gives up


def test_what_belongs_to_a_thread_is_the_recomputations_own() -> None:
    """Autocast, modes and grad mode of one thread's recomputation are not seen on the other."""
    seen = Noted()

    def own() -> Any:
        stack = torch.overrides._get_current_function_mode_stack()
        return torch.is_autocast_enabled("cpu"), [type(mode).__name__ for mode in stack], torch.is_grad_enabled()

    gate = threading.Barrier(2)

    def region(name: str) -> Callable[[Tensor], Tensor]:
        def body(x: Tensor) -> Tensor:
            if name in [noted for noted, _ in seen]:
                gate.wait(WAIT)
                seen.append((f"{name} again", own()))
                gate.wait(WAIT)
            else:
                seen.append((name, own()))
            return x.sin().cos()

        return body

    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu"), torch.device("cpu"):
        first = sac.checkpoint(region("first"), x).sum()
    second = sac.checkpoint(region("second"), x).sum()
    threads = [threading.Thread(target=loss.backward) for loss in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    found = dict(seen)
    assert found["first"] == found["first again"] == (True, ["DeviceContext"], True)
    assert found["second"] == found["second again"] == (False, [], True)
