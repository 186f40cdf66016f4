"""Models of transformers with their blocks' inputs kept elsewhere: losses and gradients of three steps are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sac
from tests.support.model_zoo import tiny
from tests.support.ranks import run_ranks
from tests.support.training import same_bits

FAMILIES = ("llama", "gemma3", "gpt2", "bert", "t5", "qwen3_moe", "deepseek_v3", "vit")
MODES = ("full", "selective")


def three_steps(model: torch.nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model.train()
    losses = []
    for _ in range(3):
        loss = model(**batch)[0].float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses + [one.grad for one in model.parameters() if one.grad is not None]


def differ(family: str, value: dict[str, Any], *, scattered: bool) -> list[int]:
    """Places of the losses and gradients that differ."""
    model, batch = tiny(family)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # what sac.apply does; the oracle is the model without it
    reference = three_steps(copy.deepcopy(model), batch)
    ours = three_steps(sac.apply(model, value, tp_group=dist.group.WORLD if scattered else None), batch)
    assert len(reference) == len(ours) > 3
    return [place for place, pair in enumerate(zip(reference, ours, strict=True)) if not same_bits(*pair)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_the_host(family: str, mode: str) -> None:
    assert differ(family, {"mode": mode, "store": "host", "keep": "all"}, scattered=False) == []


def differ_on_rank(family: str, mode: str) -> list[int]:
    torch.manual_seed(7)  # the weights are replicated
    return differ(family, {"mode": mode, "distribute_saved_activations": True}, scattered=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_scattered_over_two_ranks(family: str, mode: str) -> None:
    assert run_ranks(2, differ_on_rank, family, mode) == [[], []]
