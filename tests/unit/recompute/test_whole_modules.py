"""Modules saved as a whole: the gradients are the same, whatever such a module returns, writes to or draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.blocks import policy, save, selective, square
from tests.support.training import assert_same_training
from tests.support.whole_module_blocks import BODIES, EVERY, stack_of, whole

VALUES = {
    "modules alone": selective(policy(whole(EVERY))),
    "modules and ops": selective(policy(whole(EVERY), save("matmul"))),
    "modules, and all else": selective(policy(whole(EVERY), default="save")),
    "all but the modules": selective(policy(whole(EVERY, "recompute"), save("*", optional=True))),
    "every other module": selective(policy(whole(EVERY, "alternate"))),
    "one module": selective(policy(whole("part", optional=True))),
    "what is inside": selective(policy(whole("{tower.*,part}", optional=True))),
    "to the end": selective(policy(whole(EVERY)), early_stop=False),
}
ON_EACH_BODY = pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)


@pytest.mark.parametrize("name", VALUES)
@ON_EACH_BODY
def test_gradients_are_the_same(body: Callable[..., Any], name: str) -> None:
    assert_same_training(lambda: stack_of(body), VALUES[name], steps=3, make_input=square)


@pytest.mark.parametrize("name", ["modules alone", "modules and ops"])
@ON_EACH_BODY
def test_gradients_are_the_same_inside_torchs_checkpoint(body: Callable[..., Any], name: str) -> None:
    assert_same_training(
        lambda: stack_of(body), VALUES[name], entry="context_fn with module", steps=3, make_input=square
    )
