"""What a region inside another one, or under saved-tensor hooks, holds of its inputs between forward and backward."""

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import sac
from sac.errors import RegionError


def test_the_input_of_an_inner_region_is_free_once_the_outer_forward_is_over():
    memories = []

    def outer(x: Tensor) -> Tensor:
        h = x * 2
        memories.append(StorageWeakRef(h.untyped_storage()))
        return sac.checkpoint(lambda t: t.sin().exp(), h)

    x = torch.randn(64, requires_grad=True)
    for _ in range(2):  # with the recorder and without
        memories.clear()
        out = sac.checkpoint(outer, x)
        assert memories[0].expired()
        x.grad = None
        out.sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def test_hooks_that_copy_are_the_only_holders_of_an_input():
    x = torch.randn(64, requires_grad=True)
    h = x * 2
    memory = StorageWeakRef(h.untyped_storage())
    with saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        out = sac.checkpoint(lambda t: t.sin().exp(), h)
    del h
    assert memory.expired()
    out.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((x * 2).sin().exp().sum(), x)[0])


def test_a_write_to_an_input_in_the_hands_of_hooks_is_still_seen():
    x = torch.randn(64, requires_grad=True)
    h = x * 2
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        out = sac.checkpoint(lambda t: t.sin().exp(), h)
    with torch.no_grad():
        h.zero_()
    with pytest.raises(RegionError, match=r"input 0 \(float32\[64\]\) was changed in place after the forward"):
        out.sum().backward()
