"""FP8 state of TransformerEngine itself, where it is installed: as test_fp8_state.py, whose library is a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.blocks import Stack
from tests.support.training import assert_same, built, train
from tests.unit.region.test_fp8_state import WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
engine = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine", exc_type=ImportError)
recipes = pytest.importorskip("transformer_engine.common.recipe", reason="needs TransformerEngine")
WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.plain = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = (engine.Linear(WIDTH, WIDTH, params_dtype=torch.float32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.plain(self.first(self.norm(x)))
        return x + self.second(nn.functional.dropout(h.sin(), 0.2))


def autocast() -> Any:
    recipe = recipes.DelayedScaling(amax_history_len=256, amax_compute_algo="most_recent")
    if hasattr(engine, "autocast"):
        return engine.autocast(enabled=True, recipe=recipe)
    return engine.fp8_autocast(enabled=True, fp8_recipe=recipe)


def trained(way: Any) -> dict[str, Tensor]:
    model = way(built(lambda: Stack(Layer(), Layer()), "cuda"))
    seen = train(model, steps=20, device="cuda", around_forward=autocast, make_input=inputs)
    for name, module in model.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            if (scales := getattr(module, "fp8_meta", {}).get(key)) is not None:
                seen |= {f"{name} {key}": scales.scale.clone(), f"{name} {key} maxima": scales.amax_history.clone()}
    return seen


def inputs(device: str) -> tuple[Tensor, ...]:
    return (torch.randn(32, WIDTH, device=device) * (1 + 3 * torch.rand((), device=device)),)


@pytest.mark.parametrize("way", ["compat", "compat reentrant", "full", "auto", "a saved layer"])
def test_twenty_steps_are_those_without_regions(way: str) -> None:
    assert_same(trained(lambda model: model), trained(WAYS[way]))
