"""Where replay gives way to Python: in the same backward, in those still to come, and below a checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import sac
from sac.errors import SacWarning
from tests.support.blocks import FunctionBlock, Stack, alternate, install, policy, save, selective, square
from tests.support.training import built

RULES = [save("matmul"), save("aten.sin"), alternate("*")]
ON_EACH_RULE = pytest.mark.parametrize("rule", RULES, ids=["matmuls", "sine", "every 2nd"])
TOLD = "replay cannot be used here"

with torch.inference_mode():
    OFFSET = torch.ones(8, 8)  # it has no version counter, so replay could not tell whether it is as it was


def offset(block: FunctionBlock, x: Tensor) -> Tensor:
    return ((x @ block.a + OFFSET).sin() @ block.a).cos() * x


def doubled_unseen(block: FunctionBlock, x: Tensor) -> Tensor:
    """NumPy writes to a product, which no dispatcher hears of and no version counter tells."""
    h = x @ block.a
    h.detach().numpy()[:] *= 2
    return (h.cos() @ block.b).sin() * x


def stack(body: Any) -> Stack:
    return built(lambda: Stack(FunctionBlock(body), FunctionBlock(body)))


def gradients(model: Stack, run: Any = None, calls: int = 1) -> list[Tensor]:
    """Of three steps; each runs `calls` forwards before the first backward."""
    found = []
    for step in range(3):
        torch.manual_seed(step)
        inputs = [square()[0].requires_grad_() for _ in range(calls)]
        losses = [(run(model, x) if run else model(x)).square().sum() for x in inputs]
        for loss in losses:
            loss.backward()
        found += [x.grad for x in inputs]
    return [*found, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


OUTER = {
    "sac": sac.checkpoint,
    "torch": lambda model, x: torch_checkpoint(model, x, use_reentrant=False),
}


@ON_EACH_RULE
@pytest.mark.parametrize(("outer", "body"), [("sac", offset), ("sac", doubled_unseen), ("torch", offset)])
def test_below_a_checkpoint_each_call_hands_it_the_same_in_both_passes(
    outer: str, body: Any, rule: dict[str, Any]
) -> None:
    """Regions that begin under replay and are found out in the first forward, or in the first backward.

    torch's checkpoint hands each value out once, so that what is found out in backward is an error of its own.
    """
    model = install(stack(body), selective(policy(rule)), "apply, replay")
    with pytest.warns(SacWarning, match=TOLD) if body is offset else warnings.catch_warnings():
        ours = gradients(model, OUTER[outer])
    assert all(map(torch.equal, gradients(stack(body)), ours))


@ON_EACH_RULE
def test_a_value_that_differs_in_one_backward_is_trusted_in_none_after_it(rule: dict[str, Any]) -> None:
    """Two forwards come first, and only the first of them is compared."""
    model = install(stack(doubled_unseen), selective(policy(rule)), "apply, replay")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        ours = gradients(model, calls=2)
    assert all(map(torch.equal, gradients(stack(doubled_unseen), calls=2), ours))


@pytest.mark.parametrize("outcome", ["replayed", "runs as Python"])
def test_a_routing_result_waits_in_the_hands_of_the_hooks_around_the_region(outcome: str) -> None:
    """Nothing else holds it, whether its replay starts from it or the region's Python asks for it."""
    memory: list[StorageWeakRef] = []

    def body(block: FunctionBlock, x: Tensor) -> Tensor:
        values, index = (x @ block.a + (OFFSET if outcome != "replayed" else 0)).topk(3)
        memory.append(StorageWeakRef(index.untyped_storage()))
        return x + (x @ block.b).gather(1, index).sin().sum(1, keepdim=True) * values.cos().sum()

    def run(model: Stack, x: Tensor) -> Any:
        with saved_tensors_hooks(Tensor.clone, lambda packed: packed):
            out = model(x)
        held.append([not one.expired() for one in memory])
        memory.clear()
        return out

    held: list[list[bool]] = []
    expected = gradients(stack(body), run)
    held.clear()
    model = install(stack(body), selective(policy(save("matmul"))), "apply, replay")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SacWarning)
        assert all(map(torch.equal, expected, gradients(model, run)))
    assert not any(map(any, held)), held
