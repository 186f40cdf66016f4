"""What sac does on an accelerator that is neither the CPU nor CUDA; run by `test_other_accelerators.py` by itself.

Prints a line for each claim that holds; an error ends it.
"""

from __future__ import annotations

import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sac
from tests.support.accelerator import NAME, attach
from tests.support.blocks import Stack

VALUES: dict[str, Any] = {
    "full": "full",
    "selective": "selective",
    "replay": {"mode": "selective", "policy": "general", "engine": "replay", "verify": "always"},
    "rerun": {"mode": "selective", "policy": "general", "engine": "rerun", "verify": "always"},
    "reentrant": {"mode": "full", "use_reentrant": True},
    "host": {"mode": "full", "store": "host"},
    "contiguous": {"mode": "full", "store": "contiguous", "num_checkpoints": 3},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), 0.3)
        return x + nn.functional.dropout(self.down(hidden), 0.3)


def loss_of(out: Tensor) -> Tensor:
    return out.float().square().mean()


def state() -> Tensor:
    return torch.get_device_module(NAME).get_rng_state()


def trained(model: nn.Module, value: Any, *, autocast: bool) -> tuple[list[Tensor], int]:
    """Return losses, gradients, buffers and the random state of three steps, and the bytes that sac kept."""
    model = deepcopy(model)
    if value is not None:
        sac.apply(model, value)
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for _ in range(3):
        x = torch.randn(5, 16, device=NAME)
        with torch.autocast(NAME, torch.bfloat16, enabled=autocast):
            loss = loss_of(model(x))
        loss.backward()
        found += [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(buffer.clone() for buffer in model.buffers()), state()], sac.report(model).kept_bytes


def refusal(call: Any) -> str:
    try:
        call()
    except sac.SacError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def main(library: str) -> None:
    attach(Path(library))
    assert torch.accelerator.current_accelerator() == torch.device(NAME)
    torch.manual_seed(0)
    model = Stack(*(Block() for _ in range(3))).to(NAME)
    with torch.autocast(NAME, torch.bfloat16):
        assert model.blocks[0].up(torch.ones(1, 16, device=NAME)).dtype == torch.bfloat16
    for autocast in (False, True):
        expected, _ = trained(model, None, autocast=autocast)
        for name, value in VALUES.items():
            found, kept_bytes = trained(model, value, autocast=autocast)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)), name
            assert kept_bytes > 0 or name == "host"
            print(f"{name}{' in bfloat16' if autocast else ''}: equal")

    inputs = (torch.randn(5, 16, device=NAME),)
    before = state()
    traced = sac.trace(model, inputs, "selective", loss_fn=loss_of)
    assert torch.equal(before, state())
    assert {row.decision for row in traced.rows} == {"save", "recompute"}
    print(refusal(lambda: sac.compare(model, inputs)))
    print(refusal(lambda: sac.plan(model, inputs, "50%", device="h100")))
    tracker = sac.full.RngTracker()
    tracker.add("stream", 5)
    assert {one.device.type for one in tracker.get_states().values()} == {"cpu"}
    with tracker.fork("stream"):
        torch.rand(1, device=NAME)
    assert torch.equal(before, state())
    print("named streams: equal")


if __name__ == "__main__":
    main(sys.argv[1])
