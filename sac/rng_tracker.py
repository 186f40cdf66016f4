"""Named random streams for tensor parallelism, and their seeds on each rank."""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from sac.engine.rng import default_generator
from sac.errors import ConfigError, Problem, listing, nearest
from sac.tensors import cloned

# -- Named random streams: one for each set of ranks that draw the same random numbers

# Note [Named streams]
#
# Ops draw from the default generator of their device. A fork loads the state of a named stream into this generator and
# restores the generator's previous state when the fork ends. While a stream is in use, its current state is that of the
# default generator, and the tracker's own copy is stale until the fork ends. So the tracker records which stream is in
# use. A nested fork of the same stream continues it. A nested fork of another stream first stores the state of the
# outer one, so that a third fork, of the first name again, continues from there.
#
# `_current_state_name` has the same name as in Megatron-Core, because `sac.engine.rng` includes this attribute in its
# snapshots of both our trackers and Megatron-Core's.

MODEL_PARALLEL = "model-parallel-rng"

_SEEDS = 2**64  # what torch.manual_seed takes; a negative seed counts from 2**64 down


class RngTracker:
    """Random streams by name, each with its own state; inside ``fork``, ops draw from one of them.

    ``device``: the device whose default generator forks switch; None means the accelerator, or the CPU if there is
    none. A device without an index means the current device of the fork, which must not change inside the fork. States
    are CPU tensors of bytes and do not depend on the index.

    Pass ``lambda: tracker`` as ``get_rng_state_tracker`` to ``sac.checkpoint`` or ``sac.apply``; regions that fork then
    draw the same numbers in recomputation.

    All threads share one default generator per device. So threads must not fork at the same time, nor draw while
    another thread forks if numbers are to repeat. Copies and pickles hold the streams and are outside of every fork.

    Every error is a ``ConfigError`` and leaves the tracker unchanged.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device_of(device)
        self._states: dict[str, torch.Tensor] = {}
        self._seeds: set[int] = set()
        self._current_state_name: str | None = None

    @property
    def device(self) -> torch.device:
        """The device whose default generator forks switch."""
        return self._device

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the streams, in the order in which they were added."""
        return tuple(self._states)

    @property
    def generator(self) -> torch.Generator:
        """The default generator that forks switch; initialises the device if necessary."""
        found = default_generator(self._device)
        if found is None:
            torch.get_device_module(self._device).init()
            found = default_generator(self._device)
        assert found is not None
        return found

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts as after ``torch.manual_seed(seed)``; does not change the default generator.

        Raises ``ConfigError`` if the name or the seed is taken, the name is not a string, or the seed is invalid.
        """
        where, seed = "RngTracker.add", checked_seed(seed, "RngTracker.add")
        if not isinstance(name, str):
            raise _error(where, f"{name!r} is not a name", legal="a string")
        if name in self._states:
            raise _error(where, f"{name!r} was added before", fix="give each stream a name of its own")
        if seed % _SEEDS in self._seeds:
            fix = f"give {name!r} a seed of its own, or it draws the same numbers"
            raise _error(where, f"seed {seed} belongs to another stream", fix=fix)
        self._states[name] = torch.Generator(self._device).manual_seed(seed).get_state()
        self._seeds.add(seed % _SEEDS)

    def fork(self, name: str = MODEL_PARALLEL) -> AbstractContextManager[None]:
        """Return a context manager inside which ops on the device draw from stream ``name``; also works as a decorator.

        The stream continues where its last fork ended, even if an exception ended that fork. A fork nested in a fork of
        the same name continues the stream. Raises ``ConfigError`` for an unknown name.
        """
        if not isinstance(name, str) or name not in self._states:
            known = listing(self.names) or "none: no stream was added"
            near = nearest(name, self.names) if isinstance(name, str) else ""
            found, fix = f"{name!r} was not added", "add(name, seed) it first"
            raise ConfigError(Problem("RngTracker.fork", found, known, near, fix=fix))
        return self._forked(name)

    @contextmanager
    def _forked(self, name: str) -> Iterator[None]:
        outer = self._current_state_name
        generator = self.generator
        before = generator.get_state()
        if outer in self._states:
            self._states[outer] = before
        generator.set_state(self._states[name])
        self._current_state_name = name
        try:
            yield
        finally:
            if self._current_state_name != name:
                found = f"the fork of {name!r} ends inside the fork of {self._current_state_name!r}, which began later"
                fix = "end forks in the opposite order, and use one tracker in one thread at a time"
                raise _error("RngTracker.fork", found, fix=fix)
            if name in self._states:
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

        Inside a fork, the stream in use continues from its new state. Raises ``ConfigError`` if ``states`` contains
        anything other than names and states of this tracker's device type.
        """
        where, scratch = "RngTracker.set_states", torch.Generator(self._device)
        if not isinstance(states, Mapping):
            raise _error(where, f"{states!r} holds no states", legal="a mapping of name to state")
        taken: dict[str, torch.Tensor] = {}
        for name, state in states.items():
            try:
                taken[name] = scratch.set_state(state).get_state()
            except (TypeError, RuntimeError) as problem:
                found = f"the state of {name!r} is none of {self._device.type}: {problem}"
                legal = "what get_states returned for a tracker of the same device type, in host memory"
                raise _error(where, found, legal=legal) from problem
        if self._current_state_name in taken:
            self.generator.set_state(taken[self._current_state_name])
        self._states = taken

    def reset(self) -> None:
        """Remove all streams and seeds. Raises ``ConfigError`` inside a fork."""
        if self._current_state_name is not None:
            raise _error(
                "RngTracker.reset", f"{self._current_state_name!r} is in use", fix="call it outside of every fork"
            )
        self._states, self._seeds = {}, set()

    def __getstate__(self) -> dict[str, Any]:
        return {"device": str(self._device), "states": self.get_states(), "seeds": set(self._seeds)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._device = torch.device(state["device"])
        self._states, self._seeds = dict(state["states"]), set(state["seeds"])
        self._current_state_name = None

    def __repr__(self) -> str:
        return f"RngTracker(device={str(self._device)!r}, names={self.names})"


def device_of(device: Any) -> torch.device:
    """Return the device of ``RngTracker(device)``; raises ``ConfigError`` if it has no random generator here."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        found = torch.device(device)
        torch.Generator(found)
    except (TypeError, RuntimeError) as problem:
        first = str(problem).partition("\n")[0]
        raise _error("RngTracker.device", f"{device!r} has no random generator here: {first}") from problem
    return found


def checked_seed(seed: Any, where: str) -> int:
    """Return the seed as an int; raises ``ConfigError`` if torch would not accept it."""
    return _whole_number(seed, range(-(2**63), _SEEDS), where, "a seed", "from -2**63 to 2**64 - 1")


def _whole_number(value: Any, legal: range, where: str, what: str, limits: str) -> int:
    """Return a whole number of any type (numpy's included, bool excluded) as an int."""
    try:
        whole = operator.index(value) if not isinstance(value, bool) else None
    except TypeError:
        whole = None
    if whole is None or whole not in legal:
        raise _error(where, f"{value!r} is not {what}", legal=f"a whole number {limits}")
    return whole


def _error(where: str, found: str, *, legal: str = "", fix: str = "") -> ConfigError:
    return ConfigError(Problem(where, found, legal, fix=fix))


# -- The seeds of a model-parallel job

DATA_PARALLEL = "data-parallel-rng"
EXPERT_PARALLEL = "expert-parallel-rng"


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

    ``tracker`` is reset; None creates one for ``device`` (default as in ``RngTracker``).

    Raises ``ConfigError``, before changing anything, if a seed or a rank is invalid, or if two streams would have the
    same seed.
    """
    where = "seed_model_parallel"
    if tracker is not None and device is not None and device_of(device) != tracker.device:
        found = f"device {device} is not that of the tracker, {tracker.device}"
        raise _error(where, found, fix="leave device out")
    tp, ep, etp = (
        _whole_number(rank, range(sys.maxsize), f"{where}.{key}", "a rank", "from 0 on")
        for key, rank in (("tp_rank", tp_rank), ("ep_rank", ep_rank), ("etp_rank", etp_rank))
    )
    first = checked_seed(seed, where)
    seeded = RngTracker(device if tracker is None else tracker.device)
    seeded.add(DATA_PARALLEL, first)
    seeded.add(MODEL_PARALLEL, first + 2718 + tp)
    seeded.add(EXPERT_PARALLEL, first + 1024 + 100 * ep + etp)
    if tracker is None:
        tracker = seeded
    else:
        tracker.reset()
        tracker._states, tracker._seeds = seeded._states, seeded._seeds
    tracker.generator.manual_seed(first)
    return tracker
