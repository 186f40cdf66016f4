"""Replay: run the entries of a schedule below autograd, starting from kept values and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from sac.engine.flags import as_then
from sac.engine.functions import differs, run_unit
from sac.engine.rng import set_states, states_of
from sac.engine.schedule import Schedule, UnobtainableError, schedule_replay
from sac.engine.tape import CannotReplayError, DiffersError, Tape, from_refs
from sac.outer_hooks import fetch, is_written
from sac.tensors import copy_of, is_wrapper, placed_on, storage_bytes, tensors_of
from sac.torch_private import BelowAutograd, WithoutAutocast

_LET_GO = "a tensor from outside is needed that the replay of all values does not need"


class ChangedError(Exception):
    """The leaf of this value was changed in place after the forward, and nothing holds its earlier contents."""


def replay(tape: Tape, schedule: Schedule, wanted: list[tuple[int, int, int]]) -> Iterator[tuple[int, Tensor]]:
    """Run ``schedule``, which fills ``wanted``; yield each handle's index with its value."""
    schedule = _with_changes(tape, schedule, wanted)
    if any(states is None and entry in schedule.running for entry, states in tape.states.items()):
        raise CannotReplayError("an op would draw again whose random state was let go of")
    values = _start(tape, schedule)
    drawing = {id(generator): generator for states in tape.states.values() for generator, _ in states or ()}
    works: list[Any] = []  # of collectives that have not ended
    sites, units = tape.sites, tape.units
    with ExitStack() as stack, torch.no_grad(), ExitStack() as guards:
        stack.callback(set_states, states_of(drawing.values()))
        _go_below_autograd(guards)
        for fill in schedule.first:
            yield _filled(values, fill)
        for entry, fills, drops in schedule.steps:
            site = sites[entry]
            if site.is_ordinary:
                if works:
                    _wait(works)
                _run(tape, entry, site, values)
            elif entry in units:
                _wait(works)
                guards.close()  # it runs as in forward: with autograd and autocast
                run_unit(tape, entry, values)
                if not tape.differing:  # what reads its results differs, too
                    unneeded = {*drops} - {value for _, value, _ in fills}
                    tape.differing = [entry] if differs(tape, entry, values, unneeded) else []
                _go_below_autograd(guards)
            else:
                is_async = site.is_collective and getattr(site.op, "namespace", "") == "c10d"
                if not is_async:
                    _wait(works)
                out = _run(tape, entry, site, values)
                if is_async:
                    works += tensors_of(out, torch.ScriptObject)
            if fills:
                _wait(works)
                for fill in fills:
                    yield _filled(values, fill)
            for value in drops:
                values[value] = None
        _wait(works)


def _wait(works: list[Any]) -> None:
    # `Work.wait` is no op. Sends and receives must be in flight together, so collectives in a row are waited for at
    # their end.
    while works:
        works.pop(0).wait()


def _go_below_autograd(guards: ExitStack) -> None:
    guards.enter_context(BelowAutograd())
    guards.enter_context(WithoutAutocast())


def _with_changes(tape: Tape, schedule: Schedule, wanted: list[tuple[int, int, int]]) -> Schedule:
    """Return a schedule that does not start from what was written to later; raise ``ChangedError`` if none."""
    remade: set[int] = set()
    while changed := _changed(tape, schedule):
        roots = {tape.roots[value] for value in changed}
        try:
            if roots <= remade:
                raise UnobtainableError
            remade |= roots
            schedule = schedule_replay(tape, wanted, remade)
        except UnobtainableError:
            leaf = tape.leaves.get(changed[0])
            if leaf is not None and leaf.tensor is None:
                raise CannotReplayError(_LET_GO) from None
            raise ChangedError(changed[0]) from None
    return schedule


def _changed(tape: Tape, schedule: Schedule) -> list[int]:
    """Return the values to start from that were written to after the forward."""
    changed = []
    for value in schedule.leaves:
        leaf = tape.leaves[value]
        if leaf.tensor is None:  # let go of, since the schedule of the forward did not need it
            changed.append(value)
        if is_written(leaf.tensor, leaf.version) and value not in schedule.copied:
            changed.append(value)
    return [*changed, *(value for value in schedule.kept if tape.is_written_since(value))]


def _start(tape: Tape, schedule: Schedule) -> dict[int, Any]:
    """Return the tensors that the schedule starts from, by value."""
    values: dict[int, Any] = {value: fetch(tape.kept[value]) for value in schedule.kept}
    copies: dict[int, Any] = {}
    for value in schedule.leaves:
        leaf = tape.leaves[value]
        tensor = fetch(leaf.tensor)
        # FSDP frees a parameter between forward and backward, and gathers it into other memory, as ZeRO-3 does.
        is_freed = leaf.is_parameter and not is_wrapper(tensor) and storage_bytes(tensor) == 0 < tensor.numel()
        if tensor.shape != leaf.shape or is_freed:
            raise CannotReplayError("the data of a parameter that an op read has moved")
        if value in schedule.copied:
            root = tape.roots[value]
            if root not in copies:
                copies[root] = copy_of(tape.before[root][1])
            tensor = placed_on(copies[root], tensor.detach())
        values[value] = tensor
    return values


def _filled(values: dict[int, Any], fill: tuple[int, int, bool]) -> tuple[int, Tensor]:
    handle, value, is_written_later = fill
    return handle, values[value].clone() if is_written_later else values[value]


def _run(tape: Tape, entry: int, site: Any, values: dict[int, Any]) -> Any:
    args, kwargs = tape.args[entry], tape.kwargs.get(entry)
    if type(args) is tuple:
        args = *map(values.__getitem__, tape.reads[entry]), *args
    else:
        args, kwargs = from_refs(args, values), kwargs and from_refs(kwargs, values)
    if site.is_ordinary:  # it neither draws nor writes, and is not of a library
        run = site.run if has_torch_function(args) else site.bound
        out = run(*args, **kwargs) if kwargs else run(*args)
        if isinstance(out, Tensor):
            values[tape.firsts[entry]] = out
            return out
    else:
        out = _run_special(tape, entry, site, args, kwargs or {})
    if count := tape.counts.get(entry, 1):
        results = tensors_of(out)
        if len(results) != count:
            found = f"{site.op} returned {count} tensors in forward and {len(results)} in its replay"
            raise DiffersError(found)
        values.update(zip(tape.results(entry), results, strict=True))
    return out


def _run_special(tape: Tape, entry: int, site: Any, args: Any, kwargs: Any) -> Any:
    if site.is_inplace_view:
        args[0] = args[0].detach()
    if states := tape.states.get(entry):
        set_states(states)
    if site.is_custom_op:
        with as_then(tape.autocast[entry]):
            return site.op(*args, **kwargs)
    return site.run(*args, **kwargs)
