"""``None`` for ``distribute_saved_activations`` is false, as in Megatron-Core, which asks only whether it is true."""

from __future__ import annotations

import torch

from sac.compat import megatron
from tests.support.layers import stack


def test_none_scatters_nothing() -> None:
    layer = stack(1)[0]
    grads = []
    for run in (lambda x: megatron.checkpoint(layer, None, x), lambda x: megatron.checkpoint(layer, False, x), layer):
        x = torch.linspace(-1, 1, 512).view(2, 8, 32).requires_grad_()
        layer.zero_grad()
        torch.manual_seed(0)
        out = run(x)
        out.square().sum().backward()
        grads.append([out.detach(), x.grad, *(one.grad for one in layer.parameters())])
    assert all(torch.equal(*pair) for other in grads[:2] for pair in zip(other, grads[2], strict=True))
