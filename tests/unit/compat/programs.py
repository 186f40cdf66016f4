"""Small programs that the tests of other systems' faces share, and what each rank of a group says of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sac.full import RngTracker
from tests.support.stored_regions import differences, plainly

WIDTH = 8
Call = Callable[..., Any]


class Block(nn.Module):
    """A pre-norm block with dropout; `scale` and `mask` come as keywords."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), self.dropout)
        out = self.down(hidden) * scale
        return x + (out if mask is None else out * mask)


def trained(call: Call, *, needs_grad: bool = True, layers: int = 2, **kwargs: Any) -> dict[str, Tensor]:
    """Run blocks one after the other, each through `call`, and backward; return all that must not differ."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    x = torch.randn(4, WIDTH, requires_grad=needs_grad)
    h = x
    for block in blocks:
        h = call(block, h, **kwargs)
    return gradients_of(h.square().sum(), x, *blocks)


def gradients_of(loss: Tensor, *sources: Tensor | nn.Module) -> dict[str, Tensor]:
    """Run backward; return the loss, every gradient by place, and the random state."""
    loss.backward()
    found = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    for place, source in enumerate(sources):
        for number, tensor in enumerate(source.parameters() if isinstance(source, nn.Module) else [source]):
            if tensor.grad is not None:
                found[f"gradient {place}.{number}"] = tensor.grad
    return found


def forking(call: Call, tracker: RngTracker) -> dict[str, Tensor]:
    """Two regions with dropout from a named stream and from the default one, nested in one another."""
    torch.manual_seed(0)
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(4, WIDTH, requires_grad=True)

    def region(h: Tensor) -> Tensor:
        h = F.dropout(linear(h), 0.2)
        with tracker.fork():
            h = F.dropout(h.tanh(), 0.4)
            with tracker.fork():
                h = F.dropout(h.exp(), 0.3)
        return h

    found = gradients_of(call(region, call(region, x)).square().sum(), x, linear)
    return found | {"stream": tracker.get_states()["model-parallel-rng"]}


def unequal_in_a_residual(call: Call) -> list[str]:
    """Return what differs if `call` runs a region with dropout around which its input is added, an odd number.

    Systems that write a rank's share into the caller's tensor get it wrong.
    """

    def program(run: Call) -> dict[str, Tensor]:
        torch.manual_seed(0)
        block, x = nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Dropout(0.3)), torch.randn(3, 7, requires_grad=True)
        h = x * 1.5
        return gradients_of((run(block, h) + h).square().sum(), x, block)

    return differences(program(plainly), program(call))
