"""Blocks whose sub-modules are saved as a whole: what such modules return, write to, draw, and what is done with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.blocks import FunctionBlock, Stack
from tests.support.runs import Noted

WIDTH = 8


def whole(module: str, do: str = "save", **matchers: Any) -> dict[str, Any]:
    """A rule on whole modules."""
    return {"module": module, **matchers, "do": do}


class Apply(nn.Module):
    """A sub-module that applies a function of itself and its arguments; it has a square weight and counts its runs."""

    def __init__(self, body: Callable[..., Any], width: int = WIDTH) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, *values: Any, **more: Any) -> Any:
        RUNS.append(1)
        return self.body(self, *values, **more)


RUNS = Noted()  # of modules of the class above; not on the module, which would be another one each time


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Holder:
    """Holds tensors under names, and is no pytree."""

    def __init__(self, hidden: Tensor, extra: Tensor) -> None:
        self.hidden = hidden
        self.extra = [extra]


def product(part: Apply, x: Tensor, **more: Any) -> Tensor:
    return (x @ part.weight).sin()


def relu_in_place(part: Apply, x: Tensor) -> Tensor:
    return x.relu_()


def writes_argument(part: Apply, x: Tensor, y: Tensor) -> Tensor:
    y.mul_(2).add_(x @ part.weight)
    return x.cos()


def halves(part: Apply, x: Tensor) -> tuple[Tensor, Tensor]:
    both = x @ part.weight
    return both[:, :4], both


# What a region does with its part; each is called as body(block, x)


def called_twice(block: Any, x: Tensor) -> Tensor:
    return block.part(block.part(x).cos())


def in_other_order(block: Any, x: Tensor) -> Tensor:
    return block.other(x).cos() + block.part(block.other(x.sin()))


def same_module_twice(block: Any, x: Tensor) -> Tensor:
    return block.part(x).cos() * block.alias(x)


def inside_each_other(block: Any, x: Tensor) -> Tensor:
    return block.tower(x).sin() * x


def keywords(block: Any, x: Tensor) -> Tensor:
    return block.part(x, mask=None, scale=[1.0, x]).sin()


def identity(block: Any, x: Tensor) -> Tensor:
    y = block.identity(x)
    return block.part(y).sin() * y.cos()


def identity_written_after(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    y = block.identity(h)
    y.add_(1)
    return block.part(h.sin()).sin() * y.cos()


def view_of_argument(block: Any, x: Tensor) -> Tensor:
    y = block.view(x @ block.a)
    return (block.part(y).sin() * y.cos()).sin()


def view_written_after(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    y = block.view(h)
    y.mul_(3)
    return block.part(h).sin() * y.cos()


def argument_written(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    y = block.in_place(h)
    return block.part(y).sin() * h.cos()


def argument_read_and_written(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    before = h + 1  # saves nothing
    y = block.in_place(h)
    return block.part(y).sin() * before.cos()


def result_of_module_written_by_module(block: Any, x: Tensor) -> Tensor:
    h = block.plain(x)
    before = h + 1
    y = block.in_place(h)
    return (y.sin() @ block.a) * before.cos()


def second_argument_written(block: Any, x: Tensor) -> Tensor:
    h = torch.ones_like(x)  # needs no gradient until it is written to
    y = block.writer(x, h)
    return (y @ block.a).sin() * h.sin()


def result_written(block: Any, x: Tensor) -> Tensor:
    y = block.part(x).cos()
    z = block.part(y * 2)
    kept = z.exp()
    z = z * 1
    w = block.plain(y)
    w.mul_(3)
    return w.sin() * kept * z


def result_read_then_written(block: Any, x: Tensor) -> Tensor:
    y = block.plain(x)
    z = y + 1  # saves nothing
    y.mul_(2)
    return (z.sin() @ block.a) * y.cos()


def part_of_result_written(block: Any, x: Tensor) -> Tensor:
    first, both = block.halves(x)
    z = both + 1
    first.mul_(2)
    return (z.sin() @ block.a) * both.cos() * first.sum()


def small_part_of_result(block: Any, x: Tensor) -> Tensor:
    return block.first_row(x).sin() * x.cos()


def batch_norm(block: Any, x: Tensor) -> Tensor:
    return block.norm(block.part(x).sin()).sin()


def dropout(block: Any, x: Tensor) -> Tensor:
    y = torch.dropout(x, 0.5, True).sin()
    z = block.drop(y).sin()
    return torch.dropout(block.part(z), 0.5, True).sin() * x


def passed_generator(block: Any, x: Tensor) -> Tensor:
    before = torch.rand(x.shape, generator=block.generator) * x.sin()
    y = block.draws(before).sin()
    return (torch.rand(x.shape, generator=block.generator) * y).sin() * x.cos()


def without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = block.part(x)
    return (y * x).sin() * block.part(x).sin()


def autocast(block: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = block.part(x)
        z = x @ block.a
    return (y.float().sin() @ block.b).sin() * z.float().cos()


def returns_none(block: Any, x: Tensor) -> Tensor:
    assert block.none(x) is None
    return block.part(x).sin()


def structures(block: Any, x: Tensor) -> Tensor:
    pair = block.pair(x)
    assert type(pair) is Pair
    found = block.mapping(pair.first)
    output = block.output(found["x"][0])
    assert type(output) is Output
    assert output.extra["note"] == "kept"
    holder = block.holder(output.hidden)
    assert type(holder) is Holder
    return (holder.hidden.sin() * holder.extra[0] * output.extra["y"]).sin() * pair.second.sin()


def returns_parameter(block: Any, x: Tensor) -> Tensor:
    return (x @ block.weights(x)).sin() * block.part(x).sin()


def frozen(block: Any, x: Tensor) -> Tensor:
    block.part.weight.requires_grad_(False)
    return block.part(x).sin() * x


def gradient_inside(block: Any, x: Tensor) -> Tensor:
    leaf = x.detach().requires_grad_()
    y = block.part(leaf).sin()
    (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    return (block.part(x).sin() * grad.detach()).sin()


CHILDREN: dict[str, Callable[..., Any]] = {
    "in_place": relu_in_place,
    "writer": writes_argument,
    "identity": lambda part, x: x,
    "view": lambda part, x: x.transpose(0, 1),
    "plain": lambda part, x: x @ part.weight,
    "halves": halves,
    "first_row": lambda part, x: (x @ part.weight)[:1],
    "drop": lambda part, x: torch.dropout(x @ part.weight, 0.5, True),
    "none": lambda part, x: None,
    "pair": lambda part, x: Pair(x @ part.weight, x * 2),
    "mapping": lambda part, x: {"x": [x @ part.weight, None], "n": 3},
    "output": lambda part, x: Output(x @ part.weight, {"y": x * 3, "note": "kept"}),
    "holder": lambda part, x: Holder(x @ part.weight, x * 3),
    "weights": lambda part, x: part.weight,
}
BODIES = (
    called_twice,
    in_other_order,
    same_module_twice,
    inside_each_other,
    keywords,
    identity,
    identity_written_after,
    view_of_argument,
    view_written_after,
    argument_written,
    argument_read_and_written,
    result_of_module_written_by_module,
    second_argument_written,
    result_written,
    result_read_then_written,
    part_of_result_written,
    small_part_of_result,
    batch_norm,
    dropout,
    passed_generator,
    without_gradient,
    autocast,
    returns_none,
    structures,
    returns_parameter,
    frozen,
    gradient_inside,
)


class Drawing(nn.Module):
    """Draws from a generator that it holds."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


def block_of(body: Callable[..., Any]) -> FunctionBlock:
    """A block with every child that some body uses."""
    block = FunctionBlock(body, WIDTH)
    block.part = Apply(product)
    block.alias = block.part
    block.other = Apply(product)
    block.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)))
    block.norm = nn.BatchNorm1d(WIDTH)
    for name, child in CHILDREN.items():
        block.add_module(name, Apply(child))
    if body is passed_generator:
        block.generator = torch.Generator().manual_seed(3)
        block.draws = Drawing(block.generator)
    return block


def stack_of(body: Callable[..., Any], blocks: int = 2) -> Stack:
    """Some such blocks, one after the other."""
    return Stack(*(block_of(body) for _ in range(blocks)))


EVERY = f"{{part,other,alias,tower,norm,draws,{','.join(CHILDREN)}}}"
