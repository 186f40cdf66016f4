"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sac.engine.inputs import Inputs
from sac.engine.state import ForwardState
from sac.errors import Problem, RegionError
from sac.region.settings import Settings
from sac.torch_private import is_for_every_leaf, tree_flatten, tree_unflatten


def run_reentrant(
    function: Callable[..., Any],
    owners: Sequence[nn.Module],
    settings: Settings,
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, tuple[int, int]]:
    """Run ``function`` as one node of the graph; return its result, and the bytes of the inputs."""
    inputs = Inputs(args, kwargs)
    if settings.input_storing is not None:
        inputs.store(settings.input_storing, where)
    state = ForwardState(owners, (*args, *kwargs.values()), settings, is_careful=True)
    call = _Call(function, inputs, state, where)
    call.arguments = args, kwargs
    results = _Node.apply(call, *(tensor for _, tensor in inputs.tensors))  # type: ignore[no-untyped-call]
    return tree_unflatten(call.with_tensors(results), call.spec), inputs.bytes


class _Call:
    arguments: Any = None
    spec: Any = None

    def __init__(self, function: Callable[..., Any], inputs: Inputs, state: ForwardState, where: str) -> None:
        self.function, self.inputs, self.state, self.where = function, inputs, state, where
        self.indices = [index for index, _ in inputs.tensors]
        self.leaves: list[Any] = []

    def with_tensors(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Return the leaves of the output, with ``tensors`` in their places."""
        tensors = iter(tensors)
        return [next(tensors) if leaf is Tensor else leaf for leaf in self.leaves]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call, (args, kwargs) = call, call.arguments
        call.arguments = None
        leaves, call.spec = tree_flatten(call.function(*args, **kwargs))
        results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        call.leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        call.inputs.end(lambda tensor: tensor.detach() if not tensor.is_leaf else tensor)
        call.state.end()
        ctx.mark_non_differentiable(*(one for one in results if not (one.is_floating_point() or one.is_complex())))
        is_input = {id(tensor) for tensor in tensors}
        return tuple(result.detach() if id(result) in is_input else result for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        if not is_for_every_leaf():
            found = "use_reentrant does not work with torch.autograd.grad or `inputs=`"
            raise RegionError(Problem(call.where, found, fix="leave use_reentrant off"))
        call.state.check(None, call.where)
        args, kwargs = call.inputs.again(call.where, written=False)
        leaves = tree_flatten((args, kwargs))[0]
        inputs = [leaves[index] for index in call.indices]
        with call.state.restored(None), torch.enable_grad():
            output = call.function(*args, **kwargs)
        results = (leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor))
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=False) if grad is not None]
        wanted = [(result, grad) for result, grad in pairs if result.requires_grad]
        if wanted:
            torch.autograd.backward([result for result, _ in wanted], [grad for _, grad in wanted])
        return None, *(leaf.grad if isinstance(leaf, Tensor) else None for leaf in inputs)
