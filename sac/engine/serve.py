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
from sac.engine.tape import Tape
from sac.engine.tracker import RegionMode
from sac.errors import Problem, RegionError
from sac.outer_hooks import fetch
from sac.recompute.table import CallSite, run_op, site_name
from sac.region.settings import Settings
from sac.tensors import cloned, detached, storage_address, tensors_of


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
) -> None:
    """Run ``function`` again and fill the handles ``waiting``; the i-th saved tensor belongs to the i-th handle."""
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
            if mode is None:
                raise _Done
            mode.is_over = True
        return held

    try:
        with torch.enable_grad(), saved_tensors_hooks(pack, lambda held: held), mode or nullcontext():
            function(*args, **kwargs)
    except _Done:
        return
    if any(handle.value is None for handle in waiting.values()):
        found = f"it saved {count} tensors in recomputation, and at least {last + 1} in forward: {OTHER}"
        raise RegionError(Problem(where, found, fix=OTHER_FIX))


class Served(RegionMode):
    """The mode of a rerun: serves the results that the tape holds by (module, op, parameters read, n-th call)."""

    def __init__(self, tape: Tape, where: str) -> None:
        super().__init__(tape.table)
        self.is_over = False
        self._tape, self._where = tape, where
        self._calls: dict[Any, int] = defaultdict(int)
        self._addresses = {address: root for address, root in tape.leaf_roots.items() if tape.leaves[root].is_parameter}
        self._counts: dict[Any, int] = defaultdict(int)
        self._served = {key: entry for key, entry in self._numbered() if self._is_intact(entry)}

    def _numbered(self) -> Iterator[tuple[Any, int]]:
        """Yield the key and the entry of each call whose result may be saved; count the calls of each key."""
        tape = self._tape
        for entry, site in enumerate(tape.sites):
            if not site.may_save or _is_cast(site):
                continue
            roots = (tape.roots[value] for value in tape.reads[entry])
            key = (id(site), *(root for root in roots if root in tape.leaves and tape.leaves[root].is_parameter))
            yield (*key, self._counts[key]), entry
            self._counts[key] += 1

    def _is_intact(self, entry: int) -> bool:
        """Return whether the tape has all results of ``entry``, and nothing has written to them."""
        tape = self._tape
        values = tape.results(entry)
        if not values or any(value not in tape.kept or tape.is_written(value) for value in values):
            return False
        if entry not in tape.sums or tape.has_collectives:
            return True
        results = [fetch(tape.kept[value]) for value in values]
        return not find_different([(tape.sums[entry], sums_of(results))])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, or return what it returned in forward."""
        site = self.sites.get(id(func))
        if site is None:
            site = self.table.add_site(func, self.path)
        kwargs = kwargs or {}
        if self.is_over:
            if site.writes or site.is_view:  # it may fill what autograd has just saved
                run_op(site, args, kwargs)
            raise _Done
        if not site.may_save or _is_cast(site):
            return run_op(site, args, kwargs)
        roots = (self._addresses.get(storage_address(tensor)) for tensor in tensors_of(args))
        key = (id(site), *(root for root in roots if root is not None))
        number = self._calls[key]
        self._calls[key] = number + 1
        if self._counts and number >= self._counts.get(key, number + 1):
            self._refuse(site, "runs more often than in forward")
        entry = self._served.get((*key, number))
        return run_op(site, args, kwargs) if entry is None else self._serve(site, entry, args)

    def _serve(self, site: CallSite, entry: int, args: Any) -> Any:
        tape = self._tape
        if tape.metadata[entry] != metadata_of(args):
            self._refuse(site, "reads other shapes in recomputation")
        for generator, state in tape.after.get(entry, ()):
            generator.set_state(state)
        results = [detached(fetch(tape.kept[value])) for value in tape.results(entry)]
        if tape.counts.get(entry, 1) == 1 and not tape.is_list(entry):
            return results[0]
        return tuple(results)

    def _refuse(self, site: CallSite, what: str) -> None:
        module = f"module {site.path}" if site.path else "its own forward"
        found = f"{site_name(site)} in {module} {what}: {OTHER}"
        raise RegionError(Problem(self._where, found, fix=OTHER_FIX))


def _is_cast(site: CallSite) -> bool:
    """Return whether an op may be a cast by autocast, which has some in its cache in one pass and not in the other."""
    return site.op is torch.ops.aten._to_copy.default
