"""Named random streams for tensor parallelism, and their seeds on each rank."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from sac.engine.rng import default_generator
from sac.errors import ConfigError, Problem, listing, nearest
from sac.tensors import cloned

# Note [Named streams]
#
# Ops draw from the default generator of their device. A fork loads the state of a named stream into it, and restores
# the previous state at the end; until then the tracker's own copy of the stream is stale, so the tracker records which
# stream is in use. A nested fork of the same stream continues it; of another stream, it first stores the outer one's
# state. The attribute `_current_state_name` is called as in Megatron-Core: `sac.engine.rng` reads it of both trackers.

DATA_PARALLEL = "data-parallel-rng"
MODEL_PARALLEL = "model-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"

_SEEDS = 2**64  # torch.manual_seed takes -(2**63) to 2**64 - 1; a negative seed counts from 2**64 down


class RngTracker:
    """Random streams by name, each with its own state; inside ``fork``, ops draw from one of them.

    ``device``: the device whose default generator forks switch; None means the accelerator, or the CPU if there is
    none. A device without an index means the current device of the fork, which must not change inside the fork. States
    are CPU tensors of bytes and do not depend on the index.

    Pass ``lambda: tracker`` as ``get_rng_state_tracker`` to ``sac.checkpoint`` or ``sac.apply``; regions that fork then
    draw the same numbers in recomputation.

    All threads share one default generator per device. So threads must not fork at the same time, nor draw while
    another thread forks if numbers are to repeat. Forks end in the opposite order of their beginnings.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = _device_of(device)
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()
        self._current_state_name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams, in the order in which they were added."""
        return tuple(self._states)

    @property
    def generator(self) -> torch.Generator:
        """The default generator that forks switch; initialises the device if necessary."""
        found = default_generator(self.device)
        if found is None:
            torch.get_device_module(self.device).init()
            found = default_generator(self.device)
        assert found is not None
        return found

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts as after ``torch.manual_seed(seed)``; does not change the default generator.

        Raises ``ConfigError``, and adds nothing, if the name or the seed is taken or the seed is invalid.
        """
        where, seed = "RngTracker.add", checked_seed(seed, "RngTracker.add")
        if name in self._states:
            raise ConfigError(Problem(where, f"{name!r} was added before", fix="give each stream a name of its own"))
        if seed % _SEEDS in self._seeds:
            fix = f"give {name!r} a seed of its own, or it draws the same numbers"
            raise ConfigError(Problem(where, f"seed {seed} belongs to another stream", fix=fix))
        self._states[name] = torch.Generator(self.device).manual_seed(seed).get_state()
        self._seeds.add(seed % _SEEDS)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Let ops on the device draw from stream ``name`` inside this context manager; also works as a decorator.

        The stream continues where its last fork ended, even if an exception ended that fork. A fork nested in a fork of
        the same name continues the stream. Raises ``ConfigError`` for an unknown name.
        """
        if name not in self._states:
            known = listing(self.names) or "none: no stream was added"
            near, fix = nearest(str(name), self.names), "add(name, seed) it first"
            raise ConfigError(Problem("RngTracker.fork", f"{name!r} was not added", known, near, fix=fix))
        outer, generator = self._current_state_name, self.generator
        before = generator.get_state()
        if outer in self._states:
            self._states[outer] = before
        generator.set_state(self._states[name])
        self._current_state_name = name
        try:
            yield
        finally:
            self._states[name] = generator.get_state()
            generator.set_state(before if outer is None else self._states.get(outer, before))
            self._current_state_name = outer

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of each stream's current state by name, including the stream in use."""
        states = {name: cloned(state) for name, state in self._states.items()}
        if self._current_state_name in states:
            states[self._current_state_name] = self.generator.get_state()
        return states

    def set_states(self, states: Mapping[str, torch.Tensor]) -> None:
        """Replace the streams by copies of ``states``; streams that it does not name are removed. Seeds stay taken.

        ``states`` are those of a tracker of the same device type. Inside a fork, the stream in use continues from its
        new state.
        """
        taken = {name: cloned(state) for name, state in states.items()}
        if self._current_state_name in taken:
            self.generator.set_state(taken[self._current_state_name])
        self._states = taken

    def reset(self) -> None:
        """Remove all streams and seeds. Raises ``ConfigError`` inside a fork."""
        if self._current_state_name is not None:
            found, fix = f"{self._current_state_name!r} is in use", "call it outside of every fork"
            raise ConfigError(Problem("RngTracker.reset", found, fix=fix))
        self._states, self._seeds = {}, set()


CudaRNGStatesTracker = RngTracker  # as TransformerEngine, Megatron-Core and DeepSpeed call theirs


@cache
def process_tracker() -> RngTracker:
    """Return the one tracker of this process, for the accelerator if there is one, else for the CPU."""
    return RngTracker()


def _device_of(device: Any) -> torch.device:
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.device(device)
        torch.Generator(found)
    except (TypeError, RuntimeError) as problem:
        text = f"{device!r} has no random generator here: {str(problem).partition(chr(10))[0]}"
        raise ConfigError(Problem("RngTracker.device", text)) from problem
    return found


def checked_seed(seed: Any, where: str) -> int:
    """Return the seed as an int; raises ``ConfigError`` if torch would not accept it."""
    return _whole_number(seed, where, "a seed", -(2**63), _SEEDS - 1)


def _whole_number(value: Any, where: str, name: str, least: int, most: int) -> int:
    """Return a whole number of any type (numpy's included) as an int."""
    with suppress(TypeError):
        if least <= operator.index(value) <= most:
            return operator.index(value)
    raise ConfigError(Problem(where, f"{value!r} is not {name}", f"a whole number from {least} to {most}"))


def seed_model_parallel(
    seed: int,
    tp_rank: int = 0,
    ep_rank: int = 0,
    etp_rank: int = 0,
    *,
    tracker: RngTracker | None = None,
    device: torch.device | str | None = None,
) -> RngTracker:
    """Seed the default generator and the three named streams of a model-parallel job; return their tracker.

    The default generator of the tracker's device and the stream ``data-parallel-rng`` get ``seed``, so ranks with the
    same seed draw the same numbers. ``model-parallel-rng`` gets ``seed + 2718 + tp_rank`` and ``expert-parallel-rng``
    gets ``seed + 1024 + 100 * ep_rank + etp_rank``. ``tp_rank``, ``ep_rank`` and ``etp_rank`` are the ranks of this
    process in its tensor-, expert- and expert-tensor-parallel groups. The formula is that of Megatron-Core's
    ``model_parallel_cuda_manual_seed``. As in Megatron-Core, the CPU's generator is unchanged if the device is not
    the CPU.

    The streams of ``tracker`` are replaced; None creates a tracker for ``device`` (default as in ``RngTracker``).

    Raises ``ConfigError``, before changing anything, if a seed or a rank is invalid, or if two streams would have the
    same seed.
    """
    where, ranks = "seed_model_parallel", {"tp_rank": tp_rank, "ep_rank": ep_rank, "etp_rank": etp_rank}
    seed = checked_seed(seed, where)
    tp, ep, etp = (_whole_number(rank, f"{where}.{key}", "a rank", 0, 2**31) for key, rank in ranks.items())
    tracker = RngTracker(device) if tracker is None else tracker
    fresh = RngTracker(tracker.device)
    fresh.add(DATA_PARALLEL, seed)
    fresh.add(MODEL_PARALLEL, seed + 2718 + tp)
    fresh.add(EXPERT_PARALLEL, seed + 1024 + 100 * ep + etp)
    tracker.reset()
    tracker._states, tracker._seeds = fresh._states, fresh._seeds
    tracker.generator.manual_seed(seed)
    return tracker
