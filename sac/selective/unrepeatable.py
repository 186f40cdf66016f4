"""Ops that a device may answer differently each time, by the order in which its threads add: they are not compared."""

from __future__ import annotations

import torch

from sac.selective.tape import Tape

# What torch's list of nondeterministic kernels (`torch.use_deterministic_algorithms`, 2.13) holds of ops that a forward
# runs. CPU kernels repeat their bits. What another op makes of such a result differs with it.
_ADDED_IN_ANY_ORDER = frozenset(
    "aten::" + name
    for name in (
        *("index_add", "index_reduce", "index_put", "_unsafe_index_put", "_index_put_impl", "put", "cumsum"),
        *("scatter", "scatter_add", "scatter_reduce", "histc", "bincount", "_embedding_bag", "_sparse_mm", "sspaddmm"),
        "nll_loss2d_forward",
    )
)


def unrepeatable_on(device: torch.device) -> frozenset[str]:
    """Return the names of such ops, without the underscore of those that write in place; none where all repeat."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return frozenset()
    return _ADDED_IN_ANY_ORDER


def may_differ(tape: Tape, value: int, names: frozenset[str]) -> bool:
    """Return whether an op of these ``names`` has a part in what ``value`` is."""
    makers: dict[int, int] = {}  # value -> entry
    for entry, first in enumerate(tape.firsts):
        makers.update(dict.fromkeys(range(first, first + tape.counts.get(entry, 1)), entry))
    known = {value}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        entries = list(tape.writers.get(tape.roots[one], ()))
        if one in makers and one not in tape.kept:
            entries.append(makers[one])
        for entry in entries:
            if _name(tape.plans[entry]) in names:
                return True
            more = set(tape.reads[entry]) - known
            known |= more
            waiting += more
    return False


def _name(plan: object) -> str:
    schema = getattr(getattr(plan, "op", None), "_schema", None)
    return str(schema.name).removesuffix("_") if schema is not None else ""
