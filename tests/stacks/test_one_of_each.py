"""One model in eager, one compiled block and one pair of ranks: what the quick suite sees of the stacks."""

from __future__ import annotations

import pytest

from tests.stacks.matrix import assert_as_promised, line_named


@pytest.mark.parametrize("name", ["plain", "per-block compile", "FSDP2"])
def test_a_stack(name: str) -> None:
    assert_as_promised(line_named(name))
