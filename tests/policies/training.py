"""One model trained with and without a policy: what both must agree on, and what each keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sac.blocks.install import regions_of
from tests.policies.families import loss_of
from tests.support.recording import Recorder, without_collector

DROPOUT = 0.1
STEPS = 2  # the second one runs with what the first has shown


@dataclass(frozen=True)
class Trained:
    """What training showed; ``hits`` are the ids of all rules that matched an op in some region."""

    seen: dict[str, Tensor]
    hits: frozenset[str]
    model: nn.Module


def train(model: nn.Module, inputs: dict[str, Any]) -> Trained:
    """Run some steps without an optimizer, so that gradients add up; ``seen`` is every tensor that training leaves."""
    torch.manual_seed(0)
    seen = {}
    for step in range(STEPS):
        loss = loss_of(model, inputs)
        loss.backward()
        seen[f"loss {step}"] = loss.detach()
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    seen |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    seen["random numbers"] = torch.get_rng_state()
    hits = {
        bound.rule.id
        for region in regions_of(model)
        for bound in region.region.group.table.rules
        if region.region.stats.saved.hits.get(bound.index)
    }
    return Trained(seen, frozenset(hits), model)


def unequal(expected: Trained, found: Trained) -> list[str]:
    """Return the names of what the two trainings do not agree on, bit for bit."""
    assert expected.seen.keys() == found.seen.keys(), sorted(expected.seen.keys() ^ found.seen.keys())
    return [name for name in expected.seen if not torch.equal(expected.seen[name], found.seen[name])]


def kept_bytes(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Bytes that a forward of a trained model leaves for backward, by which storages live on; nothing asks sac."""
    with without_collector():
        recorder = Recorder()
        with recorder:
            loss = loss_of(model, inputs)
        return recorder.live_bytes(besides=(loss, list(model.buffers())))
