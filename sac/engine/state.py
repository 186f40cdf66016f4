"""What a rerun sees of the forward besides its inputs: random states, autocast, flags, attributes, contents of buffers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from sac.engine.recorder import default_generators
from sac.engine.tape import Tape
from sac.errors import Problem, RegionError
from sac.region.settings import Settings
from sac.tensors import copy_of, describe, is_wrapper, overwrite, version_of
from sac.torch_private import process_flags, set_version_counters

# The contract: a rerun sees the inputs, parameters, buffers, module attributes, random states, autocast and flags of the
# forward and leaves no trace in them; any other Python state is as torch.utils.checkpoint treats it. Attributes are
# those of the region's modules and of objects among its arguments; lists, dicts and sets that are attributes or arguments
# themselves count with their items, but what is inside of the items does not.

_FLAGS = [
    *process_flags(),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_default_dtype, torch.set_default_dtype),
]
_NOT_OURS = frozenset(vars(nn.Module()))  # the tables of a module
_CONTAINERS = (list, dict, set)
_GONE = object()


def modules_in(owners: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of ``owners``, each once."""
    found, waiting = dict[int, nn.Module](), [*owners]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend(one for one in module._modules.values() if one is not None)
    return list(found.values())


class ForwardState:
    """The state in which a forward began."""

    def __init__(self, owners: Sequence[nn.Module], arguments: Sequence[Any], settings: Settings, *, is_careful: bool) -> None:
        self._tables: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[Tensor, int, bool]] = []  # parameters and buffers: version, whether they need a gradient
        generators = [*settings.generators, *(one for one in arguments if isinstance(one, torch.Generator))]
        for module in modules_in(owners):
            table = module.__dict__
            self._tables.append((table, table.copy()))
            for name in ("_parameters", "_buffers"):
                if tensors := table[name]:
                    self._tables.append((tensors, tensors.copy()))
                    self._tensors += [(one, version_of(one), one.requires_grad) for one in tensors.values() if one is not None]
            if len(table) > len(_NOT_OURS):
                own = [table[name] for name in table.keys() - _NOT_OURS]
                self._note_containers(own)
                generators += [one for one in own if isinstance(one, torch.Generator)]
                generators += [one for part in own if type(part) in (list, tuple) for one in part if isinstance(one, torch.Generator)]
        for argument in arguments:
            if not isinstance(argument, (Tensor, nn.Module)) and hasattr(argument, "__dict__") and not callable(argument):
                self._tables.append((argument.__dict__, argument.__dict__.copy()))
                self._note_containers(argument.__dict__.values())
        self._note_containers(arguments)
        self._flags = [get() for get, _ in _FLAGS]
        self._autocast = _autocast_states()
        self._generators = [(one, one.get_state()) for one in (*default_generators(), *generators)] if settings.preserve_rng_state else []
        self._trackers = [(one, _tracker_states(one)) for one in (get() for get in settings.trackers)]
        self._providers = [(one, one.snapshot()) for one in settings.providers]
        self.python = python_random() if is_careful else None

    def _note_containers(self, values: Any) -> None:
        self._containers += [(one, one.copy()) for one in values if isinstance(one, _CONTAINERS) and one is not None and hasattr(one, "copy")]

    def end(self) -> None:
        """Note the versions that parameters and buffers have at the end of the forward."""
        if any(version_of(tensor) != version for tensor, version, _ in self._tensors):
            self._tensors = [(tensor, version_of(tensor), needs) for tensor, _, needs in self._tensors]

    def check(self, tape: Tape | None, where: str) -> None:
        """Raise ``RegionError`` if a parameter or buffer was written to after the forward, and there is no copy."""
        copied = {one.untyped_storage()._cdata for one, _ in tape.before.values()} if tape is not None else set()
        for tensor, version, _ in self._tensors:
            if version_of(tensor) != version and tensor.untyped_storage()._cdata not in copied:
                found = f"a parameter or buffer ({describe(tensor)}) was changed in place between forward and backward"
                raise RegionError(Problem(where, found, fix="change it after backward, or leave the block out of checkpointing"))

    @contextmanager
    def restored(self, tape: Tape | None) -> Iterator[None]:
        """Run the body in the state of the forward; afterwards everything is as it was."""
        with ExitStack() as stack:
            for table, then in self._tables:
                _swap(stack, table, then, _set_items)
            for container, then in self._containers:
                _swap(stack, container, then, _set_contents)
            for tensor, _, needs in self._tensors:
                if tensor.requires_grad is not needs and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(needs)
            for (get, put), then in zip(_FLAGS, self._flags):
                now = get()
                if now != then:
                    stack.callback(put, now)
                    put(then)
            for device, states in self._autocast.items():
                stack.enter_context(torch.autocast(device, **states))
            generators = [*self._generators, *(tape.generators.values() if tape is not None else ())]
            for generator, state in generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for tracker, then in self._trackers:
                stack.callback(_set_tracker, tracker, _tracker_states(tracker))
                _set_tracker(tracker, then)
            for provider, then in self._providers:
                stack.callback(provider.restore, provider.snapshot())
                provider.restore(then)
            if self.python is not None:
                stack.callback(set_python_random, python_random())
                set_python_random(self.python)
            for tensor, contents in tape.before.values() if tape is not None else ():
                storage = tensor.untyped_storage()
                if storage.nbytes() == contents.nbytes():  # else FSDP has freed it, and gathers it again
                    stack.callback(_put_back, tensor, copy_of(storage), version_of(tensor))
                    overwrite(storage, contents)
            yield


def _put_back(tensor: Tensor, contents: Any, version: int) -> None:
    if tensor.untyped_storage().nbytes() != contents.nbytes():
        return  # FSDP has freed it
    overwrite(tensor.untyped_storage(), contents)
    if version_of(tensor) != version and set_version_counters is not None:
        set_version_counters((tensor,), (version,))


def _swap(stack: ExitStack, target: Any, then: Any, put: Callable[[Any, Any], None]) -> None:
    stack.callback(put, target, target.copy())
    put(target, then)


def _set_items(table: dict[Any, Any], then: dict[Any, Any]) -> None:
    if table.keys() == then.keys() and all(map(is_, table.values(), then.values())):  # the usual case
        return
    for name in [name for name in table if name not in then]:
        del table[name]
    for name, value in then.items():
        now = table.get(name, _GONE)
        if now is not value and not _is_sharded(value) and not _is_sharded(now):
            table[name] = value


def _is_sharded(value: Any) -> bool:
    # FSDP2 exchanges a sharded parameter for a gathered one on its own, also inside of a region.
    return isinstance(value, Tensor) and is_wrapper(value)


def _set_contents(container: Any, then: Any) -> None:
    if isinstance(container, dict):
        _set_items(container, then)
    elif isinstance(container, list):
        container[:] = then
    else:
        container.clear()
        container.update(then)


def _autocast_states() -> dict[str, dict[str, Any]]:
    devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
    cache = torch.is_autocast_cache_enabled()
    return {
        device: {"enabled": torch.is_autocast_enabled(device), "dtype": torch.get_autocast_dtype(device), "cache_enabled": cache}
        for device in devices
    }


def _tracker_states(tracker: Any) -> Any:
    return {name: state.clone() for name, state in tracker.get_states().items()}, getattr(tracker, "_current_state_name", None)


def _set_tracker(tracker: Any, found: Any) -> None:
    if hasattr(tracker, "_current_state_name"):  # the stream in use, whose state is that of the default generator
        tracker._current_state_name = found[1]
    tracker.set_states(found[0])


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
        return left[0] == right[0]
    return bool(left[1][2] == right[1][2] and left[1][4] == right[1][4] and (left[1][1] == right[1][1]).all())
