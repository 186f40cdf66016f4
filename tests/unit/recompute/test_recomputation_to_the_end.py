"""Where a recomputation ends: with `early_stop: false`, at the last op. What is saved does not run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

import sac
from tests.support.blocks import FULL, FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.layers import stack as layers
from tests.support.rank_programs import SummedOverRanks
from tests.support.ranks import run_ranks
from tests.support.recording import Recorder, backward_ops
from tests.support.training import built

ENGINES = ("auto", "replay", "rerun")
PRODUCTS = 4


def four_products(block: FunctionBlock, x: Tensor) -> Tensor:
    """Four products; backward reads no result of the last one, nor what comes after it."""
    for _ in range(PRODUCTS - 1):
        x = (x @ block.a).sin()
    return x @ block.b + 1


def stack(body: Callable[..., Any] = four_products, count: int = 1) -> Stack:
    return Stack(*(FunctionBlock(body, part=nn.Linear(8, 8)) for _ in range(count)))


SAVED: dict[str, tuple[dict[str, Any], int]] = {
    # name: (policy, products that run again)
    "every product": (policy(save("matmul")), 0),
    "every second product": (policy(alternate("matmul")), 2),
    "the first product": (policy(save("matmul", call={"index": 0})), 3),
    "nothing": (policy(), 4),
}
TO_THE_END: dict[str, tuple[Any, int]] = {
    "full": ({**FULL, "early_stop": False}, 4),
    "a module": (selective(policy({"module": "part", "do": "save", "optional": True}), early_stop=False), 4),
    **{
        f"{name}, {engine}": (selective(written, engine=engine, early_stop=False), again)
        for name, (written, again) in SAVED.items()
        for engine in ENGINES
    },
}


@pytest.mark.parametrize("name", TO_THE_END)
def test_every_op_that_is_not_saved_runs_again(name: str) -> None:
    """Each in every call; the sum of backward's own ops is that of the model without us."""
    value, products = TO_THE_END[name]
    model, plain = sac.apply(built(stack), value), built(stack)
    for _ in range(3):
        found, expected = (backward_ops(one, (square()[0].requires_grad_(),)).ops for one in (model, plain))
        again = {op: found[op] - expected[op] for op in ("aten.mm.default", "aten.sin.default", "aten.add.Tensor")}
        assert [*again.values()] == [products, PRODUCTS - 1, 1]


def around_a_collective(block: FunctionBlock, x: Tensor) -> Tensor:
    """Rank 0 reads what it gets, and runs the collective again for it; rank 1 has no use for that by itself."""
    y = SummedOverRanks.apply(x @ block.a)
    return y.sin() if dist.get_rank() == 0 else y * 2


def collectives(name: str) -> list[int]:
    model = sac.apply(built(partial(stack, around_a_collective)), TO_THE_END[name][0])
    return [backward_ops(model, (square()[0].requires_grad_(),), warm=0).count("allreduce") for _ in range(3)]


@pytest.mark.parametrize("name", ["full", "a module", *(f"nothing, {engine}" for engine in ENGINES)])
def test_ranks_that_run_other_ops_around_a_collective_meet_in_it(name: str) -> None:
    assert run_ranks(2, collectives, name, timeout=60) == [[1] * 3] * 2


# -- torch.utils.checkpoint.set_checkpoint_early_stop around a forward takes precedence over what sac was told

Around = Callable[[], AbstractContextManager[Any]]
OFF, ON = partial(set_checkpoint_early_stop, False), partial(set_checkpoint_early_stop, True)


def products(run: Callable[[Tensor], Tensor], around: Around = nullcontext) -> int:
    """How many linear maps backward runs again."""
    with around():
        out = run(torch.ones(2, 8, 32, requires_grad=True))
    with Recorder() as backward:
        out.sum().backward()
    return backward.count("aten.addmm.default")


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("around", [nullcontext, OFF, ON])
def test_a_function_is_run_again_as_far_as_by_torch(around: Around, given: bool) -> None:
    layer = layers(1)[0]
    found = products(lambda x: sac.checkpoint(layer, x, early_stop=given), around)
    assert found == products(lambda x: torch_checkpoint(layer, x, use_reentrant=False, early_stop=given), around)
    assert found == (3 if (around is nullcontext and given) or around is ON else 4)


SETTINGS: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "full", "store": "host"},
    *({"mode": "selective", "engine": engine} for engine in ENGINES),
    {"mode": "selective", "policy": policy({"module": "up", "do": "save"})},
]


@pytest.mark.parametrize("value", SETTINGS, ids=str)
def test_it_means_what_the_key_of_the_config_means(value: dict[str, Any]) -> None:
    said, given = sac.apply(layers(2), value), sac.apply(layers(2), {**value, "early_stop": False})
    for _ in range(2):
        assert products(said, OFF) == products(given)


@pytest.mark.filterwarnings("error::sac.errors.SacWarning")
def test_a_part_of_the_gradients_first() -> None:
    """What the policy saved and nothing needs does not run again in the second recomputation either."""

    def gradients(put: Callable[[Stack], Any]) -> list[Tensor]:
        body = lambda block, x: block.part(x).tanh()[:, :8] @ block.a.tanh()  # noqa: E731
        model = built(lambda: Stack(FunctionBlock(body, part=nn.Linear(8, 32))))
        model.blocks[0].part.bias.requires_grad_(False)
        put(model)
        x = torch.randn(4, 8, requires_grad=True)
        loss = model(x).square().sum()
        first = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return [*first, x.grad, model.blocks[0].a.grad, model.blocks[0].part.weight.grad]

    rules = policy({"ops": ["matmul", "aten.tanh.default"], "do": "save"})
    found = gradients(lambda model: sac.apply(model, selective(rules, engine="replay", early_stop=False)))
    assert all(map(torch.equal, found, gradients(lambda model: None)))
