"""A program of blocks under every mode and engine, compared with the same blocks without sac."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sac

WHOLE = {"schema": "sac/v1", "name": "whole", "rules": [{"id": "up", "module": "up", "do": "save"}]}
PRODUCTS = {"schema": "sac/v1", "name": "products", "rules": [{"id": "products", "ops": "matmul", "do": "save"}]}
EVERYTHING = {"schema": "sac/v1", "name": "everything", "default": "save", "rules": []}
MODES: dict[str, Any] = {
    "full": {"mode": "full"},
    "host": {"mode": "full", "store": "host"},
    "auto": {"mode": "selective", "engine": "auto", "policy": PRODUCTS},
    "replay": {"mode": "selective", "engine": "replay", "policy": PRODUCTS},
    "rerun": {"mode": "selective", "engine": "rerun", "policy": PRODUCTS},
    "everything": {"mode": "selective", "policy": EVERYTHING},
    "whole": {"mode": "selective", "policy": WHOLE},
    "checkpoint": None,
}


def under(mode: str, blocks: nn.ModuleList) -> list[Callable[..., Any]]:
    """Put ``mode`` on ``blocks`` and return what to call; ``checkpoint`` is ``sac.checkpoint`` around each."""
    if MODES[mode] is None:
        return [_checkpointed(block) for block in blocks]
    sac.apply(blocks, {**MODES[mode], "blocks": ["*"]})
    return list(blocks)


def _checkpointed(block: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return sac.checkpoint(block, *args, **kwargs)

    call.block = block  # type: ignore[attr-defined]
    return call


def modules_of(calls: list[Callable[..., Any]]) -> list[nn.Module]:
    return [one if isinstance(one, nn.Module) else one.block for one in calls]  # type: ignore[attr-defined]


def state_of(calls: list[Callable[..., Any]]) -> list[Tensor | None]:
    """Gradients (taken off), parameters and buffers."""
    modules = modules_of(calls)
    parameters = [one for module in modules for one in module.parameters()]
    found = [None if one.grad is None else one.grad for one in parameters]
    found += [one.detach().clone() for one in parameters]
    found += [one.clone() for module in modules for one in module.buffers()]
    for one in parameters:
        one.grad = None
    return found


def equal(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


Program = Callable[[list[Callable[..., Any]], int], list[Any]]


def assert_as_without(mode: str, blocks: nn.ModuleList, program: Program, steps: int = 3) -> None:
    """``program(calls, step)`` returns tensors; they and the state of the modules are compared after each step."""
    plain, mine = list(copy.deepcopy(blocks)), under(mode, copy.deepcopy(blocks))
    for step in range(steps):
        found = []
        for calls in (plain, mine):
            torch.manual_seed(step)
            found.append([*program(calls, step), *state_of(calls), torch.get_rng_state()])
        assert equal(*found), f"{mode}, step {step}"
