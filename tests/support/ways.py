"""The ways of checkpointing that tests run programs in: a name, and what puts it on the blocks of a `Stack`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

import sac
from tests.support.blocks import Stack, alternate, policy, save

POLICIES: dict[str, dict[str, Any]] = {
    "nothing": policy({**save("*", call={"index": 99}), "optional": True}),  # rules that could decide on any op
    "matmuls": policy(save("matmul", optional=True)),
    "every second op": policy(alternate("*")),
    "everything": policy(default="save"),
}
WHOLE_MODULES = policy({"module": "up", "do": "save", "optional": True})
OFFLOADED = policy({"ops": "matmul", "do": "offload", "optional": True})


@dataclass(frozen=True)
class Way:
    """One way. ``put(model, policy)`` changes the model; ``policies``: whether the way takes any policy."""

    name: str
    put: Callable[[Stack, Mapping[str, Any]], Any]
    policies: bool = False

    def __str__(self) -> str:
        return self.name


def _applied(mode: str, **more: Any) -> Callable[[Stack, Mapping[str, Any]], Any]:
    """sac.apply; in mode selective with the policy of the test, unless the way has its own."""

    def put(model: Stack, chosen: Mapping[str, Any]) -> Any:
        own = {"policy": dict(chosen)} if mode == "selective" else {}
        return sac.apply(model, {"mode": mode, "blocks": ["blocks.*"], **own, **more})

    return put


def _context_fn(model: Stack, chosen: Mapping[str, Any]) -> Any:
    model.context_fns = [sac.context_fn(dict(chosen), module=block) for block in model.blocks]
    return model


class _Checkpointed(nn.Module):
    """Calls a block through `sac.checkpoint`; names of parameters stay those of the block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a child: it stays one of the model's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return sac.checkpoint(self.block, *args, **kwargs)


def _checkpoint(model: Stack, chosen: Mapping[str, Any]) -> Any:
    calls = [_Checkpointed(block) for block in model.blocks]
    model._call = lambda index, block, *values: calls[index](*values)  # type: ignore[method-assign]
    return model


def _plain(model: Stack, chosen: Mapping[str, Any]) -> Any:
    return model


NONE = Way("none", _plain)
# No comparison hides what a replay gets wrong, by falling back to a rerun.
UNVERIFIED = Way("replay, not verified", _applied("selective", engine="replay", verify="never"), policies=True)
WAYS = {
    way.name: way
    for way in (
        Way("full", _applied("full")),
        Way("auto", _applied("selective"), policies=True),
        Way("replay", _applied("selective", engine="replay"), policies=True),
        Way("served rerun", _applied("selective", engine="rerun"), policies=True),
        Way("context_fn", _context_fn, policies=True),
        Way("checkpoint", _checkpoint),
        Way("whole modules", _applied("selective", policy=WHOLE_MODULES)),
        Way("offload", _applied("selective", policy=OFFLOADED)),
        Way("reentrant", _applied("full", use_reentrant=True)),
    )
}
SELECTIVE = tuple(name for name, way in WAYS.items() if way.policies)
