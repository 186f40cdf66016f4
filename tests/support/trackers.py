"""Trackers of named random states as the peers have them, written from what they do, on the CPU generator.

TransformerEngine, Megatron-Core and DeepSpeed switch the CUDA generator; here it is that of the CPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sac.full import RngTracker

SEEDS = {"model-parallel-rng": 1234, "expert-parallel-rng": 77}


class DeepSpeedLike:
    """States are tensors, handed out live; a fork knows nothing of the fork around it, so a nested one of the same name
    repeats numbers. TransformerEngine's is the same where generators are not graph-safe.
    """

    def __init__(self) -> None:
        self.states_: dict[str, Any] = {}

    def get_states(self) -> dict[str, Any]:
        return dict(self.states_)

    def set_states(self, states: dict[str, Any]) -> None:
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        self.states_[name] = self.first_state(seed)

    def first_state(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)


class MegatronLike(DeepSpeedLike):
    """Knows which state is in use, so a nested fork of the same name continues; `get_states` leaves that name out."""

    def __init__(self) -> None:
        super().__init__()
        self._current_state_name = "default-rng"

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer, outer_name = torch.get_rng_state(), self._current_state_name
        if outer_name != "default-rng":
            self.states_[outer_name] = outer
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(self.states_.get(outer_name, outer))
            self._current_state_name = outer_name


class GeneratorsLike(DeepSpeedLike):
    """States are generators, handed out live, as TransformerEngine's and Megatron's graph-safe trackers have them."""

    def first_state(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        outer = torch.get_rng_state()
        torch.set_rng_state(self.states_[name].get_state())
        try:
            yield
        finally:
            self.states_[name].set_state(torch.get_rng_state())
            torch.set_rng_state(outer)


MAKERS: Mapping[str, Callable[[], Any]] = {
    "ours": lambda: RngTracker("cpu"),
    "Megatron": MegatronLike,
    "DeepSpeed": DeepSpeedLike,
    "TransformerEngine, graph-safe": GeneratorsLike,
}


def filled(maker: Callable[[], Any]) -> Any:
    """A tracker with the states of `SEEDS`."""
    tracker = maker()
    for name, seed in SEEDS.items():
        tracker.add(name, seed)
    return tracker


def bytes_of(tracker: Any) -> dict[str, Tensor]:
    """Each state of a tracker as a tensor that nothing changes any more."""
    return {
        name: (state.get_state() if isinstance(state, torch.Generator) else state).clone()
        for name, state in tracker.get_states().items()
    }


def leaf(seed: int = 1) -> Tensor:
    """An input that needs a gradient, drawn from no generator of the process."""
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def draws(tracker: Any, x: Tensor) -> Tensor:
    """Draw before, in and after a fork."""
    h = F.dropout(x.sin(), 0.3)
    with tracker.fork():
        h = F.dropout(h.sin(), 0.5).cos()
    return F.dropout(h, 0.3).sin()


def states_of(tracker: Any) -> dict[str, list[int]]:
    """The states of a tracker and of the default generator, to be compared."""
    return {name: state.tolist() for name, state in {**bytes_of(tracker), "": torch.get_rng_state()}.items()}
