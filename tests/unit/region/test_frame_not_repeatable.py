"""Functions that do not repeat themselves, and functions that raise: one clear error, and nothing is lost."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sac
from sac.engine.handles import OTHER, OTHER_FIX
from sac.errors import RegionError
from tests.support.cases import WIDTH, hidden, layer
from tests.support.runs import Noted

FIX = f"    fix: {OTHER_FIX}"


class Changing:
    """Runs `first`, and `then` from the second time on."""

    def __init__(self, first, then):
        self.bodies = Noted(first, then)

    def __call__(self, h):
        body = self.bodies[0]
        del self.bodies[:-1]
        return body(h)


def error_of(first, then, **options):
    x, h = hidden(4, WIDTH)
    out = sac.checkpoint(Changing(first, then), h, **options)  # what a body saves of h itself is never missing
    with pytest.raises(RegionError) as caught:
        out.sum().backward()
    assert x.grad is None
    return str(caught.value)


def test_more_saved_tensors_are_seen_without_early_stop():
    told = error_of(lambda h: h.tanh(), lambda h: h.tanh().tanh(), early_stop=False)
    assert told == (f"Changing: it saved 2 tensors in recomputation, and 1 in forward: {OTHER}\n{FIX}")


def test_another_shape():
    assert error_of(lambda h: h.tanh(), lambda h: h[:2].tanh().repeat(2, 1)) == (
        f"Changing: saved tensor 0 was float32[4, 8] in forward, but is float32[2, 8] in recomputation: {OTHER}\n{FIX}"
    )


def test_determinism_check_none_does_not_compare():
    x, h = hidden(4, WIDTH)
    body = Changing(lambda h: h.tanh(), lambda h: h.double().tanh().float())
    sac.checkpoint(body, h, determinism_check="none").sum().backward()
    assert x.grad is not None


class Interrupted(Exception):
    pass


class Fails:
    """A layer with dropout whose `turn`-th run raises in its middle."""

    def __init__(self, model, turn):
        self.model, self.turn, self.runs = model, turn, Noted()

    def __call__(self, h):
        self.runs.append(1)
        h = self.model(F.dropout(h, 0.5))
        if len(self.runs) == self.turn:
            raise Interrupted
        return self.model(h)


@pytest.mark.parametrize("reentrant", [False, True])
def test_an_exception_in_forward_leaves_nothing_behind(reentrant):
    model, (_, h) = layer(dropout=0.3), hidden(4, WIDTH)
    with pytest.raises(Interrupted):
        sac.checkpoint(Fails(model, 1), h, use_reentrant=reentrant)
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    assert torch.is_grad_enabled()
    torch.manual_seed(0)
    out = sac.checkpoint(Fails(model, 0), h, use_reentrant=reentrant)
    torch.manual_seed(0)
    assert torch.equal(out, Fails(model, 0)(h))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(WIDTH)], ids=["dropout", "statistics"])
def test_backward_can_be_tried_again_after_an_exception_in_recomputation(norm, reentrant):
    def gradients(run):
        torch.manual_seed(1)
        model, (x, h) = nn.Sequential(layer(dropout=0.3), norm()), hidden(4, WIDTH)
        out = run(model, h)
        state = torch.get_rng_state()
        buffers = [one.clone() for one in model.buffers()]
        try:
            out.square().sum().backward()
        except Interrupted:
            assert torch.equal(torch.get_rng_state(), state)
            assert all(map(torch.equal, buffers, model.buffers()))
            out.square().sum().backward()
        return [x.grad, *(one.grad for one in model.parameters()), *model.buffers(), torch.get_rng_state()]

    plain = gradients(lambda model, h: Fails(model, 0)(h))
    ours = gradients(lambda model, h: sac.checkpoint(Fails(model, 2), h, use_reentrant=reentrant))
    assert all(map(torch.equal, plain, ours))
