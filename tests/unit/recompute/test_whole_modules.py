"""Modules that are saved as a whole: what they may take, return, write to and draw, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.reporting import decisions_of
from sac.tools.comparison import count_flops
from tests.support.blocks import (
    FULL,
    FunctionBlock,
    Stack,
    install,
    llama_stack,
    policy,
    save,
    selective,
    square,
    tokens,
    whole,
)
from tests.support.recording import kept_bytes
from tests.support.runs import Noted
from tests.support.training import assert_same, assert_same_training, built, train

WIDTH = 8
SQUARE = WIDTH * WIDTH * 4  # bytes of one matrix
RUNS = Noted()  # of modules of the class below; not on the module, which would be another one each time


class Apply(nn.Module):
    """A sub-module that applies a function of itself and its arguments; it has a square weight and counts its runs."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.body = body
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.register_buffer("large", torch.zeros(200))

    def forward(self, *values: Any, **more: Any) -> Any:
        RUNS.append(1)
        return self.body(self, *values, **more)


class Drawing(nn.Module):
    """Draws from a generator that it holds."""

    generator: torch.Generator

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


def stack_of(part: Callable[..., Any], body: Callable[..., Any], count: int = 2) -> Stack:
    blocks = []
    for _ in range(count):
        block = FunctionBlock(body, WIDTH, part=Apply(part), other=Apply(product), draws=Drawing())
        block.alias, block.part.owner = block.part, [block]
        block.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)))
        block.generator = block.draws.generator = torch.Generator().manual_seed(3)
        blocks.append(block)
    return Stack(*blocks)


STEPS = Noted()


def inputs(device: str) -> tuple[Tensor, ...]:
    STEPS.append(1)
    return square(device)


def is_late() -> bool:
    """Whether this is the third or fourth step of four, which nothing that the region can see announces."""
    return len(STEPS) % 4 in (3, 0)


# -- Parts


def linear(part: Apply, x: Tensor) -> Tensor:
    return x @ part.weight


def product(part: Apply, x: Tensor, **more: Any) -> Tensor:
    return (x @ part.weight).sin()


def relu_in_place(part: Apply, x: Tensor) -> Tensor:
    return x.relu_()


def writes_argument(part: Apply, x: Tensor, y: Tensor) -> Tensor:
    y.mul_(2).add_(x @ part.weight)
    return x.cos()


def writes_buffer(part: Apply, x: Tensor) -> Tensor:
    part.large += 1
    return x @ part.weight * part.large.mean()


def halves(part: Apply, x: Tensor) -> tuple[Tensor, Tensor]:
    both = x @ part.weight
    return both[:, :4], both


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclasses.dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Holder:
    """Holds a tensor under a name, and is no pytree."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = [hidden]


def structures(part: Apply, x: Tensor) -> Any:
    return {"x": [x @ part.weight, None], "n": 3}, Pair(x * 2, x.sin()), Output(x * 3, {"note": "kept"}), Holder(x * 4)


def twice_and_argument(part: Apply, x: Tensor) -> Any:
    h = (x @ part.weight).sin()
    return h, Output(h, x)


OFFSETS = torch.tensor([0, 2, 5, WIDTH])  # torch takes two jagged tensors for alike only if they share this tensor


def jagged(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(x, OFFSETS)


# -- What a region does with its part; each is called as body(block, x)


def written_after(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    y = block.part(h)
    y.mul_(3)
    return block.other(h.sin()).sin() * y.cos()


def reads_argument_before(block: Any, x: Tensor) -> Tensor:
    h = x @ block.a
    before = h + 1  # saves nothing
    return block.other(block.part(h)).sin() * before.cos()


def result_of_a_module_goes_in(block: Any, x: Tensor) -> Tensor:
    h = block.other(x)
    before = h + 1
    return (block.part(h).sin() @ block.a) * before.cos()


def second_argument_written(block: Any, x: Tensor) -> Tensor:
    h = torch.ones_like(x)  # needs no gradient until it is written to
    return (block.part(x, h) @ block.a).sin() * h.sin()


def part_of_result_written(block: Any, x: Tensor) -> Tensor:
    first, both = block.part(x)
    z = both + 1
    first.mul_(2)
    return (z.sin() @ block.a) * both.cos() * first.sum()


def dropout(block: Any, x: Tensor) -> Tensor:
    y = torch.dropout(x, 0.5, True).sin()
    return torch.dropout(block.other(block.part(y).sin()), 0.5, True).sin() * x


def passed_generator(block: Any, x: Tensor) -> Tensor:
    y = block.draws(torch.rand(x.shape, generator=block.generator) * x.sin()).sin()
    return (torch.rand(x.shape, generator=block.generator) * y).sin() * x.cos()


def without_gradient(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = block.part(x)
    return (y * x).sin() * block.part(x).sin()


def takes_apart(block: Any, x: Tensor) -> Tensor:
    mapping, pair, output, holder = block.part(x)
    assert (type(pair), type(output), type(holder)) == (Pair, Output, Holder)
    assert (mapping["n"], mapping["x"][1], output.extra) == (3, None, {"note": "kept"})
    return (mapping["x"][0].sin() * pair.second + output.hidden * holder.hidden[0]).sin() * pair.first


def asks_for_identity(block: Any, x: Tensor) -> Tensor:
    a = x.exp()
    h, output = block.part(a)
    return h.cos() * x if h is output.hidden and output.extra is a else h.cos()


PROGRAMS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "in other order, twice": (
        product,
        lambda block, x: block.other(x).cos() + block.part(block.part(block.other(x.sin())).cos()),
    ),
    "under two names": (product, lambda block, x: block.part(x).cos() * block.alias(x)),
    "inside each other": (product, lambda block, x: block.tower(x).sin() * x),
    "keywords": (product, lambda block, x: block.part(x, mask=None, scale=[1.0, x]).sin()),
    "argument, written to after": (lambda part, x: x, written_after),
    "view of the argument, written to after": (lambda part, x: x.transpose(0, 1), written_after),
    "argument in place": (relu_in_place, reads_argument_before),
    "result of another in place": (relu_in_place, result_of_a_module_goes_in),
    "second argument written": (writes_argument, second_argument_written),
    "buffer written": (writes_buffer, lambda block, x: block.part(x.exp()).sin()),
    "part of the result written": (halves, part_of_result_written),
    "dropout": (lambda part, x: torch.dropout(x @ part.weight, 0.5, True), dropout),
    "generator": (product, passed_generator),
    "without gradient": (product, without_gradient),
    "none": (lambda part, x: None, lambda block, x: block.other(x).sin() * (2 if block.part(x) is None else 0)),
    "structures": (structures, takes_apart),
    "one tensor twice, and the argument": (twice_and_argument, asks_for_identity),
    "parameter": (lambda part, x: part.weight, lambda block, x: (x @ block.part(x)).sin() * block.other(x).sin()),
    "jagged in and out": (linear, lambda block, x: block.part(jagged(x @ block.a)).sin().values() @ block.b),
    "sparse": (
        lambda part, x: (x @ part.weight).relu().to_sparse(),
        lambda block, x: torch.sparse.mm(block.part(x @ block.a), block.b).sin(),
    ),
    "conjugated": (
        lambda part, x: torch.complex(x @ part.weight, x).conj()[:, :3],
        lambda block, x: (block.part(x @ block.a) @ torch.complex(block.b[:3], block.b[:3])).real.sin(),
    ),
}


# -- What a module leaves behind other than its result, in late steps only


def appends(part: Apply, x: Tensor, values: list[Any]) -> Tensor:
    if is_late():
        values.append(x.mean())
    return product(part, x)


def uses_list(block: Any, x: Tensor) -> Tensor:
    made = [1.0]
    return block.part(x.exp(), made) * sum(made)


def sets(part: Apply, x: Tensor, held: Any) -> Tensor:
    if is_late():
        held.scale, held.tensor = 2.0, held.tensor * x.detach()
        held.other.mul_(3)
    return product(part, x)


def uses_object(block: Any, x: Tensor) -> Tensor:
    made = SimpleNamespace(scale=1.0, tensor=torch.ones(8), other=torch.ones(8))
    return block.part(x.exp(), made) * made.scale * made.tensor * made.other


def writes_weights(part: Apply, x: Tensor) -> Tensor:
    if is_late():
        with torch.no_grad():
            part.owner[0].b.mul_(0.9)
        part.weight.data.mul_(0.9)
        part.large.add_(1)
    return product(part, x) * (1 + part.large.mean())


def uses_weights(block: Any, x: Tensor) -> Tensor:
    before = (x @ block.part.weight.detach().clone() + block.part.large.mean()).sin()
    return ((block.part(before) + block.part.large.mean()) @ (block.part.weight * 2).detach()).sin() @ block.b


LEFT_BEHIND: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "in a list": (appends, uses_list),
    "in an object": (sets, uses_object),
    "in weights": (writes_weights, uses_weights),
}
EVERY = "{part,other,alias,tower,draws}"
PRODUCTS = save("matmul", optional=True)
VALUES: dict[str, tuple[Any, str]] = {
    "modules": (selective(policy(whole(EVERY))), "apply"),
    "modules and products": (selective(policy(whole(EVERY), PRODUCTS)), "apply"),
    "to the end": (selective(policy(whole(EVERY)), early_stop=False), "apply"),
    "rerun": (selective(policy(whole(EVERY), PRODUCTS), engine="rerun"), "apply"),
    "context_fn": (selective(policy(whole(EVERY))), "context_fn with module"),
}


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("program", PROGRAMS | LEFT_BEHIND)
def test_training_is_the_same(program: str, value: str) -> None:
    chosen, entry = VALUES[value]
    del STEPS[:]
    build = partial(stack_of, *(PROGRAMS | LEFT_BEHIND)[program])
    assert_same_training(build, chosen, entry=entry, steps=4, make_input=inputs)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_saved_module_runs_once(program: str) -> None:
    def runs(value: Any) -> int:
        del RUNS[:]
        train(install(built(partial(stack_of, *PROGRAMS[program])), value), steps=3, make_input=square)
        return len(RUNS)

    assert runs(VALUES["modules"][0]) == runs("none")


# -- Costs


def flops(model: nn.Module) -> int:
    """Of a step."""
    given = tokens()
    return count_flops(lambda: model(given[0].requires_grad_()).square().sum().backward())


def test_bytes_are_those_of_the_result_and_of_what_autograd_keeps_inside() -> None:
    def kept(value: Any) -> int:
        model = sac.apply(built(lambda: stack_of(product, lambda block, x: (block.part(x.exp()) + 1).cos())), value)
        found = kept_bytes(model, square(), warm=2)
        if value is not FULL:
            (kind,) = sac.report(model).kinds
            assert kind.saved_bytes == kind.rules[0].saved_bytes == 2 * SQUARE
            assert kind.count == 2
        return found

    # The sine's argument, and the module's result
    assert kept(selective(policy(whole("part")))) - kept(FULL) == 2 * 2 * SQUARE


def test_the_region_itself_saved_as_a_whole_costs_what_it_costs_without_us() -> None:
    plain, ours = built(llama_stack), sac.apply(built(llama_stack), selective(policy(whole("", id="all"))))
    assert_same(train(plain, steps=2), train(ours, steps=2))
    assert (flops(ours), kept_bytes(ours, tokens())) == (flops(plain), kept_bytes(plain, tokens()))
    (kind,) = sac.report(ours).kinds
    assert kind.rules[0].hits
    assert kind.saved_bytes == kind.rules[0].saved_bytes > 0


@pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")  # a rule that decides on nothing
@pytest.mark.parametrize("first", [True, False])
def test_the_first_rule_that_matches_a_module_decides(first: bool) -> None:
    rules = [whole("mlp", "recompute"), whole("{self_attn,mlp}")]
    model = sac.apply(built(llama_stack), selective(policy(*(rules if first else rules[::-1]))))
    train(model, steps=2)
    saved = {row.module.partition(".")[0] for row in decisions_of(model) if row.decision == "save"}
    assert saved == ({"self_attn"} if first else {"self_attn", "mlp"})


def test_recompute_of_a_module_is_the_exception_from_a_default_that_saves() -> None:
    model = sac.apply(built(llama_stack), selective(policy(whole("mlp", "recompute"), default="save")))
    plain, (x,) = built(llama_stack), tokens()
    again = 2 * count_flops(lambda: plain.blocks[0].mlp.gate_proj(x))  # down_proj is stopped before
    assert flops(model) - flops(plain) == 2 * again
    rows = [row for row in decisions_of(model) if row.module.startswith("mlp") and row.op.startswith("aten.mm")]
    assert {(row.decision, row.reason) for row in rows} == {("recompute", "rule rule-0")}


def test_after_an_error_inside_a_saved_module_decisions_are_as_before() -> None:
    def fails(module: nn.Module, args: Any) -> None:
        raise ValueError("out of luck")

    found = []
    for does_fail in (False, True):
        model, (x,) = sac.apply(built(llama_stack), selective(policy(whole("self_attn"), whole("mlp")))), tokens()
        if does_fail:
            handle = model.blocks[0].self_attn.q_proj.register_forward_pre_hook(fails)
            with pytest.raises(ValueError, match="out of luck"):
                model(x)
            handle.remove()
        model(x).sum().backward()
        found.append([(row.module, row.op, row.call, row.decision) for row in decisions_of(model)])
    assert found[0] == found[1]
    assert {"self_attn", "mlp"} <= {
        module.partition(".")[0] for module, _, _, decision in found[1] if decision == "save"
    }
