"""The stores that keep a copy of their own, and the faces through which a module is made a region with one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.full import FullConfig
from tests.support.blocks import FunctionBlock, Stack, alternate, policy, save, selective

STORES: dict[str, dict[str, Any]] = {
    "host": {"store": "host"},
    "contiguous": {"store": "contiguous", "num_checkpoints": 2},
    "contiguous+host": {"store": "contiguous+host", "num_checkpoints": 2},
}
MODES: dict[str, Callable[..., dict[str, Any]]] = {
    "full": lambda **more: {"mode": "full", "blocks": ["blocks.*"], **more},
    "selective": lambda **more: selective(policy(save("attention", optional=True), alternate("matmul")), **more),
    "rerun": lambda **more: MODES["selective"](engine="rerun", **more),
    "replay": lambda **more: MODES["selective"](engine="replay", **more),
    "all products": lambda **more: selective(policy(save("matmul")), **more),
    "everything": lambda **more: selective(policy(default="save"), **more),
}
FACES = ("checkpoint", "full", "rerun", "replay")


def region_by(face: str, store: dict[str, Any], block: nn.Module) -> Callable[..., Any]:
    """Return what calls the block as a region."""
    if face in ("checkpoint", "reentrant"):
        return partial(sac.checkpoint, block, config=FullConfig(**store), use_reentrant=face == "reentrant")
    return sac.apply(Stack(block), MODES[face](**store)).blocks[0]


def _calls(faces: tuple[str, ...]) -> Any:
    pairs = {f"{face}-{name}": partial(region_by, face, store) for face in faces for name, store in STORES.items()}
    return pytest.mark.parametrize("call", pairs.values(), ids=pairs.keys())


every_store = pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
every_call_and_reentrant = _calls((*FACES, "reentrant"))  # these take a plain backward only


def with_slots(store: dict[str, Any], count: int) -> dict[str, Any]:
    """The store with another number of slots, if it has slots."""
    return {**store, "num_checkpoints": count} if "num_checkpoints" in store else store


def product(block: FunctionBlock, x: Tensor) -> Tensor:
    return (x @ block.a).sin() @ block.b


def gradients(out: Tensor, sources: list[Tensor]) -> list[Tensor]:
    """What a plain backward gives; it leaves no gradient behind."""
    out.sum().backward()
    found = [source.grad for source in sources]
    for source in sources:
        source.grad = None
    return found


def same(left: Any, right: Any) -> bool:
    """Whether two lists of tensors are equal bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))
