"""What a rerun sees of the forward besides its inputs: random states, autocast, flags, attributes, buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from sac.engine.flags import NO_MODES, Autocast, BackendFlags, function_modes, recomputing, under_function_modes
from sac.engine.fp8 import FP8_METAS
from sac.engine.objects import (
    StandIn,
    cells,
    class_of,
    holds_nothing,
    is_own_object,
    is_stale,
    parts_of,
    with_tensor,
    without_graph,
)
from sac.engine.rng import GeneratorStates, RngSnapshot, python_random, set_python_random
from sac.engine.settings import Settings
from sac.engine.tape import Tape
from sac.errors import Problem, RegionError
from sac.tensors import copy_of, describe, is_wrapper, overwrite, storage_address, version_of
from sac.torch_private import FSDP_MANAGED, keep_graphs_in_order_of_making, set_version_counters

# The contract: a rerun sees the inputs, parameters, buffers, module attributes, random states, autocast and flags of
# the forward and leaves no trace in them; any other Python state is as torch.utils.checkpoint treats it. Attributes are
# those of the region's modules and of objects among its arguments; lists, dicts and sets that are attributes or
# arguments themselves count with their items, but what is inside of the items does not.

_NOT_OURS = frozenset(vars(nn.Module()))  # the tables of a module
_SMALL = 1 << 16  # statistics and counters
_GONE = object()


def _is_random(value: Any) -> bool:
    """Return whether a value is a generator of torch, or a tracker of named streams."""
    return isinstance(value, torch.Generator) or all(hasattr(type(value), f"{verb}_states") for verb in ("get", "set"))


def modules_in(owners: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of ``owners``, each once."""
    modules: dict[int, nn.Module] = {}
    waiting: list[nn.Module | None] = [*owners]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in modules:
            modules[id(module)] = module
            waiting += module._modules.values()
    return list(modules.values())


def bound_in(function: Any) -> Iterator[Any]:
    """Yield the arguments that a partial function holds, and the generators in the closure of its function."""
    while isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    yield from (held for held in cells(function) if isinstance(held, torch.Generator))


class ForwardState:
    """The state in which a forward began."""

    def __init__(
        self,
        owners: Sequence[nn.Module],
        arguments: Sequence[Any],
        settings: Settings,
        *,
        is_careful: bool,
        copies: bool = False,
    ) -> None:
        """``copies``: of buffers, since no recorder takes them."""
        self._containers: list[tuple[Any, Any]] = []  # tables of attributes too, with copies
        self._tensors: list[tuple[Tensor, int, bool]] = []  # of the modules: version, whether they need a gradient
        self._children: list[tuple[Any, int]] = []  # tables of modules, with their lengths
        self._seen: dict[int, Any] = {}  # id of what modules hold -> what to hold of it
        self._held: list[Any] = []  # generators and trackers that modules and arguments hold
        for module in modules_in(owners):
            self._note_module(module)
        self._seen.clear()
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        for argument in arguments if len(tensors) < len(arguments) else ():
            self._held += filter(_is_random, (argument, *parts_of(argument)))
        self.flags, self.autocast, self.modes = BackendFlags(), Autocast(tensors), function_modes()
        self._random = RngSnapshot(tensors, settings, self._held) if settings.preserve_rng_state else None
        self.random: GeneratorStates = [] if self._random is None else self._random.states
        self._copies: list[tuple[Tensor, int, Any]] = []
        if copies:
            buffers = [buffer for module in modules_in(owners) for buffer in module.buffers(recurse=False)]
            plain = [buffer for buffer in buffers if not is_wrapper(buffer) and buffer.layout is torch.strided]
            self._copies = [(one, version_of(one), copy_of(one.untyped_storage())) for one in plain]
        self._providers = [(provider, provider.snapshot()) for provider in settings.providers]
        self.python = python_random() if is_careful else None
        keep_graphs_in_order_of_making()

    def _note_module(self, module: nn.Module) -> None:
        """Note attributes, parameters and buffers of a module, and what its attributes hold."""
        table = module.__dict__
        self._children.append((module._modules, len(module._modules)))
        if FP8_METAS.isdisjoint(table):  # TransformerEngine restores its own
            held = table.copy()
            self._containers.append((table, held))
            for name in table.keys() - _NOT_OURS:
                if not holds_nothing(class_of(value := table[name])):
                    held[name] = self._note_value(value)
        for name in ("_parameters", "_buffers") if FSDP_MANAGED not in table else ("_buffers",):
            if (tensors := table[name]) and isinstance(tensors, dict):  # not so in what TorchScript compiles
                self._containers.append((tensors, tensors.copy()))
                found = [tensor for tensor in tensors.values() if tensor is not None]
                self._tensors += [(tensor, version_of(tensor), tensor.requires_grad) for tensor in found]

    def _note_value(self, value: Any) -> Any:
        """Note a container with its items, an object with its attributes, generators and trackers.

        Return what to hold of the value: what holds tensors with a graph is replaced.
        """
        if id(value) in self._seen:
            return self._seen[id(value)]
        held = self._seen[id(value)] = without_graph(value)
        if isinstance(value, Tensor):
            if held is value and not (value.requires_grad or value._is_view()):  # FSDP1 leaves views of its own
                self._tensors.append((value, version_of(value), False))
            return held
        self._held += filter(_is_random, bound_in(value) if isinstance(value, partial) else (value, *parts_of(value)))
        if held is value and isinstance(value, (list, dict, set)):
            self._containers.append((value, value.copy()))
        elif held is value and is_own_object(value) and hasattr(value, "__dict__"):
            self._containers.append((vars(value), vars(value).copy()))
        return held

    def end(self) -> list[Tensor]:
        """Note the versions that parameters and buffers have at the end of the forward; return what it wrote to.

        Copies that are not needed are dropped.
        """
        # A batch norm moves no version counter.
        self._copies = [
            (tensor, version, contents)
            for tensor, version, contents in self._copies
            if contents.nbytes() <= _SMALL or version_of(tensor) != version
        ]
        written = [tensor for tensor, version, _ in self._tensors if version_of(tensor) != version]
        if written:
            self._tensors = [(tensor, version_of(tensor), needs) for tensor, _, needs in self._tensors]
        return written

    def drop(self) -> None:
        """Release what only a rerun needs."""
        self._containers, self._held, self._providers, self._children, self.random = [], [], [], [], []
        self._random = None

    @property
    def tensors(self) -> list[Tensor]:
        """The parameters and buffers."""
        return [tensor for tensor, _, _ in self._tensors]

    def check(self, tape: Tape | None, where: str) -> None:
        """Raise ``RegionError`` if a parameter or buffer was written to after the forward, and there is no copy.

        Also if the forward has added a layer: a rerun would make another one, which got its gradients.
        """
        if any(len(table) > count for table, count in self._children):
            found = "its forward has added a layer to a module, and its Python runs again in backward"
            fix = "make the layer before training: a call without gradients does; or set `engine: replay`"
            raise RegionError(Problem(where, found, fix=fix))
        copied = {storage_address(tensor) for tensor, _ in self._contents(tape)}
        for tensor, version, _ in self._tensors:
            if tape is not None and storage_address(tensor) not in tape.leaf_roots:
                continue  # the forward did not read it
            if version_of(tensor) != version and storage_address(tensor) not in copied:
                found = f"a parameter or buffer ({describe(tensor)}) was changed in place between forward and backward"
                fix = "change it after backward, or leave the block out of checkpointing"
                raise RegionError(Problem(where, found, fix=fix))

    def _contents(self, tape: Tape | None) -> list[tuple[Tensor, Any]]:
        """Return tensors that the forward wrote to, with the contents from before."""
        written = [(tensor, contents) for tensor, _, contents in self._copies]
        if tape is None:
            return written
        # Unlike the tensor beside the contents, a leaf has the version counter that others see.
        leaves = {root: tape.leaves[root].tensor for root in tape.before}
        here = [
            (leaves[root], one[1]) if isinstance(leaves[root], Tensor) else one for root, one in tape.before.items()
        ]
        return [*here, *written]

    @contextmanager
    def restored(self, tape: Tape | None) -> Iterator[None]:
        """Run the body in the state of the forward; afterwards everything is as it was.

        There are no torch-function modes yet: the body enters ``modes`` around the region's function.
        """
        with recomputing(), under_function_modes(NO_MODES), ExitStack() as stack:
            stack.callback(_put_all, [(target, target.copy()) for target, _ in self._containers])
            _put_all(self._containers)
            for tensor, _, needs in self._tensors:
                if tensor.requires_grad is not needs and tensor.is_leaf:
                    stack.callback(tensor.requires_grad_, tensor.requires_grad)
                    tensor.requires_grad_(needs)
            self.flags.enter_on(stack)
            self.autocast.enter_on(stack)
            self._restore_random(stack, tape)
            for tensor, contents in self._contents(tape):
                storage = tensor.untyped_storage()
                if storage.nbytes() == contents.nbytes():  # else FSDP has freed it, and gathers it again
                    stack.callback(put_back, tensor, copy_of(storage), version_of(tensor))
                    overwrite(storage, contents)
            yield

    def _restore_random(self, stack: ExitStack, tape: Tape | None) -> None:
        for generator, state in tape.generators.values() if tape is not None else ():
            stack.callback(generator.set_state, generator.get_state())
            generator.set_state(state)
        if self._random is not None:
            self._random.enter_on(stack)
        for provider, then in self._providers:
            stack.callback(provider.restore, provider.snapshot())
            provider.restore(then)
        if self.python is not None:
            stack.callback(set_python_random, python_random())
            set_python_random(self.python)


def put_back(tensor: Tensor, contents: Any, version: int) -> None:
    """Give a tensor the contents and the version that it had."""
    if tensor.untyped_storage().nbytes() != contents.nbytes():
        return  # FSDP has freed it
    overwrite(tensor.untyped_storage(), contents)
    if version_of(tensor) != version:
        set_version_counters((tensor,), (version,))


def _put_all(pairs: list[tuple[Any, Any]]) -> None:
    for container, then in pairs:
        if isinstance(container, dict):
            _set_items(container, then)
        elif isinstance(container, list):
            container[:] = map(with_tensor, then)
        else:
            container.clear()
            container.update(then)


def _set_items(table: dict[Any, Any], then: dict[Any, Any]) -> None:
    if len(table) == len(then) and all(map(is_, table.values(), then.values())) and table.keys() == then.keys():
        return  # the usual case
    if FSDP_MANAGED in then:  # FSDP1 moves parameters between the tables of a module
        then = {
            name: value
            for name, value in then.items()
            if not (isinstance(value, Tensor) or (type(value) is StandIn and value.is_tensor))
        }
        then |= {name: value for name, value in table.items() if isinstance(value, Tensor)}
    for name in [name for name in table if name not in then]:
        del table[name]
    for name, value in then.items():
        now, value = table.get(name, _GONE), with_tensor(value)
        if now is not value and not _is_sharded(value) and not _is_sharded(now):
            table[name] = value


def _is_sharded(value: Any) -> bool:
    # FSDP2 exchanges a sharded parameter for a gathered one on its own, also inside of a region.
    return isinstance(value, Tensor) and (is_wrapper(value) or is_stale(value))
