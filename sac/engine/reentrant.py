"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sac.engine.inputs import Inputs
from sac.engine.state import ForwardState, bound_in
from sac.engine.untraced import never_compiled
from sac.errors import Problem, RegionError
from sac.region.settings import Settings
from sac.tensors import describe, version_of
from sac.torch_private import graph_is_retained, is_for_every_leaf, tree_flatten, tree_unflatten

_OTHER_MODE = "pass use_reentrant=False"


def run_reentrant(
    function: Callable[..., Any],
    owners: Sequence[nn.Module],
    settings: Settings,
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, tuple[int, int]]:
    """Run ``function`` as one node of the graph; return its result, and the bytes of the inputs.

    Grad mode is off, so it is unknown which results depend on a trained tensor: each that can have a gradient counts.
    """
    inputs = Inputs(args, kwargs)
    if settings.input_storing is not None:
        inputs.store(settings.input_storing, where)
    arguments = (*args, *kwargs.values(), *bound_in(function))
    state = ForwardState(owners, arguments, settings, is_careful=True, copies=True)
    call = _Call(function, inputs, state, where)
    call.add_note = settings.add_note
    call.arguments = args, kwargs
    tensors = [tensor for _, tensor in inputs.tensors]
    if not any(tensor.requires_grad for tensor in tensors):
        trains = any(parameter.requires_grad for owner in owners for parameter in owner.parameters())
        tensors.append(torch.empty(0, requires_grad=trains))  # a node needs an input that requires grad
    results = _Node.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return tree_unflatten(call.with_tensors(results), call.spec), inputs.bytes


class _Call:
    arguments: Any = None
    add_note: Callable[[BaseException], None]
    spec: Any = None

    def __init__(self, function: Callable[..., Any], inputs: Inputs, state: ForwardState, where: str) -> None:
        self.function, self.inputs, self.state, self.where = function, inputs, state, where
        self.indices = [index for index, _ in inputs.tensors]
        self.leaves: list[Any] = []

    def with_tensors(self, tensors: Iterable[Tensor]) -> list[Any]:
        """Return the leaves of the output, with ``tensors`` in their places."""
        tensors = iter(tensors)
        return [next(tensors) if leaf is Tensor else leaf for leaf in self.leaves]

    def refuse(self, problem: str) -> None:
        """Raise ``RegionError``."""
        raise RegionError(Problem(self.where, problem, fix=_OTHER_MODE))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; return the tensors in its result."""
        (args, kwargs), self.arguments = self.arguments, None
        versions = [version_of(tensor) for tensor in tensors]
        leaves, self.spec = tree_flatten(self.function(*args, **kwargs))
        for index, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(tensor) != version:
                self.refuse(
                    f"a reentrant region may not write to an argument, here number {index} ({describe(tensor)})"
                )
        self.leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.inputs.end(lambda tensor: tensor.detach() if not tensor.is_leaf else tensor)
        self.state.end()
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def run_again(self) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Run the function again; return the tensors in its result, and a dict for gradients that arrive at inputs."""
        self.state.check(None, self.where)
        arrived: dict[int, Tensor] = {}
        with self.state.restored(None), torch.enable_grad():
            args, kwargs = self.inputs.again(self.where, written=False)
            leaves, spec = tree_flatten((args, kwargs))
            starts: dict[int, Tensor] = {}  # one tensor in several places is one tensor again
            for position, index in enumerate(self.indices):
                leaf = leaves[index]
                if leaf.requires_grad:
                    if id(leaf) not in starts:
                        starts[id(leaf)] = _Start.apply(leaf, arrived, position)  # type: ignore[no-untyped-call]
                    leaves[index] = starts[id(leaf)]
            args, kwargs = tree_unflatten(leaves, spec)
            with self.state.modes.entered():
                output = self.function(*args, **kwargs)
        return [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)], arrived

    def check_backward(self) -> None:
        """Raise if this way does not support the running backward."""
        if not is_for_every_leaf():
            self.refuse("neither torch.autograd.grad nor backward(inputs=...) can go through a reentrant region")
        if torch.is_grad_enabled():
            self.refuse("a reentrant region has no double backward (this one was called with create_graph=True)")


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = call.run(tensors)
        ctx.mark_non_differentiable(*(one for one in results if not (one.is_floating_point() or one.is_complex())))
        is_input = {id(tensor) for tensor in tensors}
        return tuple(result.detach() if id(result) in is_input else result for result in results)

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Any) -> Any:
        call: _Call = ctx.call
        call.check_backward()
        try:
            results, arrived = call.run_again()
        except torch.OutOfMemoryError as error:
            call.add_note(error)
            raise
        if len(results) != len(grads):
            call.refuse(f"it returned {len(grads)} tensors in forward and {len(results)} in recomputation")
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        wanted = [(result, grad) for result, grad in pairs if result.requires_grad]
        if wanted:
            torch.autograd.backward([result for result, _ in wanted], [grad for _, grad in wanted])
        if not graph_is_retained():
            call.inputs.drop()
            call.state.drop()
        return None, *(arrived.get(position) for position in range(len(ctx.needs_input_grad) - 1))


class _Start(torch.autograd.Function):
    """An argument of the recomputation: records the gradient that arrives there, with its strides."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, arrived: dict[int, Tensor], position: int) -> Tensor:
        ctx.arrived, ctx.position = arrived, position
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.arrived[ctx.position] = grads[0]
        return None, None, None
