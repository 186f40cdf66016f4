"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sac.engine.frame import Inputs
from sac.engine.state import ForwardState
from sac.errors import Problem, RegionError
from sac.region.settings import Settings
from sac.torch_private import is_for_every_leaf, tree_flatten, tree_unflatten


def run_reentrant(
    function: Callable[..., Any], owners: Sequence[nn.Module], settings: Settings, where: str, args: Any, kwargs: Any
) -> tuple[Any, tuple[int, int]]:
    """Run ``function`` as one node of the graph; return its result, and the bytes of the inputs."""
    inputs = Inputs(args, kwargs)
    if settings.input_storing is not None:
        inputs.store(settings.input_storing, where)
    call = _Call(function, inputs, where)
    arguments = [one for one in (*args, *kwargs.values()) if not isinstance(one, Tensor)]
    call.state = ForwardState(owners, arguments, settings, is_careful=True)
    call.arguments = args, kwargs
    found = _Node.apply(call, *(tensor for _, tensor in inputs.tensors))
    return tree_unflatten(call.with_tensors(found), call.spec), inputs.bytes


class _Call:
    state: ForwardState
    arguments: Any = None
    spec: Any = None

    def __init__(self, function: Callable[..., Any], inputs: Inputs, where: str) -> None:
        self.function, self.inputs, self.where = function, inputs, where
        self.indices = [index for index, _ in inputs.tensors]
        self.leaves: list[Any] = []

    def with_tensors(self, tensors: Any) -> list[Any]:
        """Return the leaves of the output, with ``tensors`` in their places."""
        tensors = iter(tensors)
        return [next(tensors) if one is Tensor else one for one in self.leaves]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call, (args, kwargs) = call, call.arguments
        call.arguments = None
        leaves, call.spec = tree_flatten(call.function(*args, **kwargs))
        found = [one for one in leaves if isinstance(one, Tensor)]
        call.leaves = [Tensor if isinstance(one, Tensor) else one for one in leaves]
        call.inputs.end(lambda tensor: tensor.detach() if not tensor.is_leaf else tensor)
        call.state.end()
        ctx.mark_non_differentiable(*(one for one in found if not (one.is_floating_point() or one.is_complex())))
        return tuple(one.detach() if any(one is tensor for tensor in tensors) else one for one in found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call = ctx.call
        if not is_for_every_leaf():
            found = "use_reentrant does not work with torch.autograd.grad or `inputs=`"
            raise RegionError(Problem(call.where, found, fix="leave use_reentrant off"))
        call.state.check(None, call.where)
        args, kwargs = call.inputs.again(call.where, written=False)
        leaves = tree_flatten((args, kwargs))[0]
        given = [leaves[index] for index in call.indices]
        with call.state.restored(None), torch.enable_grad():
            output = call.function(*args, **kwargs)
        pairs = zip((one for one in tree_flatten(output)[0] if isinstance(one, Tensor)), grads)
        wanted = [(one, grad) for one, grad in pairs if one.requires_grad and grad is not None]
        if wanted:
            torch.autograd.backward([one for one, _ in wanted], [grad for _, grad in wanted])
        return None, *(one.grad if isinstance(one, Tensor) else None for one in given)
