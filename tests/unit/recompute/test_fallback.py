"""Where replay gives way to Python: all is exact, what the policy saved is held, and its ops do not run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.recording import Recorder
from tests.support.replay_kernels import FromOutside, tanh_into, twice_in_place
from tests.support.training import built

pytestmark = pytest.mark.filterwarnings("ignore::sac.errors.SacWarning")

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)  # it has no version counter, so a tape that reads it is not replayed

Body = Callable[[FunctionBlock, Tensor], Tensor]
Run = Callable[[Stack, Tensor], Tensor]


def stack(body: Any, count: int = 1) -> Stack:
    return built(lambda: Stack(*(FunctionBlock(body) for _ in range(count))))


def directly(model: Stack, x: Tensor) -> Tensor:
    return model(x)


def trained(model: Stack, run: Run = directly, *, forwards: int = 1, twice: bool = False) -> tuple[list[Any], Any]:
    """Of three steps: gradients and the generator's state, and the ops of the backwards.

    Each step runs `forwards` before the first backward.
    """
    numbers, ops = [], []
    for step in range(3):
        torch.manual_seed(step)
        inputs = [square()[0].requires_grad_() for _ in range(forwards)]
        losses = [run(model, x).square().sum() for x in inputs]
        with Recorder() as seen:
            for loss in losses:
                if twice:
                    loss.backward(retain_graph=True)
                loss.backward()
        found = [x.grad for x in inputs] + [one.grad for one in model.parameters()]
        numbers += [*(one.clone() for one in found if one is not None), torch.get_rng_state()]
        ops.append(seen.ops)
    return numbers, ops


def assert_exact(body: Body, value: Any, run: Run = directly, **more: Any) -> None:
    expected, _ = trained(stack(body, 2), run, **more)
    assert all(map(torch.equal, expected, trained(sac.apply(stack(body, 2), value), run, **more)[0]))


# -- In the same backward, in those still to come, and below a checkpoint


def offset(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a + OFFSET).sin() @ block.a).cos() * x


def doubled_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    """NumPy writes to a product, which no dispatcher hears of and no version counter tells."""
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


ON_EACH_RULE = pytest.mark.parametrize("rule", [save("matmul"), save("aten.sin"), alternate("*")])


@ON_EACH_RULE
@pytest.mark.parametrize(
    ("outer", "body"),
    [
        (sac.checkpoint, offset),
        (sac.checkpoint, doubled_unseen),
        (lambda model, x: torch_checkpoint(model, x, use_reentrant=False), offset),
    ],
)
def test_below_a_checkpoint_each_call_hands_it_the_same_in_both_passes(outer: Run, body: Any, rule: Any) -> None:
    """Regions that begin under replay and are found out in the first forward, or in the first backward.

    torch's checkpoint hands each value out once, so that what is found out in backward is an error of its own.
    """
    assert_exact(body, selective(policy(rule), engine="replay"), outer)


@ON_EACH_RULE
def test_a_value_that_differs_in_one_backward_is_trusted_in_none_after_it(rule: dict[str, Any]) -> None:
    """Two forwards come first, and only the first of them is compared."""
    assert_exact(doubled_unseen, selective(policy(rule), engine="replay"), forwards=2)


# -- What was saved does not run again, in the first backward either


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


def overwrites(block: FunctionBlock, x: Tensor) -> Tensor:
    """A kernel that tells autograd overwrites the first product; an op, the second."""
    h = x @ block.a
    out = (h * 1.5).sin() * twice_in_place(h).cos()
    return (out @ block.b).mul_(2).sin()


MIXED = policy(save(["matmul", "attention", "aten.native_dropout", "aten.bernoulli", "aten.topk"]))
SAVED = ("aten._scaled_dot_product_flash_attention_for_cpu.default", "aten.bernoulli.default", "aten.bernoulli.p")
SERVED: dict[Body, int] = {  # products that run in the first backward beyond those of a model without us
    attends: 0,
    fills_memory: 0,
    comes_from_outside: 0,
    doubled_unseen: 0,
    overwrites: 1,
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("engine", ["auto", "replay"])
@pytest.mark.parametrize("body", SERVED, ids=lambda body: body.__name__)
def test_saved_ops_do_not_run_in_the_first_backward_either(body: Body, engine: str, twice: bool) -> None:
    expected, plain = trained(stack(body), twice=twice)
    numbers, ops = trained(sac.apply(stack(body), selective(MIXED, engine=engine)), twice=twice)
    assert all(map(torch.equal, expected, numbers))
    assert ops[0]["aten.mm.default"] - plain[0]["aten.mm.default"] == SERVED[body] * (1 + twice)
    assert not any(ops[0][name] for name in SAVED)
