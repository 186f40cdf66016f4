"""What a saved module leaves behind other than its result: in its arguments, in the region around it, by an error.

Each block does something of the kind from the third step on, which nothing that the region can see announces. The
oracle is the same model without sac.
"""

from __future__ import annotations

import contextvars
import random
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
SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("SCALE", default=1.0)
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


def appends_by_call(sub: Sub, y: Tensor, add: Callable[..., None]) -> Tensor:
    if is_on():
        add(y.mean())
    return y


def sets(sub: Sub, y: Tensor, held: Any) -> Tensor:
    if is_on():
        held.scale, held.tensor = 2.0, held.tensor * y.detach()
        held.other.mul_(3)
    return y


def draws(sub: Sub, y: Tensor, *sources: Any) -> Tensor:
    if is_on():
        python, own, numbers = sources
        y = y * python.random() * torch.rand(8, generator=own) * next(numbers)
    return y


def raises(sub: Sub, y: Tensor, fails: bool) -> Tensor:
    sub.count += 1
    y = F.dropout(y)
    if fails and is_on():
        raise ArithmeticError
    return y


def owner_counts(sub: Sub, y: Tensor) -> Tensor:
    if is_on():
        sub.owner[0].scale += 1
        SCALE.set(SCALE.get() + 1)
        sub.owner[0].down.weight.requires_grad_(False)
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


def with_callback(block: Block, x: Tensor) -> Tensor:
    values = [1.0]
    return block.sub(x, values.append) * sum(values)


def with_sources(block: Block, x: Tensor) -> Tensor:
    python, own, numbers = random.Random(3), torch.Generator().manual_seed(3), iter([2.0, 3.0, 4.0])
    y = block.sub(x, python, own, numbers)
    return y * python.random() * torch.rand(8, generator=own) * next(numbers)


def tries_again(block: Block, x: Tensor) -> Tensor:
    try:
        y = block.sub(x, True)
    except ArithmeticError:
        y = block.sub(x * 2, False)
    return y * x * block.sub.count.clone()


def reads_owner(block: Block, x: Tensor) -> Tensor:
    block.down.weight.requires_grad_(True)
    SCALE.set(1.0)
    return block.sub(x) * block.scale * SCALE.get()


def reads_weights(block: Block, x: Tensor) -> Tensor:
    before = (x @ block.sub.fc.weight.detach().clone() * block.sub.large.mean()).sin()
    y = block.sub(before)
    return (y * block.sub.large.mean()) @ (block.sub.fc.weight * 2).detach()


def writes_alias(block: Block, x: Tensor) -> Tensor:
    z = (x * 3).detach()
    y, bits = block.sub(x, z)
    w = (z + y).sin()
    if is_on():
        bits.zero_()
    return y * z * w


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


def in_a_tower(block: Block, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: block.sub(row) * row)(x) * block.sub(x)


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "list": (calls(lambda: [1.0], lambda y, made: y * sum(made)), appends),
    "bound method": (with_callback, appends_by_call),
    "object": (
        calls(
            lambda: SimpleNamespace(scale=1.0, tensor=torch.ones(8), other=torch.ones(8)),
            lambda y, made: y * made.scale * made.tensor * made.other,
        ),
        sets,
    ),
    "generators": (with_sources, draws),
    "error": (tries_again, raises),
    "owner": (reads_owner, owner_counts),
    "weights": (reads_weights, weight_written),
    "alias of an argument": (writes_alias, lambda sub, y, z: (y, z.view(torch.int32))),
    "buffer": (writes_buffer, lambda sub, y: (y, sub.large)),
    "result": (
        changes_result,
        lambda sub, y: ((pair := [y], pair), SimpleNamespace(scale=2.0), (one for one in (1.0, 2.0))),
    ),
    "vmap": (in_a_tower, lambda sub, y: y),
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


def test_a_module_whose_arguments_stay_as_they_are_does_not_run_again() -> None:
    runs: list[int] = []

    def inside(sub: Sub, y: Tensor, values: Any) -> Any:
        runs.append(1)
        return y * values["scale"] * values["held"].scale, values["held"]

    def body(block: Block, x: Tensor) -> Tensor:
        y, held = block.sub(x, {"scale": 2.0, "held": SimpleNamespace(scale=3.0)})
        return (y * held.scale).sin()

    block = nn.ModuleList([Block(body, inside)])
    sac.apply(block, {"mode": "selective", "blocks": ["*"], **WAYS["alone"]})
    for _ in range(3):
        block[0](torch.randn(3, 8)).sum().backward()
    assert len(runs) == 3


def test_a_gradient_inside_of_the_region_leaves_the_versions_of_buffers() -> None:
    """The module runs again for it, and autograd has saved a buffer that it writes to."""

    def inside(sub: Sub, y: Tensor) -> Tensor:
        sub.count += 1
        return y * sub.count

    def body(block: Block, x: Tensor) -> Tensor:
        x = x * 1 if x.requires_grad else x.requires_grad_()
        y = block.sub(x)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return grad * y

    found = []
    for way in (None, *WAYS.values()):
        if isinstance(way, dict) and "policy" not in way:
            continue
        torch.manual_seed(0)
        blocks = nn.ModuleList([Block(body, inside)])
        if way is not None:
            sac.apply(blocks, {"mode": "selective", "blocks": ["*"], **way})
        for _ in range(2):
            blocks[0](torch.ones(3, 8)).sum().backward()
        found.append(blocks[0].sub.fc.weight.grad)
    assert all(torch.equal(found[0], one) for one in found)
