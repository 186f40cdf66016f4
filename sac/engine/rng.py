"""Random states: of torch's generators, of trackers' named streams, of Python's and NumPy's generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sac.engine.settings import Settings
from sac.errors import ConfigError, Problem
from sac.tensors import cloned, equal
from sac.torch_private import mps_generator

GeneratorStates = list[tuple[torch.Generator, Tensor]]


def default_generators() -> list[torch.Generator]:
    """Return the default generators of the CPU and of the current device, if one is in use."""
    return [torch.default_generator, *_accelerator_generators(())]


def states_of(generators: Iterable[torch.Generator]) -> GeneratorStates:
    """Return each generator with a copy of its state, bytes on the CPU; modes do not see it."""
    return [(generator, generator.get_state()) for generator in generators]


def advanced(states: GeneratorStates) -> GeneratorStates:
    """Return those of ``states`` whose generator has another state now: something was drawn from it."""
    return [(generator, state) for generator, state in states if not equal(generator.get_state(), state)]


def set_states(states: GeneratorStates) -> None:
    """Set what ``states_of`` has returned."""
    for generator, state in states:
        generator.set_state(state)


# -- Named random streams of trackers

# Note [Trackers of others]
#
# A tracker is an object with `get_states()` and `set_states(states)`: those of sac, Megatron-Core, TransformerEngine
# and DeepSpeed. A state is a tensor of bytes, or the generator itself (`graph-safe` trackers). `get_states` may return
# live objects: tensors are copied, and the state of a generator is restored into the same generator, since CUDA graphs
# and other code may hold it. A fork of a graph-safe tracker makes the default generator share the state of the named
# one; `graphsafe_get_state` records which state it shares, and sac restores this sharing first. Megatron-Core's tracker
# records which stream is in use; its `get_states` does not include that.

CURRENT = "_current_state_name"
_MISSING = object()


def tracker_of(getter: Callable[[], Any]) -> Any:
    """Return the tracker that ``getter`` returns; raises ``ConfigError`` if that is not a tracker."""
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


def named_states(tracker: Any, defaults: Sequence[torch.Generator]) -> tuple[Callable[[Any], None], GeneratorStates]:
    """Return a function that puts the current states of ``tracker`` on a tracker, and those that generators hold.

    ``defaults``: the default generators of accelerators, which a fork may have tied to a named one.
    """
    states = tracker.get_states()
    if not isinstance(states, Mapping):
        raise _error(f"get_states() of its tracker returned {states!r}", expected="a mapping of name to state")
    for name, value in states.items():
        if not isinstance(value, (torch.Tensor, torch.Generator)):
            raise _error(f"the state of {name!r} in its tracker is {value!r}", "a tensor, or a torch.Generator")
    values = _copied(states)
    current = getattr(tracker, CURRENT, _MISSING)
    live = states_of(value for value in values.values() if isinstance(value, torch.Generator))
    classes = {generator.device.type for generator, _ in live}
    ties = [(default, default.graphsafe_get_state()) for default in defaults if default.device.type in classes]

    def put_on(tracker: Any) -> None:
        for default, tied in ties:
            default.graphsafe_set_state(tied)
        if current is not _MISSING:
            setattr(tracker, CURRENT, current)
        if values or tracker.get_states():  # Megatron-Core's set_states marks it as in use, even for no states
            tracker.set_states(_copied(values))
        set_states(live)

    return put_on, live


def _copied(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cloned(value) if isinstance(value, torch.Tensor) else value for name, value in states.items()}


def _error(found: str, expected: str) -> ConfigError:
    return ConfigError(Problem("get_rng_state_tracker", found, expected=expected))


# -- Random states of torch

# Note [Random states]
#
# The state of each generator that the forward may draw from is captured at its start: the CPU's, those of the inputs'
# devices and of the accelerator's current device, those that the caller names, and the named streams of trackers. The
# recomputation restores them; when it ends, also by an error, all have the states from before it again. A tracker's
# fork exchanges the state of a default generator, so trackers come first and default generators last, both ways.


class RngSnapshot:
    """States of the generators that a region may draw from. See Note [Random states].

    ``tensors``: the default generators of their devices are included, in addition to those of the CPU and of the
    current device. ``held``: generators and trackers that the region's modules and arguments hold. ``states``: of all
    these generators, the CPU's default one first; not of trackers.

    Raises ``ConfigError`` if a function in ``settings.trackers`` returns no tracker.
    """

    __slots__ = ("_accelerators", "_trackers", "states")

    def __init__(self, tensors: Iterable[torch.Tensor], settings: Settings, held: Sequence[Any] = ()) -> None:
        self._accelerators = _accelerator_generators(tensors)
        generators = [one for one in held if isinstance(one, torch.Generator)]
        self.states = states_of([torch.default_generator, *self._accelerators, *generators])
        trackers = [one for one in held if not isinstance(one, torch.Generator)]
        getters: dict[int, Callable[[], Any]] = {id(one): partial(lambda tracker: tracker, one) for one in trackers}
        getters |= {id(tracker_of(getter)): getter for getter in settings.trackers}
        self._trackers = [(get, named_states(tracker_of(get), self._accelerators)) for get in getters.values()]

    def enter_on(self, stack: ExitStack) -> None:
        """Restore the captured states; restore the current ones when ``stack`` is left."""
        stack.callback(set_states, states_of([generator for generator, _ in self.states]))
        for getter, (put_on, live) in self._trackers:
            tracker = tracker_of(getter)
            stack.callback(set_states, states_of([generator for generator, _ in live]))
            stack.callback(named_states(tracker, self._accelerators)[0], tracker)
            put_on(tracker)
        set_states(self.states)


def default_generator(device: torch.device) -> torch.Generator | None:
    """Return the generator that ops on ``device`` draw from when none is passed, or None if there is none yet.

    A device without an index means the current one of its type.
    """
    if device.type == "cpu":
        return torch.default_generator
    module: Any = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", ())
    if generators:  # empty until the device type is initialised
        index = device.index if device.index is not None else module.current_device()
        return generators[index] if index < len(generators) else None
    return mps_generator() if device.type == "mps" else None


def _accelerator_generators(tensors: Iterable[torch.Tensor]) -> list[torch.Generator]:
    """Return the generators of the devices of ``tensors`` and of the accelerator's current device, not the CPU's."""
    devices = {tensor.device for tensor in tensors if not (tensor.is_cpu or tensor.is_meta)}
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None and not devices:
        return []
    found = [default_generator(device) for device in sorted(devices, key=str)]
    # Querying the current device initialises it, which a forked process must not do. MPS is always ready.
    if accelerator is not None and getattr(getattr(torch, accelerator.type, None), "is_initialized", lambda: True)():
        found.append(default_generator(accelerator))
    return list({generator: None for generator in found if generator is not None})


# -- Python's and NumPy's global generators


def python_random() -> Any:
    """Return the states of Python's and NumPy's global generators, which can be compared."""
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), state and (state[0], state[1].tobytes(), *state[2:])


def set_python_random(states: Any) -> None:
    """Set what ``python_random`` has returned."""
    random.setstate(states[0])
    if states[1] is not None:
        numpy, (name, keys, *rest) = sys.modules["numpy"], states[1]
        numpy.random.set_state((name, numpy.frombuffer(keys, "uint32"), *rest))
