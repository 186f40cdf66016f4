"""A model of TransformerEngine's training in FP8 on a CPU: the state and the names that sac relies on, in our own code.

Delayed scaling: a module quantises with scales that follow from the maxima of earlier calls, and notes its own maxima.
When the outermost autocast ends, all scales of forwards are updated; when the backward of its first module ends, those
of backwards are. As its kernels do, the model reads and writes unseen by modes and version counters (through NumPy);
with ``Recipe(seen=True)`` it updates by ops, as its unfused update does.

The library's own protocol for checkpointing is here too: flags around forward and recomputation, and a queue of copies
for each module.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.support.runs import note_run

MODULE = "transformer_engine.pytorch.quantization"


@dataclass(frozen=True)
class Recipe:
    """``history``: rows of a history, of which the last ``window`` count. The largest quantised value is ``top``."""

    history: int = 160
    window: int = 3
    top: float = 16.0
    seen: bool = False


@dataclass(slots=True)
class GlobalState:
    """What the library keeps for the process."""

    fp8_enabled: bool = False
    fp8_calibration: bool = False
    fp8_recipe: Recipe | None = None
    fp8_distributed_group: Any = None
    is_first_fp8_module: bool = False
    fp8_graph_capturing: bool = False
    autocast_depth: int = 0
    global_amax_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_amax_history_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    global_scale_buffer: dict[str, list[Tensor]] = field(default_factory=dict)
    fp8_tensors_recompute_buffer: list[deque[tuple[Tensor, Tensor]]] = field(default_factory=list)
    recipes: dict[str, Recipe] = field(default_factory=dict)  # of each buffer


_AUTOCAST = [
    "fp8_enabled",
    "fp8_calibration",
    "fp8_recipe",
    "fp8_distributed_group",
    "is_first_fp8_module",
    "fp8_graph_capturing",
]


class FP8GlobalStateManager:
    """The library's access to that state."""

    __module__ = MODULE
    quantization_state = GlobalState()

    @classmethod
    def reset(cls) -> None:
        cls.quantization_state = GlobalState()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.quantization_state.fp8_enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return cls.recipe()

    @classmethod
    def get_fp8_group(cls) -> Any:
        return cls.quantization_state.fp8_distributed_group

    @classmethod
    def recipe(cls) -> Recipe:
        return cls.quantization_state.fp8_recipe or Recipe()

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return tuple(getattr(cls.quantization_state, name) for name in _AUTOCAST)

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        for name, value in zip(_AUTOCAST, state, strict=True):
            setattr(cls.quantization_state, name, value)

    @classmethod
    def takes_first(cls) -> bool:
        """Whether the asking module is the first one of its autocast."""
        state = cls.quantization_state
        first, state.is_first_fp8_module = state.is_first_fp8_module, False
        return first

    @classmethod
    def register(cls, meta: dict[str, Any]) -> None:
        """Make a module's scales known to the updates, once."""
        if "positions" in meta:
            return
        meta["positions"] = []
        cls.quantization_state.recipes |= dict.fromkeys(("scaling_fwd", "scaling_bwd"), cls.recipe())
        for key in ("scaling_fwd", "scaling_bwd"):
            state = cls.quantization_state
            kept = (state.global_amax_buffer, state.global_amax_history_buffer, state.global_scale_buffer)
            scales = meta[key]
            for buffer, one in zip(kept, (scales.amax_history[0], scales.amax_history, scales.scale), strict=True):
                buffer.setdefault(key, []).append(one)
            meta["positions"].append(len(state.global_scale_buffer[key]) - 1)

    @classmethod
    def update(cls, key: str) -> None:
        """Compute the scales of all forwards, or of all backwards, from their histories, and shift these by a row."""
        state = cls.quantization_state
        for maxima, history, scale in zip(
            state.global_amax_buffer.get(key, ()),
            state.global_amax_history_buffer.get(key, ()),
            state.global_scale_buffer.get(key, ()),
            strict=True,
        ):
            assert maxima.data_ptr() == history.data_ptr()
            recipe = state.recipes[key]
            largest = history[: recipe.window].max(dim=0).values
            _write(scale, torch.where(largest > 0, recipe.top / largest, scale), recipe)
            rows = history.roll(1, 0)
            rows[0] = 0
            _write(history, rows, recipe)

    @classmethod
    def stash(cls, meta: dict[str, Any]) -> None:
        state = cls.quantization_state
        if "queue" not in meta:
            state.fp8_tensors_recompute_buffer.append(deque())
            meta["queue"] = len(state.fp8_tensors_recompute_buffer) - 1
        scales = meta["scaling_fwd"]
        state.fp8_tensors_recompute_buffer[meta["queue"]].append((scales.amax_history.clone(), scales.scale.clone()))

    @classmethod
    def fetch(cls, meta: dict[str, Any]) -> None:
        scales = meta["scaling_fwd"]
        meta["latest"] = scales.amax_history.clone(), scales.scale.clone()
        cls._put(scales, cls.quantization_state.fp8_tensors_recompute_buffer[meta["queue"]].popleft())

    @classmethod
    def put_back(cls, meta: dict[str, Any]) -> None:
        cls._put(meta["scaling_fwd"], meta["latest"])

    @staticmethod
    def _put(scales: ScalingState, values: tuple[Tensor, Tensor]) -> None:
        _write(scales.amax_history, values[0], Recipe())
        _write(scales.scale, values[1], Recipe())


def _write(target: Tensor, value: Tensor, recipe: Recipe) -> None:
    if recipe.seen:
        with torch.no_grad():
            target.copy_(value)
    else:
        target.numpy()[...] = value.numpy()


class ScalingState:
    """Scales and maxima of the operands of a module."""

    __module__ = MODULE

    def __init__(self, recipe: Recipe, count: int) -> None:
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(recipe.history, count)


class Quantizer:
    """Quantises one operand; holds views of its scale and of its newest maximum."""

    def __init__(self, scales: ScalingState, index: int) -> None:
        self.scale, self.amax = scales.scale[index], scales.amax_history[0][index].reshape(1)

    def __call__(self, x: Tensor, recipe: Recipe) -> Tensor:
        """Return ``x`` rounded to a grid that follows from the scale; note its maximum."""
        values, scale = x.detach().numpy(), self.scale.numpy()
        _write(self.amax, torch.full((1,), max(float(abs(values).max()), float(self.amax.numpy()[0]))), recipe)
        out = torch.empty_like(x)
        out.numpy()[...] = (values * scale).round().clip(-recipe.top, recipe.top) / scale
        return out


@contextmanager
def autocast(enabled: bool = True, recipe: Recipe | None = None, amax_reduction_group: Any = None) -> Iterator[None]:
    manager, state = FP8GlobalStateManager, FP8GlobalStateManager.quantization_state
    before = manager.get_autocast_state()
    is_first = state.autocast_depth == 0 or state.is_first_fp8_module
    manager.set_autocast_state((enabled, False, recipe or Recipe(), amax_reduction_group, is_first, False))
    state.autocast_depth += 1
    try:
        yield
    finally:
        manager.set_autocast_state(before)
        state.autocast_depth -= 1
        if enabled and state.autocast_depth == 0 and torch.is_grad_enabled():
            manager.update("scaling_fwd")


# -- Modules

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
    def forward(ctx: Any, x: Tensor, weight: Tensor, quantizers: list[Quantizer], updates: bool) -> Tensor:
        ctx.recipe, ctx.quantizer, ctx.updates = FP8GlobalStateManager.recipe(), quantizers[2], updates
        x, weight = quantizers[0](x, ctx.recipe), quantizers[1](weight, ctx.recipe)
        ctx.save_for_backward(x, weight)
        out = x.new_empty(*x.shape[:-1], len(weight))
        out.numpy()[...] = x.numpy() @ weight.numpy().T
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        grad = ctx.quantizer(grads[0], ctx.recipe)
        if ctx.updates:
            FP8GlobalStateManager.update("scaling_bwd")
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2), None, None


class Linear(nn.Module):
    """A product whose operands are quantised while FP8 is on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.fp8_meta: dict[str, Any] = {}
        self.quantizers: list[Quantizer] = []
        self.fp8 = False

    def forward(self, x: Tensor) -> Tensor:
        manager = FP8GlobalStateManager
        if self.fp8 and _RECOMPUTES:
            manager.fetch(self.fp8_meta)
        else:
            self.fp8 = manager.is_fp8_enabled()
            if self.fp8:
                self._prepare()
        if not self.fp8:
            return F.linear(x, self.weight)
        out = _Product.apply(x, self.weight, self.quantizers, torch.is_grad_enabled() and manager.takes_first())
        if _RECOMPUTES:
            manager.put_back(self.fp8_meta)
        return out

    def _prepare(self) -> None:
        manager, meta = FP8GlobalStateManager, self.fp8_meta
        if "scaling_fwd" not in meta:
            forward, backward = (ScalingState(manager.recipe(), count) for count in (2, 1))
            meta |= {"scaling_fwd": forward, "scaling_bwd": backward}
            self.quantizers = [Quantizer(forward, 0), Quantizer(forward, 1), Quantizer(backward, 0)]
        manager.register(meta)
        if self.training and _IN_REGION:
            manager.stash(meta)


class Block(nn.Module):
    """Two quantised products around a plain one. ``inner``: the block turns FP8 on itself, once for each."""

    def __init__(self, width: int = 8, *, inner: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.plain, self.second = Linear(width), nn.Linear(width, width), Linear(width)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        note_run(self)
        h = self._call(self.first, self.norm(x))
        h = F.dropout(self.plain(h).sin(), 0.2)
        return x + self._call(self.second, h)

    def _call(self, layer: Linear, x: Tensor) -> Tensor:
        if not self.inner:
            return layer(x)
        with autocast():
            return layer(x)


def own_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The library's way: flags around both passes, and its autocast around the recomputation."""
    enabled, recipe = FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.quantization_state.fp8_recipe

    @contextmanager
    def again() -> Iterator[None]:
        with recompute_flags(True), autocast(enabled, recipe):
            yield

    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False, context_fn=lambda: (recompute_flags(False), again()))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of all scales and histories, by name."""
    found = {}
    for name, module in model.named_modules():
        for key, scales in getattr(module, "fp8_meta", {}).items():
            if isinstance(scales, ScalingState):
                found |= {f"{name} {key} scale": scales.scale.clone()}
                found |= {f"{name} {key} maxima": scales.amax_history.clone()}
    return found


@pytest.fixture
def fp8_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the model be the library that is loaded."""
    library = SimpleNamespace(FP8GlobalStateManager=FP8GlobalStateManager, autocast=autocast)
    monkeypatch.setitem(sys.modules, MODULE, library)
    contexts = SimpleNamespace(
        get_activation_recompute_contexts=lambda: (recompute_flags(False), recompute_flags(True))
    )
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", contexts)
    FP8GlobalStateManager.reset()
    yield
    FP8GlobalStateManager.reset()
