"""Programs that change from step to step, with everything offloaded on a simulated device: exact in every step."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.stores import transfers
from sac.stores.transfers import TransferLimits
from tests.support.blocks import ENGINES, policy
from tests.support.pairs import in_pairs
from tests.support.simulated_streams import Simulation, simulated_streams

WIDTH = 8
LIMITS = {
    "at once": TransferLimits(smallest=1, in_flight=0, ahead=1 << 20),
    "windows": TransferLimits(smallest=1, in_flight=700, ahead=700),
    "a small host": TransferLimits(smallest=1, in_flight=0, ahead=0, host=4096),
}
VALUES = {
    "ops": {"policy": policy({"ops": "*", "do": "offload"})},
    "ops and inputs": {"policy": policy({"ops": "*", "do": "offload"}), "store": "host"},
    "modules": {
        "policy": policy({"module": "inner", "do": "offload"}, {"ops": "matmul", "do": "offload", "optional": True})
    },
    "default": {"policy": policy(default="offload")},
}
KINDS = ("subclass", "dtypes", "strides", "complex", "writes", "dropout", "indices", "empty")


class Stopped(Exception):
    """What a program is interrupted with."""


class Marked(Tensor):
    """A subclass of tensors."""


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.lin(h)).mul(1.5)


class Block(nn.Module):
    """A block whose forward is given by ``kind``, which the program changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.kind, self.stops = "plain", False

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        h = self.inner(x)
        if self.kind == "dtypes":
            h = (
                (h.double().sin().half().float() * h.bfloat16().exp().float())
                + (h > 0) * 1
                + h.to(torch.complex64).real
            )
        elif self.kind == "strides":
            h = h.t().contiguous().t()[::2].repeat(2, 1)[: len(x)] + h.flip(0)[:, ::1] * h[:1].expand_as(h)
        elif self.kind == "complex":
            h = torch.view_as_real(torch.view_as_complex(h.reshape(-1, WIDTH // 2, 2).contiguous()).conj() * 1j)
            h = h.reshape(len(x), WIDTH)
        elif self.kind == "writes":
            h = h.clone()
            h[0].mul_(2)
            h = h.sin().add_(1)
        elif self.kind == "dropout":
            h = nn.functional.dropout(h, 0.3)
        elif self.kind == "indices":
            values, which = h.topk(3)
            h = h + values.sum(-1, keepdim=True) * h.gather(-1, which).mean()
        elif self.kind == "subclass":
            h = (h.as_subclass(Marked).sin() * 2).as_subclass(Tensor) + h
        elif self.kind == "empty":
            h = torch.cat([h, h[:0], (h[:0] @ self.out.weight)])
        if self.stops:
            raise Stopped
        return x + self.out(h).sin()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def given(rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH)


class Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise Stopped


# Programs: one step each


def kinds(model: Model, step: int) -> list[Any]:
    for block, kind in zip(model.blocks, KINDS[step:], strict=False):
        block.kind = kind
    x = given(4 + step % 2).requires_grad_()
    model(x).square().sum().backward()
    return [x.grad]


def lengths(model: Model, step: int) -> list[Any]:
    out = model(given((3, 9, 1, 30, 3, 0)[step % 6]))
    out.square().sum().backward()
    return [out]


def forward_fails(model: Model, step: int) -> list[Any]:
    model.blocks[step % 3].stops = step % 2 == 0
    try:
        model(given()).sum().backward()
    except Stopped:
        model.blocks[step % 3].stops = False
        model(given(5)).sum().backward()
    return []


def backward_fails(model: Model, step: int) -> list[Any]:
    h = model.blocks[0](given())
    h = Raises.apply(h) if step % 2 else h
    h = model.blocks[2](model.blocks[1](h))
    try:
        h.square().sum().backward(retain_graph=step > 2)
    except Stopped:
        if step > 2:  # what lies after the failure is there for another backward
            return [*torch.autograd.grad(h.sum(), [*model.blocks[2].parameters()], retain_graph=True)]
    return []


def two_backwards(model: Model, step: int) -> list[Any]:
    x = given().requires_grad_()
    out = model(x)
    (first,) = torch.autograd.grad(out.square().sum(), x, retain_graph=True, create_graph=step % 2 == 0)
    (first.square().sum() if step % 2 == 0 else out.sum()).backward(retain_graph=step == 2)
    if step == 2:
        out.sum().backward()
    return [first.detach()]


def micro_batches(model: Model, step: int) -> list[Any]:
    outs = [model(given(3 + at)) for at in range(step % 3 + 1)]
    with torch.no_grad():
        seen = [model(given())]
    for at in range(len(outs)) if step % 2 else reversed(range(len(outs))):
        if step != 3 or at:
            outs[at].square().sum().backward()
    return seen


def frozen(model: Model, step: int) -> list[Any]:
    for at, block in enumerate(model.blocks):
        block.inner.requires_grad_((step + at) % 2 == 0)
        block.out.bias.requires_grad_(step != 2)
    x = given().requires_grad_(step == 1)
    out = model(x)
    if step == 3:
        model.requires_grad_(True)
    out.sum().backward()
    model.requires_grad_(True)
    return [x.grad]


def evaluating(model: Model, step: int) -> list[Any]:
    out = model(given())
    model.eval()
    with torch.no_grad():
        seen = model(given(2))
    with torch.inference_mode():
        model(given(2))
    model.train(step % 2 == 0)
    out.sum().backward()
    model.train()
    return [seen]


def kept_graphs(model: Model, step: int) -> list[Any]:
    """The graph of a step is dropped, or kept over the next one."""
    known = vars(model).setdefault("known", [])
    out = model(given())
    if step % 3 == 0:
        known.append(out)
    else:
        out.sum().backward()
    if step == 2:
        known.pop().square().sum().backward()
    if step == 4:
        known.clear()
    return []


def in_a_thread(model: Model, step: int) -> list[Any]:
    """Backward, and every second time forward as well, run in another thread."""
    outs = [] if step % 2 else [model(given())]
    x = given()

    def work() -> None:
        out = outs[0] if outs else model(x)
        out.square().sum().backward()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return []


def autocast(model: Model, step: int) -> list[Any]:
    with torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0):
        out = model(given())
    out.float().sum().backward()
    return [out]


def new_weights(model: Model, step: int) -> list[Any]:
    if step == 2:
        model.blocks[1] = copy.deepcopy(model.blocks[1])
    if step == 3:
        model.blocks[0].out.weight = nn.Parameter(model.blocks[0].out.weight.detach() * 2)
    model(given()).sum().backward()
    with torch.no_grad():
        for weight in model.parameters():
            weight.sub_(weight.grad * 0.01)
    return []


PROGRAMS: dict[str, Callable[[Model, int], list[Any]]] = {
    one.__name__: one
    for one in (
        kinds,
        lengths,
        forward_fails,
        backward_fails,
        two_backwards,
        micro_batches,
        frozen,
        evaluating,
        kept_graphs,
        in_a_thread,
        autocast,
        new_weights,
    )
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Simulation]:
    monkeypatch.setattr(transfers, "LIMITS", LIMITS[request.getfixturevalue("limits")])
    with simulated_streams(monkeypatch) as simulation:
        yield simulation
    assert simulation.races == []
    assert any(line.endswith("copies") for line in simulation.log)


def state_of(model: Model, found: list[Any]) -> list[Any]:
    parameters = [*model.parameters()]
    state = [*found, *(one.grad for one in parameters), *parameters, *model.buffers(), torch.get_rng_state()]
    return [one if one is None else one.detach().clone() for one in state]


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # of a host that is full
@in_pairs(program=PROGRAMS.keys(), limits=LIMITS.keys(), name=VALUES.keys(), engine=ENGINES)
def test_as_without_sac(device, program, limits, name, engine):
    torch.manual_seed(1)
    plain = Model()
    ours = sac.apply(copy.deepcopy(plain), {"mode": "selective", "engine": engine, **VALUES[name]})
    for step in range(6):
        states = []
        for model in (plain, ours):
            torch.manual_seed(step)
            states.append(state_of(model, PROGRAMS[program](model, step)))
            model.zero_grad(set_to_none=step % 2 == 0)
        for one, other in zip(*states, strict=True):
            assert (one is None) == (other is None), step
            assert one is None or torch.equal(one, other), step
