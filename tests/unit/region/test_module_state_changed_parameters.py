"""Weights that change between forward and backward: plain autograd raises where it has saved them, and so do we.

torch's checkpoint, and the peers', recompute with the new weights and say nothing.
"""

import pytest
import torch
from torch import nn

import sac
from sac.errors import RegionError
from tests.support.cases import WIDTH, hidden, layer, loss_of
from tests.support.stored_regions import differences, plainly

MODES = pytest.mark.parametrize("reentrant", [False, True])


def step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def warmed_up(model):
    """A function whose next calls need no recorder, which would hold the weights and look at them itself."""

    def body(h):
        return model(h).tanh().tanh()

    for _ in range(2):
        sac.checkpoint(body, torch.randn(4, WIDTH, requires_grad=True)).sum().backward()
    return body


def test_the_text():
    model = nn.Linear(WIDTH, WIDTH)
    body = warmed_up(model)
    out = sac.checkpoint(body, torch.randn(4, WIDTH, requires_grad=True))
    step(model)
    with pytest.raises(RegionError) as caught:
        out.sum().backward()
    assert str(caught.value).partition(": ")[2] == (
        "a parameter or buffer (float32[8, 8]) was changed in place between forward and backward\n"
        "    fix: change it after backward, or leave the block out of checkpointing"
    )


class Renormed(nn.Module):
    """Writes to its own weight in each forward, as an embedding with `max_norm` does."""

    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(16, WIDTH, max_norm=0.5), layer()

    def forward(self, ids):
        return self.layer(self.table(ids))


def test_what_the_region_itself_writes_is_no_change():
    def program(run):
        torch.manual_seed(2)
        model = Renormed()
        out = run(model, torch.arange(8))
        loss_of([out]).backward(retain_graph=True)
        loss_of([out]).backward()
        return {name: one.grad for name, one in model.named_parameters()}

    assert differences(program(plainly), program(sac.checkpoint)) == []


def descend(parameter):
    parameter.detach().sub_(parameter.grad, alpha=0.1)


@MODES
def test_an_optimizer_that_steps_inside_backward(reentrant):
    """Weights are updated as soon as their gradient is there, which is after the recomputation that needed them."""

    def program(run):
        torch.manual_seed(2)
        first, second = layer(), layer()
        for parameter in [*first.parameters(), *second.parameters()]:
            parameter.register_post_accumulate_grad_hook(descend)
        for _ in range(3):
            _, h = hidden(4, WIDTH)
            loss_of([run(second, run(first, h))]).backward()
        return {str(place): one.detach() for place, one in enumerate([*first.parameters(), *second.parameters()])}

    run = lambda *args: sac.checkpoint(*args, use_reentrant=reentrant)  # noqa: E731
    assert differences(program(plainly), program(run)) == []
