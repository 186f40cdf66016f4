"""Rerun: run the region's Python again, and serve it the results that the forward kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sac.checksums import find_different, sums_of
from sac.engine.handles import OTHER, OTHER_FIX, Handle
from sac.engine.recorder import metadata_of
from sac.engine.rng import set_states
from sac.engine.settings import Settings
from sac.engine.table import CallSite, module_name, run_op, site_name
from sac.engine.tape import Ref, Tape, from_refs
from sac.engine.tracker import RegionMode
from sac.errors import Problem, RegionError
from sac.outer_hooks import fetch
from sac.tensors import cloned, describe, detached, storage_address, tensors_of


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
    if any(handle.value is None for handle in waiting.values()) or (not stops and count > total):
        found = f"it saved {count} tensors in recomputation, and {total} in forward: {OTHER}"
        raise RegionError(Problem(where, found, fix=OTHER_FIX))


class Served(RegionMode):
    """The mode of a rerun: serves the results that the tape holds.

    ``entries`` and ``path``: those of a unit, if it is what runs again. A call is that of the forward with the same
    module, op and parameters, and the same number among these.
    """

    def __init__(self, tape: Tape, entries: Iterable[int] | None = None, path: str = "") -> None:
        super().__init__(tape.table)
        self.is_over = False
        self._tape, self.path, self.sites = tape, path, tape.table.sites_of(path)
        self._addresses = {address: root for address, root in tape.leaf_roots.items() if tape.leaves[root].is_parameter}
        self._entries: dict[Any, list[int]] = defaultdict(list)  # the calls of the forward
        self._calls: dict[Any, int] = defaultdict(int)
        self._fetched: dict[int, Tensor] = {}  # a checkpoint around the region gives each value out once
        for entry in range(len(tape.sites)) if entries is None else entries:
            site = tape.sites[entry]
            if site.may_save and not _is_cast(site):
                roots = (tape.roots[value] for value in tape.reads[entry])
                parameters = (root for root in roots if root in tape.leaves and tape.leaves[root].is_parameter)
                key = (site.path, id(site.op), *parameters)
                self._entries[key].append(entry)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or return what it returned in forward."""
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path, self.unit_rule)
        kwargs = kwargs or {}
        if self.is_over:
            if site.writes or site.is_view:  # it may fill what autograd has just saved
                run_op(site, args, kwargs)
            raise _Done
        if not site.may_save or _is_cast(site):
            return run_op(site, args, kwargs)
        roots = [self._addresses.get(storage_address(tensor)) for tensor in tensors_of(args)]
        key = (site.path, id(func), *(root for root in roots if root is not None))
        number, entries = self._calls[key], self._entries.get(key)
        self._calls[key] = number + 1
        if entries is None:
            return run_op(site, args, kwargs)
        if number >= len(entries):
            found = f"{site_name(site)} in {module_name(site.path)} runs more often than in forward: {OTHER}"
            raise RegionError(Problem(self._tape.where, found, fix=OTHER_FIX))
        entry = entries[number]
        return self._serve(site, number, entry, args) if self._is_intact(entry) else run_op(site, args, kwargs)

    def _is_intact(self, entry: int) -> bool:
        """Return whether the tape has all results of ``entry``, and nothing has written to them."""
        tape = self._tape
        values = tape.results(entry)
        if not values or any(value not in tape.kept or tape.last_write(value) >= 0 for value in values):
            return False
        if any(tape.is_written_since(value) for value in values):
            return False
        if entry not in tape.sums or tape.has_collectives:
            return True
        results = [self._fetch(value) for value in values]
        return not find_different([(tape.sums[entry], sums_of(results))])

    def _fetch(self, value: int) -> Tensor:
        if value not in self._fetched:
            self._fetched[value] = fetch(self._tape.kept[value])
        return self._fetched[value]

    def _serve(self, site: CallSite, number: int, entry: int, args: Any) -> Any:
        tape = self._tape
        if (then := tape.metadata[entry]) != (now := metadata_of(args)):
            found = f"call {number} of {site_name(site)} in {module_name(site.path)} ran in forward with {_texts(then)}"
            found += f" and in recomputation with {_texts(now)}: {OTHER}"
            raise RegionError(Problem(self._tape.where, found, fix=OTHER_FIX))
        set_states(tape.after.get(entry, []))
        results = {value: detached(self._fetch(value)) for value in tape.results(entry)}
        return from_refs(tape.returned.get(entry, Ref(tape.firsts[entry])), results)


def _texts(metadata: Sequence[Any]) -> str:
    return f"({', '.join(describe(torch.empty(shape, dtype=dtype, device='meta')) for shape, dtype in metadata)})"


def _is_cast(site: CallSite) -> bool:
    """Return whether an op may be a cast by autocast, which has some in its cache in one pass and not in the other."""
    return site.op is torch.ops.aten._to_copy.default
