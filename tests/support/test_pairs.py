"""Covering arrays hold every pair, in few rows, and the same rows each time."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from tests.support.pairs import in_pairs, in_turn, rows_of_pairs


def pairs_in(rows: list[tuple[Any, ...]]) -> set[Any]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


@pytest.mark.parametrize(
    "sizes", [(2, 3), (3, 3, 3), (14, 6, 3), (5, 7, 6), (2, 2, 2, 2, 2), (32, 4, 2), (1, 4)], ids=str
)
def test_every_pair_is_there(sizes: tuple[int, ...]) -> None:
    axes = [[f"{letter}{n}" for n in range(size)] for letter, size in zip("abcde", sizes, strict=False)]
    rows = rows_of_pairs(*axes)
    assert pairs_in(rows) == pairs_in(list(product(*axes)))
    assert len(set(rows)) == len(rows)
    two, one = sorted(sizes)[-1], sorted(sizes)[-2]
    assert one * two <= len(rows) <= 1.3 * one * two + 2
    assert rows == rows_of_pairs(*axes)


def test_what_is_left_out_takes_no_other_pair_with_it() -> None:
    axes = ["abc", range(4), "xyz"]

    def unless(letter: str, number: int, last: str) -> bool:
        return letter == "a" and number > 1

    rows = rows_of_pairs(*axes, unless=unless)
    legal = [row for row in product(*axes) if not unless(*row)]
    assert set(rows) <= set(legal)
    assert pairs_in(rows) == pairs_in(legal)


def test_a_mapping_gives_its_values_and_its_keys_name_them() -> None:
    mark = in_pairs(
        number={"one": 1, "two": 2}, letter="ab", unless=lambda number, letter: (number, letter) == (2, "b")
    )
    names, params = mark.args
    assert names == ("number", "letter")
    assert {(*param.values, param.id) for param in params} == {(1, "a", "one-a"), (1, "b", "one-b"), (2, "a", "two-a")}


def test_settings_take_turns() -> None:
    assert in_turn("abc", [(1, "x"), (2, "y")]) == [(1, "x", "a"), (2, "y", "b"), (1, "x", "c")]
