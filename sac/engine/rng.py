"""Random states: of torch's generators, of Python's and NumPy's generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sac.tensors import equal
from sac.torch_private import UnseenByModes

GeneratorStates = list[tuple[torch.Generator, Tensor]]


def default_generators() -> list[torch.Generator]:
    """Return the default generators of the CPU and of the current device, if one is in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return generators


def states_of(generators: Sequence[torch.Generator]) -> GeneratorStates:
    """Return each generator with its state now; modes do not see it."""
    guard = UnseenByModes()
    try:
        return [(generator, generator.get_state()) for generator in generators]
    finally:
        del guard


def advanced(states: GeneratorStates) -> GeneratorStates:
    """Return those of ``states`` whose generator has another state now: something was drawn from it."""
    return [(generator, state) for generator, state in states if not equal(generator.get_state(), state)]


def set_states(states: GeneratorStates) -> None:
    """Set what ``states_of`` has returned."""
    for generator, state in states:
        generator.set_state(state)


# -- Python's and NumPy's global generators


def python_random() -> Any:
    """Return the states of Python's and NumPy's global generators."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def set_python_random(states: Any) -> None:
    """Set what ``python_random`` has returned."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy"].random.set_state(states[1])


def same_python_random(left: Any, right: Any) -> bool:
    """Return whether two states are equal: nothing was drawn between them."""
    if left[0] != right[0] or left[1] is None or right[1] is None:
        return bool(left[0] == right[0])
    return bool(left[1][2] == right[1][2] and left[1][4] == right[1][4] and (left[1][1] == right[1][1]).all())
