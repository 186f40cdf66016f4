"""Replay: run the entries of a schedule below autograd, starting from kept values and leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sac.engine.functions import run_unit
from sac.engine.schedule import Schedule, Unobtainable, schedule_replay
from sac.engine.tape import HOLE, Tape, from_refs
from sac.outer_hooks import fetch
from sac.recompute.autocast import as_then
from sac.tensors import copy_of, is_wrapper, placed_on, tensors_of, version_of
from sac.torch_private import BelowAutograd, WithoutAutocast


class CannotReplay(Exception):
    """This call cannot be replayed; the text says why."""


class Changed(Exception):
    """A tensor from outside was changed in place after the forward, and nothing holds its earlier contents."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor = tensor


def replay(tape: Tape, schedule: Schedule, wanted: list[tuple[int, int, int]]) -> Iterator[tuple[int, Tensor]]:
    """Run ``schedule``, which fills ``wanted``; yield each handle's index with its value."""
    changed = _changed(tape, schedule)
    if changed:
        try:
            schedule = schedule_replay(tape, wanted, {tape.roots[value] for value in changed})
        except Unobtainable:
            raise Changed(fetch(tape.leaves[changed[0]].tensor)) from None
        again = [value for value in _changed(tape, schedule) if value not in schedule.copied]
        if again:
            raise Changed(fetch(tape.leaves[again[0]].tensor))
    values: dict[int, Any] = {value: fetch(tape.kept[value]) for value in schedule.kept}
    copies: dict[int, Any] = {}
    for value in schedule.leaves:
        leaf = tape.leaves[value]
        tensor = fetch(leaf.tensor)
        if tensor.shape != leaf.shape or (leaf.is_parameter and not is_there(tensor)):
            raise CannotReplay("a parameter's data has moved")  # FSDP1 and ZeRO-3 gather it into other memory
        if value in schedule.copied:
            root = tape.roots[value]
            if root not in copies:
                copies[root] = copy_of(tape.before[root][1])
            tensor = placed_on(copies[root], tensor.detach())
        values[value] = tensor
    with _generators_kept(tape), torch.no_grad():
        below, without = BelowAutograd(), WithoutAutocast()
        try:
            for fill in schedule.first:
                yield _filled(values, fill)
            for entry, fills, drops in schedule.steps:
                if entry in tape.units:
                    below = without = None  # it runs as in forward: with autograd and autocast
                    run_unit(tape, entry, values)
                    below, without = BelowAutograd(), WithoutAutocast()
                else:
                    _run(tape, entry, values)
                for fill in fills:
                    yield _filled(values, fill)
                for value in drops:
                    values.pop(value, None)
        finally:
            del below, without


def is_there(tensor: Tensor) -> bool:
    """Return whether a parameter has its data; FSDP frees it between forward and backward."""
    return is_wrapper(tensor) or tensor.untyped_storage().nbytes() > 0 or tensor.numel() == 0


def _filled(values: dict[int, Any], fill: tuple[int, int, bool]) -> tuple[int, Tensor]:
    handle, value, is_written_later = fill
    return handle, values[value].clone() if is_written_later else values[value]


def _run(tape: Tape, entry: int, values: dict[int, Any]) -> None:
    site, args, kwargs = tape.sites[entry], tape.args[entry], tape.kwargs.get(entry)
    if site.is_flat:
        reads = iter(tape.reads[entry])
        args = [values[next(reads)] if one is HOLE else one for one in args]
    else:
        args, kwargs = from_refs(args, values), from_refs(kwargs, values)
    if site.is_inplace_view:
        args[0] = args[0].detach()
    for generator, state in tape.states.get(entry, ()):
        generator.set_state(state)
    if site.is_custom_op:
        with as_then(tape.autocast[entry]):
            out = site.op(*args, **(kwargs or {}))
    else:
        out = site.run(*args, **kwargs) if kwargs else site.run(*args)
    count = tape.counts.get(entry, 1)
    if count == 1 and isinstance(out, Tensor):
        values[tape.firsts[entry]] = out
    elif count:
        found = tensors_of(out)
        if len(found) != count:
            raise CannotReplay(f"{site.op} returned {count} tensors in forward and {len(found)} in its replay")
        values.update(zip(tape.results(entry), found))


def _changed(tape: Tape, schedule: Schedule) -> list[int]:
    """Return the values to start from that were written to after the forward."""
    found = []
    for value in schedule.leaves:
        leaf = tape.leaves[value]
        if isinstance(leaf.tensor, Tensor) and version_of(leaf.tensor) != leaf.version and value not in schedule.copied:
            found.append(value)
    for value in schedule.kept:
        kept = tape.kept[value]
        if isinstance(kept, Tensor) and version_of(kept) != tape.kept_versions[value]:
            found.append(value)
    return found


@contextmanager
def _generators_kept(tape: Tape) -> Iterator[None]:
    if not tape.states:
        yield
        return
    found = {id(one): one for states in tape.states.values() for one, _ in states}
    states = [(one, one.get_state()) for one in found.values()]
    try:
        yield
    finally:
        for one, state in states:
            one.set_state(state)
