"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    outputs = _Node.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return call.result(outputs), inputs.bytes


# Autograd attaches the history of a node's outputs to the tensors themselves. So only tensors that the region made are
# outputs, and even those are replaced by aliases. An argument, parameter or buffer that is returned is returned as it
# is, and so is a tensor whose dtype allows no gradient.


class _Call:
    arguments: Any = None

    def __init__(self, function: Callable[..., Any], inputs: Inputs, state: ForwardState, where: str) -> None:
        self.function, self.inputs, self.state, self.where = function, inputs, state, where
        self.indices = [index for index, _ in inputs.tensors]
        self._leaves: list[Any] = []  # of the result, until the forward ends
        self._spec: Any = None
        self._outputs: dict[int, int] = {}  # index of a leaf -> of the node's output
        self.places: list[int] = []  # for each output of the node, its index among the leaves

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return the result of the call."""
        leaves, self._leaves = self._leaves, []
        for index, output in self._outputs.items():
            leaves[index] = outputs[output]
        return tree_unflatten(leaves, self._spec)

    def refuse(self, problem: str) -> None:
        """Raise ``RegionError``."""
        raise RegionError(Problem(self.where, problem, fix=_OTHER_MODE))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; return the tensors in its result."""
        (args, kwargs), self.arguments = self.arguments, None
        versions = [version_of(tensor) for tensor in tensors]
        self._leaves, self._spec = tree_flatten(self.function(*args, **kwargs))
        for index, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
            if version_of(tensor) != version:
                self.refuse(
                    f"a reentrant region may not write to an argument, here number {index} ({describe(tensor)})"
                )
        outputs = self._take_outputs(tensors)
        self.inputs.end(lambda tensor: tensor.detach() if not tensor.is_leaf else tensor)
        self.state.end()
        return outputs

    def _take_outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Take what the region made out of the leaves of its result; return aliases."""
        given, roots = {id(tensor) for tensor in tensors}, {id(_root(tensor)) for tensor in tensors}
        known: dict[int, int] = {}
        aliases = []
        for index, leaf in enumerate(self._leaves):
            if not isinstance(leaf, Tensor) or id(leaf) in given or not self._is_made_here(leaf):
                continue
            output = known.setdefault(id(leaf), len(known))
            if output == len(aliases):
                alias = leaf.detach()
                # Autograd refuses writes to this view: they would change the argument, too.
                aliases.append(alias.view_as(alias) if id(_root(leaf)) in roots else alias)
                self.places.append(index)
            self._outputs[index] = output
        for index in self._outputs:
            self._leaves[index] = None
        return aliases

    def _is_made_here(self, leaf: Tensor) -> bool:
        if not (leaf.is_floating_point() or leaf.is_complex()) or self.state.holds(leaf):
            return False
        # A view of a tensor that needs a gradient, made without grad mode, says that it is a leaf that requires grad.
        return not leaf.requires_grad or not leaf.is_leaf or leaf._is_view()

    def run_again(self) -> tuple[list[Any], dict[int, Tensor]]:
        """Run the function again; return the outputs, and a dict for gradients that arrive at inputs."""
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
        leaves = tree_flatten(output)[0]
        outputs = [leaves[place] if place < len(leaves) else None for place in self.places]
        if not all(isinstance(output, Tensor) for output in outputs):
            self.refuse("it returned other tensors in recomputation than in forward")
        return outputs, arrived

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
        return tuple(call.run(tensors))

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
        pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        wanted = [(result, grad) for result, grad in pairs if result.requires_grad]
        if wanted:
            torch.autograd.backward([result for result, _ in wanted], [grad for _, grad in wanted])
        if not graph_is_retained():
            call.inputs.drop()
            call.state.drop()
        return None, *(arrived.get(position) for position in range(len(ctx.needs_input_grad) - 1))


def _root(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base


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
