"""Covering arrays: of the product of some axes, rows in which every two values of two axes meet.

A defect mostly shows where two settings meet; a third only decides in which of them. A test of four axes of five values
has 625 rows, and 25 to 40 of them hold every pair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Axis = Iterable[Any]
Pair = tuple[tuple[int, int], tuple[int, int]]  # (axis, place of the value) of each


def rows_of_pairs(*axes: Axis, unless: Callable[..., bool] = lambda *values: False) -> list[tuple[Any, ...]]:
    """Rows of the product of the axes without those that `unless` names; each pair that a row of it can hold is in one.

    The rows are the same in every process and every run.
    """
    values = [list(axis) for axis in axes]
    legal = [
        row
        for row in product(*(range(len(axis)) for axis in values))
        if not unless(*(axis[place] for axis, place in zip(values, row, strict=True)))
    ]
    pairs_of = {row: frozenset(combinations(enumerate(row), 2)) for row in legal}
    left: set[Pair] = set().union(*pairs_of.values()) if legal else set()
    chosen = []
    gains = {row: len(pairs) for row, pairs in pairs_of.items()}  # as of when they were last counted: they only shrink
    while left:
        best = _best(pairs_of, gains, left)
        left -= pairs_of[best]
        chosen.append(best)
    return [tuple(axis[place] for axis, place in zip(values, row, strict=True)) for row in sorted(chosen)]


def _best(
    pairs_of: Mapping[tuple[int, ...], frozenset[Pair]], gains: dict[tuple[int, ...], int], left: set[Pair]
) -> tuple[int, ...]:
    """The first of the rows that cover most of what is left."""
    best: tuple[int, ...] = ()
    most = 0
    for row, limit in gains.items():
        if limit > most:
            gains[row] = count = len(pairs_of[row] & left)
            if count > most:
                best, most = row, count
    return best


def in_pairs(
    *, unless: Callable[..., bool] = lambda *values: False, ids: Callable[[Any], str] | None = None, **axes: Axis
) -> pytest.MarkDecorator:
    """Parametrize a test by the rows of these axes; a mapping stands for its values, under its keys' names."""
    named = [_named(axis, ids) for axis in axes.values()]
    contents = [dict(zip(axis, axis.values(), strict=True)) for axis in named]
    rows = rows_of_pairs(
        *named, unless=lambda *names: unless(*(axis[name] for axis, name in zip(contents, names, strict=True)))
    )
    params = [
        pytest.param(*(axis[name] for axis, name in zip(contents, row, strict=True)), id="-".join(row)) for row in rows
    ]
    return pytest.mark.parametrize(tuple(axes), params)


def _named(axis: Axis, ids: Callable[[Any], str] | None) -> dict[str, Any]:
    if isinstance(axis, Mapping):
        return {str(name): value for name, value in axis.items()}
    return {ids(value) if ids and not isinstance(value, str) else str(value): value for value in axis}


def in_turn(several: Sequence[Any], settings: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Each of several with one of the settings, which take turns; all of them must have had a turn."""
    assert len(several) >= len(settings)
    return [(*settings[place % len(settings)], one) for place, one in enumerate(several)]
