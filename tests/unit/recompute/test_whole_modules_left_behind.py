"""What a saved module leaves behind other than its result: in its arguments, in the region around it, by an error.

Each block does something of the kind from the third step on, which nothing that the region can see announces. The
oracle is the same model without sac.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import policy

WHOLE, PRODUCTS = {"module": "sub", "do": "save"}, {"ops": "matmul", "do": "save"}
WAYS: dict[str, Any] = {
    "alone": {"policy": policy(WHOLE)},
    "to the end": {"policy": policy(WHOLE), "early_stop": False},
    "rerun": {"policy": policy(WHOLE, PRODUCTS), "engine": "rerun"},
    "replay": {"policy": policy(WHOLE, PRODUCTS), "engine": "replay"},
    "context_fn": policy(WHOLE, PRODUCTS),
}
ON = torch.zeros(())  # reading it is not evidence that a region can use: the number is read outside of the region


class Sub(nn.Module):
    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.fc, self.owner = body, nn.Linear(8, 8), []
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("large", torch.ones(20_000))

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.body(self, torch.tanh(self.fc(x)), *more)


class Block(nn.Module):
    def __init__(self, body: Callable[..., Any], inside: Callable[..., Any]) -> None:
        super().__init__()
        self.body, self.sub, self.down, self.scale = body, Sub(inside), nn.Linear(8, 8), 1.0
        self.sub.owner.append(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.body(self, x).sin()).cos()


def is_on() -> bool:
    return bool(ON.numpy() > 0)  # no op


def appends(sub: Sub, y: Tensor, values: list[Any]) -> Tensor:
    if is_on():
        values.append(y.mean())
    return y


def sets(sub: Sub, y: Tensor, held: Any) -> Tensor:
    if is_on():
        held.scale, held.tensor = 2.0, held.tensor * y.detach()
        held.other.mul_(3)
    return y


def raises(sub: Sub, y: Tensor, fails: bool) -> Tensor:
    sub.count += 1
    y = F.dropout(y)
    if fails and is_on():
        raise ArithmeticError
    return y


def weight_written(sub: Sub, y: Tensor) -> Tensor:
    if is_on():
        with torch.no_grad():
            sub.owner[0].down.weight.mul_(0.9)
        sub.fc.weight.data.mul_(0.9)
        sub.large.add_(1)
    return y * sub.large.mean()


def calls(make: Callable[[], Any], use: Callable[[Tensor, Any], Tensor]) -> Callable[..., Tensor]:
    """A block that makes an object, passes it to the module, and uses it afterwards."""

    def body(block: Block, x: Tensor) -> Tensor:
        made = make()
        return use(block.sub(x, made), made)

    return body


def tries_again(block: Block, x: Tensor) -> Tensor:
    try:
        y = block.sub(x, True)
    except ArithmeticError:
        y = block.sub(x * 2, False)
    return y * x * block.sub.count.clone()


def reads_weights(block: Block, x: Tensor) -> Tensor:
    before = (x @ block.sub.fc.weight.detach().clone() * block.sub.large.mean()).sin()
    y = block.sub(before)
    return (y * block.sub.large.mean()) @ (block.sub.fc.weight * 2).detach()


def writes_buffer(block: Block, x: Tensor) -> Tensor:
    y, large = block.sub(x)
    y = (y * large.mean()).sin()
    if is_on():
        large.mul_(1.5)
    return y * block.sub.large.mean()


def changes_result(block: Block, x: Tensor) -> Tensor:
    (first, again), held, rest = block.sub(x)
    y = (first[0] * held.scale).sin()
    if is_on():
        first.append(1.0)
        held.scale = 4.0
    return y * len(again) * held.scale * sum(rest)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "list": (calls(lambda: [1.0], lambda y, made: y * sum(made)), appends),
    "object": (
        calls(
            lambda: SimpleNamespace(scale=1.0, tensor=torch.ones(8), other=torch.ones(8)),
            lambda y, made: y * made.scale * made.tensor * made.other,
        ),
        sets,
    ),
    "error": (tries_again, raises),
    "weights": (reads_weights, weight_written),
    "buffer": (writes_buffer, lambda sub, y: (y, sub.large)),
    "result": (
        changes_result,
        lambda sub, y: ((pair := [y], pair), SimpleNamespace(scale=2.0), (one for one in (1.0, 2.0))),
    ),
}


def trained(case: str, way: Any) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(*CASES[case]) for _ in range(2))
    calls: list[Callable[[Tensor], Tensor]] = [*blocks]
    if isinstance(way, dict) and "policy" in way:
        sac.apply(blocks, {"mode": "selective", "blocks": ["*"], **way})
    elif way is not None:
        made = [sac.context_fn(way, block) for block in blocks]
        calls = [
            lambda x, block=block, context_fn=context_fn: checkpoint(  # type: ignore[misc]
                block, x, use_reentrant=False, context_fn=context_fn
            )
            for block, context_fn in zip(blocks, made, strict=True)
        ]
    found: list[Tensor] = []
    for step in range(4):
        ON.fill_(float(step >= 2))
        torch.manual_seed(step)
        loss = calls[1](calls[0](torch.randn(3, 8))).square().mean()
        loss.backward()
        found += [loss.detach(), torch.get_rng_state(), *(one.detach().clone() for one in blocks.buffers())]
        for one in blocks.parameters():
            found += [one.detach().clone(), torch.zeros(()) if one.grad is None else one.grad]
            with torch.no_grad():
                one -= 0.1 * found[-1]
            one.grad = None
    return found


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_as_without_sac(case: str, way: str) -> None:
    pairs = zip(trained(case, WAYS[way]), trained(case, None), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
