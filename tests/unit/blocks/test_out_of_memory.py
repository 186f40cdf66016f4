"""An out-of-memory error in a region, in forward or in recomputation, carries the report as a note."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sac
from sac.torch_private import NO_TASK, current_graph_task_id
from tests.support.blocks import FULL, Stack, policy, save, selective

X = torch.linspace(-1, 1, 64).reshape(4, 16)
HAS_NOTES = hasattr(BaseException, "add_note")  # since Python 3.11


class Fails(nn.Module):
    """Runs out of memory in forward or in backward, if ``where`` says so."""

    where = ""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == ("forward" if current_graph_task_id() == NO_TASK else "backward"):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.linear(x).sin().cos()


def applied(value: Any) -> Stack:
    model = sac.apply(Stack(Fails(), Fails()), value)
    model(X.clone()).sum().backward()
    return model


def notes(model: Stack, where: str) -> list[str]:
    """Return the notes of the error of a step in which the last block fails."""
    model.blocks[1].where = where
    with pytest.raises(torch.OutOfMemoryError) as caught:
        model(X.clone()).sum().backward()
    return getattr(caught.value, "__notes__", [])


VALUES = {
    "full": FULL,
    "reentrant": {**FULL, "use_reentrant": True},
    "rerun": selective(policy(save("matmul")), engine="rerun"),
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", VALUES)
def test_the_error_carries_the_report(name: str, where: str) -> None:
    model = applied(VALUES[name])
    found = notes(model, where)
    assert found == [str(sac.report(model))] * HAS_NOTES
    assert all("blocks.0-1 (x2): keeps " in note for note in found)
