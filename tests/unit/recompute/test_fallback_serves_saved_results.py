"""Where Python runs again because a tape cannot be replayed: what the policy saved is held, and its ops do not run."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import sac
from sac.errors import SacWarning
from sac.memory_timeline import mark, measure_memory
from tests.support.blocks import FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.rank_programs import FunctionalSum
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder
from tests.support.replay_kernels import FromOutside, tanh_into, twice_in_place
from tests.support.training import built

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)  # it has no version counter, so a tape that reads it is not replayed

Body = Callable[[FunctionBlock, Tensor], Tensor]
PRODUCT, ATTENTION, DRAW = (
    "aten.mm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten.bernoulli",
)
MIXED = policy(save(["matmul", "attention", "aten.native_dropout", "aten.bernoulli", "aten.topk"]))


def attends(block: FunctionBlock, x: Tensor) -> Tensor:
    """Products, attention and draws, in part before the tape is found out and in part after it."""
    h = F.dropout(x @ block.a, 0.5) + OFFSET
    heads = h.view(1, 2, 4, 8)
    h = F.scaled_dot_product_attention(heads, heads.sin(), heads).reshape(8, 8)
    values, index = (h @ block.b).sin().topk(4)
    return F.dropout(torch.bernoulli(values.sigmoid()) * values, 0.3) @ block.b[:4] + h.gather(1, index).sum()


def fills_memory(block: FunctionBlock, x: Tensor) -> Tensor:
    return (tanh_into((x @ block.a).cos(), torch.empty_like).sin() @ block.b).exp() * 2


def comes_from_outside(block: FunctionBlock, x: Tensor) -> Tensor:
    return FromOutside.apply((x @ block.a).cos()).sin() @ block.b


def writes_unseen_to_what_is_saved(block: FunctionBlock, x: Tensor) -> Tensor:
    h = x @ block.a
    before = h.cos()
    h.detach().numpy()[:] *= 2
    return (before * h.sin()) @ block.b


def overwrites(block: FunctionBlock, x: Tensor) -> Tensor:
    """A kernel that tells autograd overwrites the first product; an op, the second."""
    h = x @ block.a
    out = (h * 1.5).sin() * twice_in_place(h).cos()
    return (out @ block.b).mul_(2).sin()


SERVED: dict[Body, int] = {  # products that run in the first backward beyond those of a model without us
    attends: 0,
    fills_memory: 0,
    comes_from_outside: 0,
    writes_unseen_to_what_is_saved: 1,
    overwrites: 1,
}


def steps(model: Stack, count: int = 3, *, twice: bool = False) -> tuple[list[Tensor], list[Counter[str]]]:
    """The gradients and the generator's state after each step, and the ops of its backward."""
    numbers, ops = [], []
    for step in range(count):
        torch.manual_seed(step)
        (x,) = (one.requires_grad_() for one in square())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SacWarning)
            loss = model(x).square().sum()
            with Recorder() as seen:
                if twice:
                    loss.backward(retain_graph=True)
                loss.backward()
        numbers += [x.grad, *(one.grad.clone() for one in model.parameters() if one.grad is not None)]
        numbers.append(torch.get_rng_state())
        ops.append(seen.ops)
    return numbers, ops


def stack(body: Any, count: int = 1) -> Stack:
    return built(lambda: Stack(*(FunctionBlock(body) for _ in range(count))))


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("engine", ["auto", "replay"])
@pytest.mark.parametrize("body", SERVED, ids=lambda body: body.__name__)
def test_saved_ops_do_not_run_in_the_first_backward_either(body: Body, engine: str, twice: bool) -> None:
    expected, plain = steps(stack(body), twice=twice)
    model = sac.apply(stack(body), selective(MIXED, engine=engine))
    numbers, ops = steps(model, twice=twice)
    assert all(map(torch.equal, expected, numbers))
    assert ops[0][PRODUCT] - plain[0][PRODUCT] == SERVED[body] * (1 + twice)
    assert not any(ops[0][name] for name in (ATTENTION, f"{DRAW}.default", f"{DRAW}.p"))


def later(body: Body) -> Body:
    """A body that can be replayed in its first two calls."""

    def changing(block: FunctionBlock, x: Tensor) -> Tensor:
        return body(block, x) if block.calls > 2 else (x @ block.a).sin() @ block.b

    return changing


def held_bytes(body: Body, chosen: Any, engine: str) -> tuple[int, int]:
    """Bytes that the third forward leaves for backward, as measured, and what the report counts as saved of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        model = sac.apply(stack(later(body)), selective(chosen, engine=engine))
        steps(model, 2)

        def step() -> None:
            loss = model(*square()).square().sum()
            mark("forward done")
            loss.backward()
            model.zero_grad()

        measured = measure_memory(step).at("forward done")
        return measured, sac.report(model).to_dict()["kept_bytes"]


@pytest.mark.parametrize("body", [attends], ids=lambda one: one.__name__)
@pytest.mark.parametrize("chosen", [MIXED, policy(alternate("*")), policy()], ids=["some", "every second", "none"])
def test_as_much_is_held_as_under_rerun(body: Body, chosen: Any) -> None:
    rerun = held_bytes(body, chosen, "rerun")
    assert held_bytes(body, chosen, "auto") == rerun


def adds_up(block: FunctionBlock, x: Tensor) -> Tensor:
    h = FunctionalSum.apply((x @ block.a).sin())
    if block.leaves_replay:
        h = h + OFFSET
    return FunctionalSum.apply(h.cos()).sin() @ block.b


def sent_in_backward(chosen: Any, which: tuple[int, ...]) -> tuple[list[list[str]], bool]:
    def seen(model: Stack) -> tuple[list[Tensor], list[list[str]]]:
        for block in model.blocks:
            block.leaves_replay = dist.get_rank() in which
        numbers, ops = steps(model, 2)
        return numbers, [sorted(name for name in one.elements() if "all_reduce" in name) for one in ops]

    expected, _ = seen(stack(adds_up, 2))
    numbers, sent = seen(sac.apply(stack(adds_up, 2), selective(chosen)))
    return sent, all(map(torch.equal, expected, numbers))


@pytest.mark.parametrize("chosen", [policy(save(["matmul", "collective"])), MIXED], ids=["saved", "not saved"])
@pytest.mark.parametrize("which", [(0, 1), (1,)], ids=["both ranks", "one rank"])
def test_ranks_send_the_same_collectives_where_some_run_python(which: tuple[int, ...], chosen: Any) -> None:
    one, other = run_ranks(2, sent_in_backward, chosen, which)
    assert one == other
    sent, is_equal = one
    assert is_equal
    assert (sent == [[], []]) == (chosen is not MIXED)
