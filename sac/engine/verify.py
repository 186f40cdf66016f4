"""Whether recomputed values are those of the forward."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sac.engine.tape import Tape

# The ops that a forward can run from torch's list of nondeterministic kernels (`torch.use_deterministic_algorithms`,
# torch 2.13): they add in any order. CPU kernels are bitwise reproducible. A value computed from the result of such an
# op differs with it, and is not compared.
_ADDED_IN_ANY_ORDER = frozenset(
    "aten::" + name
    for name in (
        *("index_add", "index_reduce", "index_put", "_unsafe_index_put", "_index_put_impl", "put", "cumsum"),
        *("scatter", "scatter_add", "scatter_reduce", "histc", "bincount", "_embedding_bag", "_sparse_mm", "sspaddmm"),
        "nll_loss2d_forward",
    )
)


def may_differ(tape: Tape, values: Iterable[int], device: torch.device) -> bool:
    """Return whether an op that is nondeterministic on ``device`` contributed to one of ``values``."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return False
    waiting = [*values]
    known = {*waiting}
    while waiting:
        value = waiting.pop()
        entries = [*tape.writers.get(tape.roots[value], ())]
        if tape.makers[value] >= 0 and value not in tape.kept:
            entries.append(tape.makers[value])
        for entry in entries:
            schema = getattr(tape.sites[entry].op, "_schema", None)
            if schema is not None and str(schema.name).removesuffix("_") in _ADDED_IN_ANY_ORDER:
                return True
            more = set(tape.reads[entry]) - known
            known |= more
            waiting += more
    return False
