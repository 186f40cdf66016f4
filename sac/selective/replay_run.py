"""Runs the steps of a replay, below autograd and without the region's Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from sac.region.detach import copy_of
from sac.region.parking import fetch
from sac.region.storages import version_of
from sac.selective.autocast import as_then
from sac.selective.forward_state import Images
from sac.selective.replay_plan import ReplayPlan
from sac.selective.table import Plan
from sac.selective.tape import ALIAS, HOLE, KWARGS, PART, PLAN, READS, REST, WRAP, Tape, from_reads
from sac.selective.tensors import metadata, storage_address, storage_bytes, tensors_of, wrapped_parts

# In forward the ops of a tape ran inside a dispatch mode: below autograd and autocast. These guards are private to torch
# (2.11 to 2.13); without them replay is not used.
_BELOW_AUTOGRAD = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
_NO_AUTOCAST = getattr(torch._C, "_DisableAutocast", None)
CAN_REPLAY = _BELOW_AUTOGRAD is not None and _NO_AUTOCAST is not None

Fill = Callable[[int, Tensor], None]


class CannotReplay(Exception):  # noqa: N818 (it is no error: the region's Python runs instead)
    """A value that replay starts from is not there any more; the text says which."""


class ExternalChangeError(Exception):
    """A tensor from outside was written to after the forward; holds the tensor and the version of the forward."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        super().__init__()
        self.tensor, self.version = tensor, version


@contextmanager
def _as_in_the_mode() -> Iterator[None]:
    """Run ops as a dispatch mode's handler does. Modes that are on see them; autograd and autocast do not."""
    assert _BELOW_AUTOGRAD is not None and _NO_AUTOCAST is not None
    guards = [_BELOW_AUTOGRAD(), _NO_AUTOCAST()]
    try:
        yield
    finally:
        while guards:
            guards.pop()


def run_plan(plan: ReplayPlan, tape: Tape, inputs: dict[int, Tensor], images: Images, fill: Fill) -> None:
    """Run the steps of ``plan``; ``fill`` is given each waiting handle's number with its tensor.

    ``inputs`` are the region's, by position; ``images`` what the region wrote to from outside, as it was before. Raises
    ``CannotReplay`` and ``ExternalChangeError``, before any op runs.
    """
    values: list[Any] = [None] * len(tape.roots)
    generators = {id(g): g for step in plan.steps for g, _ in tape.states.get(step.number, ())}
    with torch.enable_grad(), _as_in_the_mode(), ExitStack() as stack:
        _load(plan, tape, inputs, images, values)
        for generator in generators.values():
            stack.callback(generator.set_state, generator.get_state())
        _run(plan, tape, values, fill)


def _load(plan: ReplayPlan, tape: Tape, inputs: dict[int, Tensor], images: Images, values: list[Any]) -> None:
    copies: dict[int, torch.UntypedStorage] = {}
    for value in plan.leaves:
        leaf = tape.leaves[value]
        if leaf.position >= 0:
            values[value] = inputs[leaf.position].detach()
            continue
        tensor = leaf.tensor()
        if tensor is None:
            raise CannotReplay("a tensor from outside that an op read is not there any more")
        address = storage_address(tensor)
        if address in images:
            copy = copies.setdefault(address, copy_of(images[address][1]))
            values[value] = tensor.new_empty(0).set_(copy, *_place(leaf.geometry))
            continue
        if metadata(tensor) != leaf.geometry or storage_bytes(tensor) < leaf.nbytes:
            raise CannotReplay("the data of a parameter that an op read is elsewhere now")
        if not leaf.lasts and version_of(tensor) != leaf.version:
            raise ExternalChangeError(tensor, leaf.version)
        values[value] = tensor
    for value in plan.kept:
        held = fetch(tape.kept[value])
        values[value] = held.clone() if tape.roots[value] in plan.written else held


def _place(geometry: tuple[Any, ...]) -> tuple[Any, ...]:
    shape, stride, offset, _ = geometry
    return offset, shape, stride


def _run(plan: ReplayPlan, tape: Tape, values: list[Any], fill: Fill) -> None:
    for handle, value in plan.fills:
        fill(handle, values[value])
    pending: list[Any] = []  # works of point-to-point calls, of which several have to be under way at once
    guards, states = tape.guards, tape.states
    for step in plan.steps:
        entry = step.entry
        op, rest, keywords = entry[PLAN], entry[REST], entry[KWARGS]
        if type(op) is not Plan:
            out = _made(op, rest, [values[read] for read in entry[READS]])
        else:
            if pending and op.op.namespace != "c10d":
                _wait(pending)
            if states and step.number in states:
                for generator, state in states[step.number]:
                    generator.set_state(state)
            if op.flat:
                reads = iter(entry[READS])
                args = [values[next(reads)] if one is HOLE else one for one in rest]
            else:
                args = from_reads(rest, values)
                keywords = from_reads(keywords, values)
            if op.own_body:
                with as_then(guards.get(step.number)):
                    out = op.op(*args, **(keywords or {}))
            else:
                out = op.run(*args, **keywords) if keywords else op.run(*args)
            if op.is_collective and op.op.namespace == "c10d":
                pending.extend(_works_of(out))
        outputs = step.outputs
        if outputs:
            if isinstance(out, Tensor):
                values[outputs[0][1]] = out
            else:
                made = tensors_of(out)
                for place, value in outputs:
                    values[value] = made[place]
        for handle, value in step.fills:
            if pending:
                _wait(pending)
            fill(handle, values[value])
        for value in step.frees:
            values[value] = None
    _wait(pending)


def _works_of(out: Any) -> list[Any]:
    """Return what is to be waited for among an op's results: `Work.wait` is no op, so no tape has it."""
    found = out if isinstance(out, (tuple, list)) else (out,)
    return [one for one in found if isinstance(one, torch.ScriptObject) and hasattr(one, "wait")]


def _wait(works: list[Any]) -> None:
    while works:
        works.pop(0).wait()


def _made(kind: Any, rest: Any, reads: list[Any]) -> Tensor:
    """Make what came about unseen in the forward; see Note [The tape]."""
    if kind is ALIAS:
        return _alias(reads[0], rest[0])
    if kind is PART:
        part = wrapped_parts(reads[0])[rest[0]]
        return part if metadata(part) == rest[1] else _alias(part, rest[1])
    assert kind is WRAP
    cls, names, context, size, stride = rest
    made: Tensor = cls.__tensor_unflatten__(dict(zip(names, reads, strict=True)), context, size, stride)
    return made


def _alias(tensor: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    *_, dtype = geometry
    found: Tensor = torch.empty(0, dtype=dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), *_place(geometry))
