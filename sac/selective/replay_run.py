"""Runs the steps of a replay, below autograd and without the region's Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sac.region.detach import copy_of, detached
from sac.region.parking import fetch
from sac.region.states.rng_trackers import state_of
from sac.region.storages import version_of
from sac.selective.autocast import as_then
from sac.selective.replay_plan import ReplayPlan
from sac.selective.table import Plan
from sac.selective.tape import Tape
from sac.selective.tape_entries import ALIAS, CAST, HOLE, PART, WRAP, from_reads
from sac.selective.tensors import layout_key, storage_address, storage_bytes, tensors_of, wrapped_parts

# In forward the ops of a tape ran inside a dispatch mode: below autograd and autocast. These guards are private to
# torch (2.11 to 2.13); without them replay is not used.
_BELOW_AUTOGRAD: Any = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
_NO_AUTOCAST: Any = getattr(torch._C, "_DisableAutocast", None)
CAN_REPLAY = _BELOW_AUTOGRAD is not None and _NO_AUTOCAST is not None

Fill = Callable[[int, Tensor], None]


class CannotReplay(Exception):  # noqa: N818 (it is no error: the region's Python runs instead)
    """A value that replay starts from is not there any more; the text says which."""


class ExternalChangeError(Exception):
    """A tensor from outside was written to after the forward; holds the tensor and the version of the forward."""

    def __init__(self, tensor: Tensor, version: int) -> None:
        super().__init__()
        self.tensor, self.version = tensor, version


Before = dict[int, torch.UntypedStorage]


def run_plan(plan: ReplayPlan, tape: Tape, inputs: dict[int, Tensor], before: Before, fill: Fill) -> None:
    """Run the steps of ``plan``; ``fill`` is given each waiting handle's number with its tensor.

    ``inputs`` are the region's, by position; ``before``: what lay in tensors from outside that were written to since,
    by the address of their storage. Raises ``CannotReplay`` and ``ExternalChangeError``, before any op runs.
    """
    values: list[Any] = [None] * len(tape.roots)
    for value in plan.kept:  # above autograd: to fetch one may be to run an outer region again
        values[value] = fetch(tape.kept[value])
    generators = {id(g): g for step in plan.steps for g, _ in tape.states.get(step.number, ())}
    # Modes that are on see the ops, as in the handler of one; autograd and autocast do not.
    with torch.enable_grad(), _BELOW_AUTOGRAD(), _NO_AUTOCAST(), ExitStack() as stack:
        _load(plan, tape, inputs, before, values)
        for generator in generators.values():
            stack.callback(generator.set_state, state_of(generator))
        _run(plan, tape, values, fill)


def _load(plan: ReplayPlan, tape: Tape, inputs: dict[int, Tensor], before: Before, values: list[Any]) -> None:
    copies: dict[int, torch.UntypedStorage] = {}
    for value in plan.leaves:
        leaf = tape.leaves[value]
        if leaf.position >= 0:
            values[value] = detached(inputs[leaf.position])
            continue
        tensor = leaf.tensor()
        if tensor is None:
            raise CannotReplay("a tensor from outside that an op read is not there any more")
        address = storage_address(tensor)
        if address in before:
            if address not in copies:
                copies[address] = copy_of(before[address])
            values[value] = tensor.new_empty(0).set_(copies[address], *_place(layout_key(tensor)))
            continue
        if tape.roots[value] in tape.writers:
            raise CannotReplay("the data of a tensor that the region has written to is elsewhere now")
        if tensor.shape != leaf.shape or (not storage_bytes(tensor) and tensor.numel()):
            raise CannotReplay("the data of a parameter that an op read is elsewhere now")
        if not leaf.lasts and version_of(tensor) != leaf.version:
            raise ExternalChangeError(tensor, leaf.version)
        values[value] = tensor
    for value in plan.kept:
        if tape.roots[value] in plan.written:
            values[value] = values[value].clone()


def _place(geometry: tuple[Any, ...]) -> tuple[Any, ...]:
    shape, stride, offset, _ = geometry
    return offset, shape, stride


def _run(plan: ReplayPlan, tape: Tape, values: list[Any], fill: Fill) -> None:
    for handle, value in plan.fills:
        fill(handle, values[value])
    rests, states, keywords = tape.rests, tape.states, tape.keywords
    works: list[Any] = []  # of point-to-point calls, of which several have to be under way at once
    for number, run, places, result, fills, frees in plan.orders or _orders(plan, tape):
        if result < 0 or works or number in states:
            _run_unusual(plan, tape, number, values, works)
        else:
            args = [*rests[number]]
            for place, value in places:
                if args[place] is not HOLE:  # a number stands where another call of this program had a tensor
                    args = _arguments(rests[number], tape.reads[number], values)
                    break
                args[place] = values[value]
            values[result] = run(*args, **keywords[number]) if number in keywords else run(*args)
        for handle, value in fills:
            fill(handle, values[value])
        for value in frees:
            values[value] = None
    _wait(works)


def _orders(plan: ReplayPlan, tape: Tape) -> list[Any]:
    """Return the steps in the form in which they are run; calls with the same plan share it.

    Of a usual step: its number, what to call, where its tensors stand among the arguments, the number of its result,
    and what to do after it. The result is -1 where there is more to it; see ``_run_unusual``.
    """
    plan.orders = []
    plan.steps_by_number = {step.number: step for step in plan.steps}
    for step in plan.steps:
        number = step.number
        op, rest = tape.plans[number], tape.rests[number]
        result = -1
        places: tuple[tuple[int, int], ...] = ()
        if type(op) is Plan and op.is_usual and not op.traits.takes_optional and tape.counts.get(number, 1) == 1:
            holes = [place for place, one in enumerate(rest) if one is HOLE]
            places = tuple(zip(holes, tape.reads[number], strict=True))
            result = step.outputs[0][1] if step.outputs else -1
        plan.orders.append((number, getattr(op, "run", None), places, result, step.fills, step.frees))
    return plan.orders


def _run_unusual(plan: ReplayPlan, tape: Tape, number: int, values: list[Any], works: list[Any]) -> None:
    """Run a step with several results or none, with tensors inside arguments, random numbers, ranks to wait for, …"""
    op, rest, reads = tape.plans[number], tape.rests[number], tape.reads[number]
    if type(op) is not Plan:
        out = _made(op, rest, [values[read] for read in reads])
    else:
        if works and op.op.namespace != "c10d":
            _wait(works)
        for generator, state in tape.states.get(number, ()):
            generator.set_state(state)
        keywords = tape.keywords.get(number, {})
        if op.flat:
            args = _arguments(rest, reads, values)
        else:
            args, keywords = from_reads(rest, values), from_reads(keywords, values)
        if op.own_body:
            with as_then(tape.guards.get(number)):
                out = op.op(*args, **keywords)
        else:
            out = op.run(*args, **keywords)
        if op.is_collective and op.op.namespace == "c10d":
            works.extend(_works_of(out))
            if plan.steps_by_number[number].fills:
                _wait(works)
    made = [out] if isinstance(out, Tensor) else tensors_of(out)
    for place, value in plan.steps_by_number[number].outputs:
        values[value] = made[place]


def _arguments(rest: Sequence[Any], reads: Sequence[int], values: list[Any]) -> list[Any]:
    left = iter(reads)
    return [values[next(left)] if one is HOLE else one for one in rest]


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
    if kind is CAST:
        cast: Tensor = reads[0].to(rest[0])
        return cast
    if kind is PART:
        part = wrapped_parts(reads[0])[rest[0]]
        return part if layout_key(part) == rest[1] else _alias(part, rest[1])
    assert kind is WRAP
    cls, inside, context, size, stride = rest
    left = iter(reads)
    held = {name: next(left) if value is HOLE else value for name, value in inside}
    made: Tensor = cls.__tensor_unflatten__(held, context, size, stride)
    return made


def _alias(tensor: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    *_, dtype = geometry
    found: Tensor = torch.empty(0, dtype=dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), *_place(geometry))
