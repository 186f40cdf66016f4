"""Runs a region under the replay engine, and holds that it was replayed, or that it gave way, as without us."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

import sac
from sac.errors import SacWarning
from tests.support.blocks import FunctionBlock, Stack, alternate, policy, save, selective, square
from tests.support.training import assert_same, built, train

POLICIES = {
    "nothing": policy({**save("*", call={"index": 99}), "optional": True}),  # what may save is under the mode each time
    "matmuls": policy({**save("matmul"), "optional": True}),
    "every second op": policy(alternate("*")),
}
FIX = "none is needed, the region runs again as Python; `engine: rerun` asks for that from the start"


def replay(chosen: dict[str, Any], verify: str = "never", **more: Any) -> dict[str, Any]:
    """The config value of a policy under replay. Without `verify` nothing hides what the tape gets wrong."""
    return selective(chosen, engine="replay", verify=verify, **more)


def block_of(body: Callable[..., Any]) -> Callable[[], Stack]:
    """What builds a stack of one region with this body."""
    return lambda: Stack(FunctionBlock(body))


def applied(build: Callable[[], Stack], value: Any) -> Stack:
    """The model under a config value."""
    model: Stack = sac.apply(built(build), value)
    return model


def python_runs(model: nn.Module) -> int:
    """How often Python ran the bodies of the model's regions."""
    return sum(module.runs for module in model.modules() if isinstance(module, FunctionBlock))


def assert_gave_way(
    build: Callable[[], Stack], value: Any, warning: str, *, steps: int = 2, once_more: int = 0, **training: Any
) -> None:
    """All is as without us, this one warning is given, and each region's Python ran twice, and ``once_more`` times."""
    ours, model, said = _trained(build, value, steps=steps, **training)
    assert_same(train(built(build), steps=steps, **_with_square(training)), ours)
    assert said == [warning], said
    expected = 2 * steps * sum(isinstance(m, FunctionBlock) for m in model.modules())
    assert python_runs(model) == expected + once_more


def warning_of(found: str, path: str = "blocks.0") -> str:
    """The whole text of the warning that a region gives way."""
    return f"{path}: replay cannot be used here: {found}\n    fix: {FIX}"


def _trained(build: Callable[[], Stack], value: Any, **training: Any) -> tuple[dict[str, Tensor], Stack, list[str]]:
    model = applied(build, value)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen = train(model, **_with_square(training))
    return seen, model, [str(one.message) for one in caught if issubclass(one.category, SacWarning)]


def _with_square(training: dict[str, Any]) -> dict[str, Any]:
    return {"make_input": square, **training}
