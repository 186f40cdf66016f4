"""The measuring itself: what `outcome` says of one linear map is what arithmetic says."""

from __future__ import annotations

import torch
from torch import nn

import sac
from tests.stacks.composition import differences, forward_done, outcome

BATCH, WIDTH = 64, 64


def measured(value: object, scale: float = 1.0) -> object:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()) for _ in range(3)))
    sac.apply(model, value)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)

    def step() -> torch.Tensor:
        loss = (model(x) * scale).sum()
        forward_done()
        loss.backward()
        return loss

    return outcome(step, model)


def test_flops_of_forward_and_backward_are_three_products_a_layer() -> None:
    assert measured("none").flops == 3 * 3 * 2 * BATCH * WIDTH * WIDTH


def test_a_recomputed_layer_is_one_product_more_and_a_dispatch_mode_counts_none_twice() -> None:
    everything = {"mode": "selective", "policy": {"schema": "sac/v1", "name": "all", "default": "save", "rules": []}}
    assert measured("full").flops == 4 * 3 * 2 * BATCH * WIDTH * WIDTH
    assert measured(everything).flops == measured("none").flops
    assert measured("selective").flops <= measured("full").flops


def test_full_keeps_less() -> None:
    assert measured("full").kept_bytes < measured("none").kept_bytes


def test_a_difference_is_told() -> None:
    assert differences(measured("full"), measured("none")) == []
    told = differences(measured("none", 2.0), measured("none"))
    assert "losses" in told
    assert "step 1 0.0.weight" in told
