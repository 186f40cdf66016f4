"""Float8 by torchao: scales are not computed again. What models in low precision train is in test_matrix."""

from __future__ import annotations

import pytest

import sac
from tests.support.blocks import policy, save

pytest.importorskip("torchao", reason="torchao is in the extra `stacks`")

from tests.stacks import low_precision as models

FLOAT8 = [name for name in models.CONVERSIONS if name.startswith("float8")]
SCALES = {"mode": "selective", "policy": policy(save("scaling"))}


@pytest.mark.parametrize("conversion", FLOAT8)
def test_scaling_reductions_are_not_run_again(conversion: str) -> None:
    plain, full, kept, general = (
        models.scaling_reductions(sac.apply(models.build(conversion), value))
        for value in ("none", "full", SCALES, "selective")
    )
    assert full > plain == kept == general
