"""What reentrant regions keep, and that all of it goes without the cycle collector."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from sac.full import FullConfig
from tests.support.cases import WIDTH, hidden, layer
from tests.support.recording import Recorder, without_collector
from tests.support.reentrant import reentrant


@pytest.mark.parametrize("store", ["whole", "host"])
@pytest.mark.parametrize("ends", ["backward", "backward that retains", "never"])
def test_memory_goes_without_the_collector(ends, store):
    model, config = nn.Linear(64, 64), FullConfig(store=store)
    with without_collector():
        recorder = Recorder()
        for _ in range(3):  # the first under the recorder
            with recorder:
                h = torch.randn(16, 64, requires_grad=True) * 1
                out, view = reentrant(lambda h: (model(h).relu(), h.view(-1)), h, config=config)
                if ends != "never":
                    (out.sum() + view.sum()).backward(retain_graph=ends != "backward")
                model.weight.grad = model.bias.grad = None
                del h, out, view
            assert recorder.live_bytes() == 0


def test_inputs_go_after_a_backward_that_does_not_retain():
    model, h = nn.Linear(64, 64), torch.randn(16, 64)
    with without_collector():
        for _ in range(2):
            given = h.clone()
            kept = weakref.ref(given.untyped_storage())
            out = reentrant(model, given)
            del given
            assert kept() is not None
            out.sum().backward()
            assert kept() is None


def test_only_the_inputs_are_kept():
    model, x = layer(64), torch.randn(16, 64, requires_grad=True)
    for _ in range(2):
        recorder = Recorder()
        with recorder:
            h = x * 1
            out = reentrant(model, h)
        assert recorder.live_bytes(besides=(h, out)) == 0


def test_the_recomputed_graph_goes_with_the_backward():
    model, (_, h) = layer(64), hidden(16, 64)
    with without_collector():
        out = reentrant(model, h)
        recorder = Recorder()
        with recorder:
            out.sum().backward(retain_graph=True)
        assert recorder.live_bytes(besides=[parameter.grad for parameter in model.parameters()]) <= 2 * h.nbytes


def test_dropping_a_region_leaves_no_tensor_to_the_collector():
    model = layer()

    def garbage() -> int:
        _, h = hidden(4, WIDTH)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            with without_collector():
                reentrant(model, h)
                reentrant(model, h).sum().backward()
                gc.collect()
            return sum(isinstance(one, torch.Tensor) for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()

    # In one of them what is remembered of other regions may go, which has nothing to do with this one.
    assert 0 in [garbage() for _ in range(5)][3:]
