"""The named random streams of a tracker, whoever wrote it, as they were at one time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from sac.errors import ConfigError, Problem
from sac.region.detach import cloned, tell_of

# Note [Trackers of others]
#
# A tracker is what has `get_states()` and `set_states(states)`: ours, Megatron-Core's, TransformerEngine's and
# DeepSpeed's. A state is a tensor of bytes, or the generator itself (`graph-safe` trackers, which CUDA graphs can
# follow). What `get_states` hands out may be live: tensors are copied; of a generator the state is copied, and put back
# into the same generator, which graphs and others may hold.
#
# A fork of a graph-safe tracker lets the default generator share the state of the named one, so that both advance.
# `graphsafe_get_state` returns a generator that shares the default one's state as it is now: no copy, but a note of
# whose state it shares. It serves as that here and is put back before the states themselves.
#
# Megatron-Core's tracker (and ours) knows which stream is in use, and what a nested fork does depends on it; its
# `get_states` leaves that out.

CURRENT = "_current_state_name"
_MISSING = object()

States = list[tuple[torch.Generator, torch.Tensor]]


def state_of(generator: torch.Generator) -> torch.Tensor:
    """Return a copy of a generator's state, a tensor of bytes on the CPU."""
    return tell_of(generator.get_state())


def states_of(generators: Iterable[torch.Generator]) -> States:
    """Return each generator with a copy of its state."""
    return [(generator, state_of(generator)) for generator in generators]


def put_back(states: States) -> None:
    """Set each generator's state to the one it stands with."""
    for generator, state in states:
        generator.set_state(state)


def tracker_of(getter: Callable[[], Any]) -> Any:
    """Return the tracker that ``getter`` returns; raises ``ConfigError`` if that is none."""
    if isinstance(getter, type):
        raise _error(
            f"it is the class {getter.__name__}, which makes a new tracker at each call",
            expected="a function that returns the tracker whose streams the region forks: lambda: tracker",
        )
    tracker = getter()
    if callable(getattr(tracker, "get_states", None)) and callable(getattr(tracker, "set_states", None)):
        return tracker
    raise _error(
        f"it returned {tracker!r}, which has no get_states() and set_states(states)",
        expected="a function that returns a tracker of named random states, such as sac.full.RngTracker",
    )


class NamedStates:
    """The states of a tracker as they are now, to be put back any number of times. See Note [Trackers of others].

    ``defaults``: the default generators of accelerators, which a fork may have tied to a named one.
    """

    __slots__ = ("_current", "_ties", "_values", "defaults", "generators")

    def __init__(self, tracker: Any, defaults: Sequence[torch.Generator]) -> None:
        states = tracker.get_states()
        if not isinstance(states, Mapping):
            raise _error(f"get_states() of its tracker returned {states!r}", expected="a mapping of name to state")
        self._values: dict[str, torch.Tensor | torch.Generator] = {}
        for name, value in states.items():
            if not isinstance(value, (torch.Tensor, torch.Generator)):
                raise _error(f"the state of {name!r} in its tracker is {value!r}", "a tensor, or a torch.Generator")
            self._values[name] = cloned(value) if isinstance(value, torch.Tensor) else value
        self._current = getattr(tracker, CURRENT, _MISSING)
        live = [value for value in self._values.values() if isinstance(value, torch.Generator)]
        self.generators = states_of(live)
        kinds = {generator.device.type for generator in live}
        self.defaults = [default for default in defaults if default.device.type in kinds]
        self._ties = [(default, default.graphsafe_get_state()) for default in self.defaults]

    def put_on(self, tracker: Any) -> None:
        """Put the states back, on the tracker that serves now."""
        for default, tied in self._ties:
            default.graphsafe_set_state(tied)
        if self._current is not _MISSING:
            setattr(tracker, CURRENT, self._current)
        if self._values or tracker.get_states():  # Megatron-Core's takes even no states for a sign that it is in use
            tracker.set_states(
                {name: cloned(one) if isinstance(one, torch.Tensor) else one for name, one in self._values.items()}
            )
        put_back(self.generators)


def put_trackers_back(trackers: Sequence[tuple[Any, NamedStates]]) -> ExitStack:
    """Put states back, each on the tracker beside it; closing what is returned makes all as it was before."""
    with ExitStack() as undo:
        for tracker, states in trackers:
            undo.callback(put_back, states_of([generator for generator, _ in states.generators]))
            undo.callback(NamedStates(tracker, states.defaults).put_on, tracker)
            states.put_on(tracker)
        return undo.pop_all()


def _error(found: str, expected: str) -> ConfigError:
    return ConfigError(Problem("get_rng_state_tracker", found, expected=expected))
