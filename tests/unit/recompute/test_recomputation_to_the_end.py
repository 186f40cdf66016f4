"""`early_stop: false`: all that a policy does not save runs again, to the last op; what it saves does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sac
from tests.support.blocks import FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.rank_programs import SummedOverRanks
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder, backward_ops
from tests.support.training import assert_same_training, built
from tests.support.whole_module_blocks import WIDTH, Apply, product, whole

ENGINES = ("auto", "replay", "rerun")
PRODUCTS = 4


def four_products(block: FunctionBlock, x: Tensor) -> Tensor:
    """Four products; backward reads no result of the last one, nor what comes after it."""
    for _ in range(PRODUCTS - 1):
        x = (x @ block.a).sin()
    return x @ block.b + 1


def calls(count: int, **more: Any) -> dict[str, Any]:
    """A rule that saves the first `count` products."""
    return save("matmul", call={"index": list(range(count))}, **more)


LADDER: dict[str, tuple[dict[str, Any], int]] = {
    # name: (policy, products in backward); without checkpointing 8
    "all saved": (policy(calls(4)), 8),
    "three saved": (policy(calls(3)), 9),
    "every second saved": (policy(alternate("matmul")), 10),
    "the last two saved": (policy(save("matmul", call={"index": [2, 3]})), 10),
    "the last saved": (policy(save("matmul", call={"index": [3]})), 11),
    "one saved": (policy(calls(1)), 11),
    "nothing saved": (policy(), 12),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LADDER)
def test_the_ladder_of_products_in_backward(name: str, engine: str) -> None:
    written, products = LADDER[name]
    model = sac.apply(
        built(lambda: Stack(FunctionBlock(four_products))), selective(written, engine=engine, early_stop=False)
    )
    for _ in range(3):
        x = square()[0].requires_grad_()
        assert backward_ops(model, (x,)).ops["aten.mm.default"] == products


TO_THE_END: dict[str, Any] = {
    "full": {"mode": "full", "blocks": ["blocks.*"], "early_stop": False},
    **{f"nothing saved, {one}": selective(policy(), engine=one, early_stop=False) for one in ENGINES},
    **{f"one saved, {one}": selective(policy(calls(1)), engine=one, early_stop=False) for one in ENGINES},
    "a module saved": selective(policy(whole("part", optional=True)), early_stop=False),
}


@pytest.mark.parametrize("name", TO_THE_END)
def test_every_op_that_is_not_saved_runs_again(name: str) -> None:
    """Each in every call; the sum of backward's own ops is that of the model without us."""
    saved = 1 if name.startswith("one saved") else 0
    model = sac.apply(built(lambda: Stack(FunctionBlock(four_products))), TO_THE_END[name])
    plain = built(lambda: Stack(FunctionBlock(four_products)))
    for _ in range(3):
        x = square()[0].requires_grad_()
        found, expected = backward_ops(model, (x,)).ops, backward_ops(plain, (x.detach().requires_grad_(),)).ops
        assert found["aten.mm.default"] - expected["aten.mm.default"] == PRODUCTS - saved
        assert found["aten.sin.default"] - expected["aten.sin.default"] == PRODUCTS - 1
        assert found["aten.add.Tensor"] - expected["aten.add.Tensor"] == 1


def reads_inputs_and_parameters(block: FunctionBlock, x: Tensor) -> Tensor:
    """Backward reads nothing that an op makes."""
    return x @ block.a + 1


def trailing(block: FunctionBlock, x: Tensor) -> Tensor:
    """What comes last draws, writes, and reads what it wrote; backward reads none of it."""
    h = torch.dropout((x @ block.a).sin(), 0.5, True)
    scratch = torch.zeros_like(x)
    scratch.add_(h.detach()).mul_(2)
    part = scratch[:2]
    part.copy_(torch.rand_like(part))
    noise = torch.rand(x.shape).bernoulli_()
    block.norm(h.detach())
    return h @ block.b + scratch + noise


def written_results(block: FunctionBlock, x: Tensor) -> Tensor:
    y = x @ block.a
    z = y + 1
    y.mul_(2)
    w = (z.sin() * y.cos()) @ block.b
    return w.add_(x).add_(1)


def module_behind(block: FunctionBlock, x: Tensor) -> Tensor:
    return block.part((x @ block.a).sin() @ block.b) + torch.rand_like(x)


MORE = (
    {f"nothing saved, {one}": selective(policy(), engine=one, early_stop=False) for one in ENGINES}
    | {f"products, {one}": selective(policy(save("matmul")), engine=one, early_stop=False) for one in ENGINES}
    | {"modules": selective(policy(whole("part", optional=True), save("matmul")), early_stop=False)}
    | {"full": TO_THE_END["full"]}
)


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("body", [four_products, reads_inputs_and_parameters, trailing, written_results, module_behind])
def test_training_is_the_same(body: Callable[..., Any], name: str) -> None:
    def build() -> Stack:
        return Stack(*(FunctionBlock(body, WIDTH, norm=nn.BatchNorm1d(WIDTH), part=Apply(product)) for _ in range(2)))

    assert_same_training(build, MORE[name], steps=3, make_input=square)


# Ranks that run other ops around a collective


def around_a_collective(block: FunctionBlock, x: Tensor) -> Tensor:
    """Rank 0 reads what it gets, and runs the collective again for it; rank 1 has no use for that by itself."""
    y = SummedOverRanks.apply(x @ block.a)
    return y.sin() if dist.get_rank() == 0 else y * 2


def collectives(name: str) -> list[int]:
    model = sac.apply(built(lambda: Stack(FunctionBlock(around_a_collective))), TO_THE_END[name])
    found = []
    for _ in range(3):
        out = model(square()[0].requires_grad_())
        recorder = Recorder()
        with recorder:
            out.sum().backward()
        found.append(recorder.count("allreduce"))
    return found


@pytest.mark.parametrize("name", TO_THE_END)
def test_ranks_that_run_other_ops_around_a_collective_meet_in_it(name: str) -> None:
    assert run_ranks(2, collectives, name, timeout=60) == [[1] * 3] * 2


def test_a_function_runs_to_the_end() -> None:
    block = built(lambda: FunctionBlock(four_products))
    for _ in range(3):
        out = sac.checkpoint(block, square()[0].requires_grad_(), early_stop=False)
        recorder = Recorder()
        with recorder:
            out.sum().backward()
        assert recorder.ops["aten.mm.default"] == 3 * PRODUCTS
