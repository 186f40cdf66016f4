"""Rerun: run the region's Python again, and serve it the results that the forward kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sac.checksums import find_different, sums_of
from sac.engine.handles import OTHER, OTHER_FIX, Handle
from sac.engine.recorder import metadata_of
from sac.engine.settings import Settings
from sac.engine.table import CallSite, module_name, run_op, site_name
from sac.engine.tape import HOLE, Ref, Tape
from sac.engine.tracker import RegionMode
from sac.engine.verify import described, may_differ, same_sums, sums_of_arguments
from sac.errors import Problem, RegionError
from sac.outer_hooks import fetch
from sac.tensors import cloned, describe, detached, storage_address, tensors_of

_OTHER_TENSORS = (
    "the region computed with other tensors than in forward, or in another order: do not exchange between forward and "
    "backward what it uses (data of a weight, attributes, globals), or pass it as an argument"
)


class _Done(Exception):  # noqa: N818
    """Backward has all that it needs."""


def rerun(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    waiting: dict[int, Handle],
    where: str,
    settings: Settings,
    mode: Served | None,
    *,
    stops: bool,
    total: int,
    fills: Callable[[], bool],
) -> None:
    """Run ``function`` again and fill the handles ``waiting``; the i-th saved tensor belongs to the i-th handle.

    ``stops``: whether it ends with the last of them, or if the op that saves it ``fills`` it, with that op. ``total``:
    how many tensors the forward saved.
    """
    last, count, is_over = max(waiting), 0, False

    def pack(tensor: Tensor) -> Any:
        nonlocal count, is_over
        handle, index = waiting.get(count), count
        count += 1
        if is_over and mode is None and stops:
            raise _Done
        held = detached(tensor)  # without its graph, of which this may be the result
        if handle is not None:
            if mode is not None:
                mode.expect(handle, tensor)
            own = cloned(held) if handle.is_written_later else held
            handle.fill(own, where, checks=settings.checks_metadata)
        if index == last and stops:
            is_over = True
            if mode is not None:
                mode.is_over = True
            elif not fills():
                raise _Done
        return held

    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held), mode or nullcontext():
            function(*args, **kwargs)
    except _Done:
        pass
    if mode is not None:
        mode.check()
    if any(handle.value is None for handle in waiting.values()) or (not stops and count > total):
        found = f"it saved {count} tensors in recomputation, and {total} in forward: {OTHER}"
        raise RegionError(Problem(where, found, fix=OTHER_FIX))


class Served(RegionMode):
    """The mode of a rerun: serves the results that the tape holds.

    A call is that of the forward with the same module, op, parameters and constants, and the same number among these.
    If the forward took checksums of the arguments, they must be equal too, or the call is looked for among the others:
    the region may run its ops in another order.
    """

    def __init__(self, tape: Tape, where: str, tell: Callable[[int, str, str], None]) -> None:
        """``tell``: is passed the entry of a call whose arguments differ, what was found, and a fix; it may raise."""
        super().__init__(tape.table)
        self.is_over, self._tell = False, tell
        self._tape, self._where = tape, where
        self._calls: dict[Any, int] = defaultdict(int)
        self._addresses = {address: root for address, root in tape.leaf_roots.items() if tape.leaves[root].is_parameter}
        self._counts: dict[Any, int] = defaultdict(int)
        self._waiting: dict[Any, dict[int, int]] = defaultdict(dict)  # key -> number of a call -> its entry
        self._others: dict[Any, str] = {}  # key -> arguments of a call that is none of the forward's
        self._fetched: dict[int, Tensor] = {}  # a checkpoint around the region gives each value out once
        for entry, site in enumerate(tape.sites):
            if site.may_save and not _is_cast(site):
                self._note(entry, site)

    def _note(self, entry: int, site: CallSite) -> None:
        """Count a call of the forward; its results are served if the tape has them."""
        tape = self._tape
        roots = (tape.roots[value] for value in tape.reads[entry])
        parameters = (root for root in roots if root in tape.leaves and tape.leaves[root].is_parameter)
        key = (id(site), *parameters, _constants(tape.args[entry], tape.kwargs.get(entry)))
        if self._is_intact(entry):
            self._waiting[key][self._counts[key]] = entry
        self._counts[key] += 1

    def _is_intact(self, entry: int) -> bool:
        """Return whether the tape has all results of ``entry``, and nothing has written to them."""
        tape = self._tape
        values = tape.results(entry)
        if not values or any(value not in tape.kept or tape.is_written(value) for value in values):
            return False
        if any(tape.is_written_since(value) for value in values):
            return False
        if entry not in tape.sums or tape.has_collectives:
            return True
        results = [self._fetch(value) for value in values]
        return not find_different([(tape.sums[entry], sums_of(results))])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or return what it returned in forward."""
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path, self.decided_by)
        kwargs = kwargs or {}
        if self.is_over:
            if site.writes or site.is_view:  # it may fill what autograd has just saved
                run_op(site, args, kwargs)
            raise _Done
        if not site.may_save or _is_cast(site):
            return run_op(site, args, kwargs)
        roots = [self._addresses.get(storage_address(tensor)) for tensor in tensors_of(args)]
        key = (id(site), *(root for root in roots if root is not None), _constants(args, kwargs))
        number = self._calls[key]
        self._calls[key] = number + 1
        if self._counts and number >= self._counts.get(key, number + 1):
            self._refuse(site, "runs more often than in forward")
        entry = self._entry(key, number, args, [root is not None for root in roots])
        return run_op(site, args, kwargs) if entry is None else self._serve(site, entry, args)

    def _entry(self, key: Any, number: int, args: Any, is_parameter: list[bool]) -> int | None:
        """Return the entry of which a call is the repetition, None if it has to run."""
        tape, waiting = self._tape, self._waiting.get(key)
        if not waiting:
            return None
        entry = waiting.pop(number, None)
        if (entry is None and key not in self._others) or (entry is not None and entry not in tape.argument_sums):
            return entry
        sums = sums_of_arguments(args, is_parameter)
        if entry is not None:
            device = tensors_of(args)[0].device if is_parameter else torch.device("cpu")
            is_same = same_sums(tape.argument_sums[entry], sums)
            if is_same or may_differ(tape, tape.reads[entry], device):
                return entry
            waiting[number] = entry  # it may still come
            self._others[key] = described(metadata_of(args), sums)
        if any(same_sums(tape.argument_sums.get(later, ()), sums) for later in waiting.values()):
            # another order: the i-th tensor that autograd saves is not that of the forward
            _, found, fix = next(self._differences())
            raise RegionError(Problem(self._where, found, fix=fix))
        return None

    def _fetch(self, value: int) -> Tensor:
        if value not in self._fetched:
            self._fetched[value] = fetch(self._tape.kept[value])
        return self._fetched[value]

    def expect(self, handle: Handle, tensor: Tensor) -> None:
        """Raise if ``tensor``, which autograd saves, is another parameter or input than the one of ``handle``."""
        tape, (value, time) = self._tape, handle.position
        address = storage_address(tensor)
        root = tape.leaf_roots.get(address)
        if root is None or root == tape.roots[value] or tape.makers[tape.roots[value]] >= 0:
            return  # a parameter that the region itself gathers is a result of its ops, too
        leaf = tape.leaves[root].tensor
        if not isinstance(leaf, Tensor) or storage_address(leaf) != address:  # its memory was given back, and reused
            return
        site = tape.sites[min(time, len(tape.sites) - 1)]
        self._refuse(site, f"has saved another tensor in recomputation ({describe(tensor)})")

    def check(self) -> None:
        """Tell of a call that ran with other arguments than in the forward, if no later one had these."""
        if (difference := next(self._differences(), None)) is not None:
            self._tell(*difference)

    def _differences(self) -> Iterator[tuple[int, str, str]]:
        tape = self._tape
        for key, arguments in self._others.items():
            for number, entry in self._waiting[key].items():
                then = described(tape.metadata[entry], tape.argument_sums.get(entry, ()))
                site = tape.sites[entry]
                found = f"call {number} of {site_name(site)} in {module_name(site.path)} ran in forward with {then}"
                yield entry, f"{found} and in recomputation with {arguments}", _OTHER_TENSORS

    def _serve(self, site: CallSite, entry: int, args: Any) -> Any:
        tape = self._tape
        if tape.metadata[entry] != metadata_of(args):
            self._refuse(site, "reads other shapes in recomputation")
        for generator, state in tape.after.get(entry, ()):
            generator.set_state(state)
        results = [detached(self._fetch(value)) for value in tape.results(entry)]
        return tape.as_returned(entry, results)

    def _refuse(self, site: CallSite, what: str) -> None:
        found = f"{site_name(site)} in {module_name(site.path)} {what}: {OTHER}"
        raise RegionError(Problem(self._where, found, fix=OTHER_FIX))


def _constants(args: Any, kwargs: Any) -> str:
    """Return the arguments of a call that are no tensors: a text, since -1 and -2 have one hash, and 1 equals True."""
    return f"{_without_tensors(args)}{_without_tensors(kwargs or {})}"


def _without_tensors(argument: Any) -> Any:
    if argument is HOLE or isinstance(argument, (Tensor, Ref)):
        return "tensor"
    if isinstance(argument, (list, tuple)):
        return [_without_tensors(part) for part in argument]
    if isinstance(argument, dict):
        return {key: _without_tensors(part) for key, part in argument.items()}
    return repr(argument)


def _is_cast(site: CallSite) -> bool:
    """Return whether an op may be a cast by autocast, which has some in its cache in one pass and not in the other."""
    return site.op is torch.ops.aten._to_copy.default
