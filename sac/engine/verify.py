"""Whether recomputed values are those of the forward."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sac.checksums import checksum, find_different
from sac.engine.tape import Tape
from sac.engine.wrappers import is_in_flight
from sac.tensors import describe, tensors_of

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


def nondeterministic_on(device: torch.device) -> frozenset[str]:
    """Return the names of such ops without the in-place underscore; none if all kernels on ``device`` repeat."""
    if device.type == "cpu" or torch.are_deterministic_algorithms_enabled():
        return frozenset()
    return _ADDED_IN_ANY_ORDER


def may_differ(tape: Tape, values: Iterable[int], device: torch.device) -> bool:
    """Return whether an op that is nondeterministic on ``device`` contributed to one of ``values``."""
    names = nondeterministic_on(device)
    if not names:
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
            if schema is not None and str(schema.name).removesuffix("_") in names:
                return True
            more = set(tape.reads[entry]) - known
            known |= more
            waiting += more
    return False


def sums_of_arguments(args: Any, is_parameter: Sequence[bool]) -> tuple[Any, ...]:
    """Return the checksums of the tensors among the arguments of a call, None for parameters and what has not come."""
    pairs = zip(tensors_of(args), is_parameter, strict=False)
    return tuple(None if skips or is_in_flight(tensor) else checksum(tensor) for tensor, skips in pairs)


def same_sums(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Return whether the arguments of two calls are equal."""
    pairs = [(one, other) for one, other in zip(left, right, strict=False) if one is not None and other is not None]
    return not find_different(pairs)


def described(metadata: Sequence[Any], sums: Sequence[Any]) -> str:
    """Return shapes and dtypes of the tensor arguments of a call, and four digits that tell their values apart."""
    texts = []
    for (shape, dtype), total in zip(metadata, sums, strict=False):
        numbers = [part.tolist() if isinstance(part, Tensor) else part for part in total or ()]
        value = f" value {zlib.crc32(repr(numbers).encode()) & 0xFFFF:04x}" if total else ""
        texts.append(f"{describe(torch.empty(shape, dtype=dtype, device='meta'))}{value}")
    return f"({', '.join(texts)})"
