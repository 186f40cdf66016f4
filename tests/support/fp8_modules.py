"""A model of TransformerEngine's training in FP8 on a CPU: the state and the names that sac relies on, in our own code.

Delayed scaling: a module quantises with scales that follow from the maxima of earlier calls, and notes its own maxima.
When the outermost autocast ends, all scales of forwards are updated; when the backward of its first module ends, those
of backwards are. As its kernels do, the model reads and writes unseen by modes and version counters (through NumPy);
with ``Recipe(seen=True)`` it updates by ops, as its unfused update does.

Its own protocol for checkpointing: flags around forward and recomputation, and a queue of copies for each module.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

ROWS, TOP = 160, 16.0  # of a history, of which the last three count; the largest quantised value


@dataclass(frozen=True)
class Recipe:
    seen: bool = False  # whether updates are made by ops

    def write(self, target: Tensor, value: Tensor) -> None:
        if self.seen:
            with torch.no_grad():
                target.copy_(value)
        else:
            target.numpy()[...] = value.numpy()


UNSEEN = Recipe()


class ScalingState:
    """Scales and maxima of the operands of a module."""

    def __init__(self, count: int) -> None:
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(ROWS, count)

    def copied(self) -> tuple[Tensor, Tensor]:
        return self.amax_history.clone(), self.scale.clone()

    def put(self, values: tuple[Tensor, Tensor]) -> None:
        UNSEEN.write(self.amax_history, values[0])
        UNSEEN.write(self.scale, values[1])

    def update(self, recipe: Recipe) -> None:
        """Compute the scales from the history, and shift this by a row."""
        largest = self.amax_history[:3].max(dim=0).values
        recipe.write(self.scale, torch.where(largest > 0, TOP / largest, self.scale))
        rows = self.amax_history.roll(1, 0)
        rows[0] = 0
        recipe.write(self.amax_history, rows)

    def quantized(self, index: int, x: Tensor, recipe: Recipe) -> Tensor:
        """Return ``x`` rounded to a grid that follows from the scale; note its maximum."""
        values, scale, amax = x.detach().numpy(), self.scale[index].numpy(), self.amax_history[0, index]
        recipe.write(amax, torch.tensor(max(float(abs(values).max()), float(amax.numpy()))))
        out = torch.empty_like(x)
        out.numpy()[...] = (values * scale).round().clip(-TOP, TOP) / scale
        return out


@dataclass(slots=True)
class GlobalState:
    """What the library keeps for the process; the scales of all modules, of forwards and of backwards."""

    enabled: bool = False
    recipe: Recipe = UNSEEN
    is_first_module: bool = False
    depth: int = 0
    forwards: list[ScalingState] = field(default_factory=list)
    backwards: list[ScalingState] = field(default_factory=list)


class FP8GlobalStateManager:
    """The library's access to that state."""

    state = GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.state.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.state.recipe

    get_fp8_group = staticmethod(lambda: None)


@contextmanager
def autocast(
    enabled: bool = True, calibrating: bool = False, recipe: Recipe | None = None, amax_reduction_group: Any = None
) -> Iterator[None]:
    state = FP8GlobalStateManager.state
    before = state.enabled, state.recipe, state.is_first_module
    state.is_first_module = state.depth == 0 or state.is_first_module
    state.enabled, state.recipe = enabled, recipe or UNSEEN
    state.depth += 1
    try:
        yield
    finally:
        used = state.recipe
        state.enabled, state.recipe, state.is_first_module = before
        state.depth -= 1
        if enabled and state.depth == 0 and torch.is_grad_enabled():
            for scales in state.forwards:
                scales.update(used)


_IN_REGION = _RECOMPUTES = False


@contextmanager
def recompute_flags(recomputes: bool) -> Iterator[None]:
    """The library's context around a forward that will be recomputed, and around its recomputation."""
    global _IN_REGION, _RECOMPUTES
    _IN_REGION, _RECOMPUTES = True, recomputes
    try:
        yield
    finally:
        _IN_REGION = _RECOMPUTES = False


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, meta: dict[str, Any], updates: bool) -> Tensor:
        ctx.recipe, ctx.scales, ctx.updates = FP8GlobalStateManager.state.recipe, meta["scaling_bwd"], updates
        x, weight = (meta["scaling_fwd"].quantized(i, one, ctx.recipe) for i, one in enumerate((x, weight)))
        ctx.save_for_backward(x, weight)
        out = x.new_empty(*x.shape[:-1], len(weight))
        out.numpy()[...] = x.numpy() @ weight.numpy().T
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = ctx.scales.quantized(0, grads[0], ctx.recipe)
        if ctx.updates:
            for scales in FP8GlobalStateManager.state.backwards:
                scales.update(ctx.recipe)
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None, None


class Linear(nn.Module):
    """A product whose operands are quantised while FP8 is on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.fp8_meta: dict[str, Any] = {}
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        meta, state = self.fp8_meta, FP8GlobalStateManager.state
        recomputes = self.fp8 and _RECOMPUTES
        if not recomputes:
            self.fp8 = state.enabled
        if not self.fp8:
            return F.linear(x, self.weight)
        if not meta:
            meta |= {"scaling_fwd": ScalingState(2), "scaling_bwd": ScalingState(1), "queue": deque()}
            state.forwards.append(meta["scaling_fwd"])
            state.backwards.append(meta["scaling_bwd"])
        latest = meta["scaling_fwd"].copied()
        if recomputes:
            meta["scaling_fwd"].put(meta["queue"].popleft())
        elif self.training and _IN_REGION:
            meta["queue"].append(latest)
        updates = torch.is_grad_enabled() and state.is_first_module
        state.is_first_module = state.is_first_module and not updates
        out = _Product.apply(x, self.weight, meta, updates)
        if recomputes:
            meta["scaling_fwd"].put(latest)
        return out


class Block(nn.Module):
    """Two quantised products around a plain one. ``inner``: the block turns FP8 on itself, once for each."""

    def __init__(self, width: int = 8, *, inner: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.plain, self.second = Linear(width), nn.Linear(width, width), Linear(width)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        around = autocast if self.inner else nullcontext
        with around():
            h = self.first(self.norm(x))
        h = F.dropout(self.plain(h).sin(), 0.2)
        with around():
            return x + self.second(h)


def own_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The library's way: flags around both passes, and its autocast around the recomputation."""
    state = FP8GlobalStateManager.state
    enabled, recipe = state.enabled, state.recipe

    @contextmanager
    def again() -> Iterator[None]:
        with recompute_flags(True), autocast(enabled, recipe=recipe):
            yield

    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (recompute_flags(False), again()))


@pytest.fixture
def fp8_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model be the library that is loaded."""
    distributed = SimpleNamespace(
        FP8GlobalStateManager=FP8GlobalStateManager,
        get_activation_recompute_contexts=lambda: (recompute_flags(False), recompute_flags(True)),
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", SimpleNamespace(autocast=autocast))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", distributed)
    monkeypatch.setattr(FP8GlobalStateManager, "state", GlobalState())
