"""Random programs of autograd Functions with kernels, hidden writes, aliases and effects are exact."""

from __future__ import annotations

import pytest

from tests.fuzz.functions import RULES, wrong


@pytest.mark.parametrize("rules", RULES)
def test_random_functions_are_exact(rules: str) -> None:
    assert [(seed, text) for seed in range(12) if (text := wrong(seed, rules))] == []
