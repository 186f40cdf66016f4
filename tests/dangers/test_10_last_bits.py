"""The last bits of what comes back: layouts and addresses decide how kernels add; hooks around see no mode of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import sac
from tests.support.blocks import FunctionBlock, Stack
from tests.support.oracle import assert_exact
from tests.support.programs import CATALOGUE, WIDTH, Program
from tests.support.training import assert_same, built, train
from tests.support.ways import POLICIES, WAYS

SIDE = 24
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda h: h[:2],
    "rows in the middle": lambda h: h[3:5],
    "columns": lambda h: h[:, 2:5],
    "every third column": lambda h: h[:, ::3],
    "transposed": lambda h: h[:, 1:4].t(),
    "repeated": lambda h: h[1:2].expand(4, SIDE),
    "overlapping": lambda h: h[1].unfold(0, 4, 2),
    "conjugated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj(),
    "negated": lambda h: torch.view_as_complex(h[:, 2:6].unflatten(1, (2, 2))).conj().imag,
    "one element": lambda h: h[1, 1],
}


class Reading(torch.autograd.Function):
    """Saves ``part``; backward appends shape, strides, address modulo 64 and lazy bits of what it reads to ``read``."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, read: list[Any]) -> Tensor:
        ctx.save_for_backward(part)
        ctx.read = read
        return part * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (part,) = ctx.saved_tensors
        ctx.read.append((part.shape, part.stride(), part.data_ptr() % 64, part.is_conj(), part.is_neg()))
        return grad * part.conj(), None


# -- Bits


@pytest.mark.parametrize("way", ["full", "auto", "replay", "served rerun", "offload"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_saved_part_comes_back_in_its_layout(name: str, way: str) -> None:
    """Strides and the address modulo 64 decide in which order a kernel adds; a conjugate is lazy."""

    def layouts(put: Callable[[Stack], Any]) -> tuple[list[Any], list[Tensor]]:
        read: list[Any] = []

        def body(block: FunctionBlock, x: Tensor) -> Tensor:
            return x + Reading.apply(VIEWS[name](x @ block.a), read).sum().real  # type: ignore[no-untyped-call]

        model = built(lambda: Stack(FunctionBlock(body, SIDE), FunctionBlock(body, SIDE)))
        put(model)
        x = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(1), requires_grad=True)
        model(x).sum().backward()
        return read, [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]

    (expected, grads), (seen, ours) = (
        layouts(lambda model: None),
        layouts(lambda model: WAYS[way].put(model, POLICIES["matmuls"])),
    )
    assert seen == expected
    assert all(torch.equal(*pair) for pair in zip(grads, ours, strict=True))
    assert [grad.stride() for grad in ours] == [grad.stride() for grad in grads]


# -- Hooks and checkpoints around a region

OUTER: dict[str, Callable[..., Any]] = {
    "sac.checkpoint": sac.checkpoint,
    "sac.checkpoint, reentrant": partial(sac.checkpoint, use_reentrant=True),
    "torch": partial(checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("way", [name for name in WAYS if name != "reentrant"])
@pytest.mark.parametrize("outer", OUTER)
def test_a_checkpoint_around_regions(outer: str, way: str) -> None:
    """Its hooks are asked as if there were no mode of the region: what they run again is not the region's."""

    class Around(Stack):
        def forward(self, *values: Tensor) -> Any:
            return OUTER[outer](super().forward, *values)

    def trained(put: bool) -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = CATALOGUE["two_dropouts"].model()
        if put:
            model = Around(*model.blocks)
            WAYS[way].put(model, POLICIES["matmuls"])
        return train(model, steps=2, make_input=lambda device: (torch.randn(WIDTH, WIDTH),))

    assert_same(trained(put=False), trained(put=True))


@pytest.mark.parametrize("way", [name for name in WAYS if name != "reentrant"])
def test_saved_tensors_that_hooks_around_the_region_move_away(way: str) -> None:
    def moving(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> Any:
        return lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    body = CATALOGUE["two_dropouts"].body
    by_numpy = moving(lambda t: t.detach().numpy().copy(order="K"), torch.from_numpy)
    for name, around in (("to the host", torch.autograd.graph.save_on_cpu), ("to NumPy", by_numpy)):
        assert_exact(Program(name, body, around=around), way, "every second op", steps=2)
