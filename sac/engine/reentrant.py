"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from sac.engine.inputs import Inputs
from sac.engine.objects import attributes_of, is_own_object, reaches_graph
from sac.engine.settings import Settings
from sac.engine.state import ForwardState, bound_in
from sac.engine.untraced import never_compiled
from sac.errors import Problem, RegionError
from sac.outer_hooks import PackHooks, active_hooks, pack_with_outer_hooks
from sac.stores.backward_order import CallNode
from sac.tensors import describe, metadata, version_of
from sac.torch_private import graph_is_retained, is_for_every_leaf, tree_flatten, tree_leaves, tree_unflatten

_OTHER_MODE = "pass use_reentrant=False"


def run_reentrant(
    function: Callable[..., Any],
    owners: Sequence[nn.Module],
    settings: Settings,
    where: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, tuple[int, int]]:
    """Run ``function`` as one node of the graph, which needs an argument that requires a gradient.

    Return its result, and the bytes of the inputs.

    Grad mode is off, so it is unknown which results depend on a trained tensor: each that can have a gradient counts.
    """
    inputs = Inputs(args, kwargs)
    node = CallNode()
    if settings.input_storing is not None:
        inputs.store(settings.input_storing, where, node)
    arguments = (*args, *kwargs.values(), *bound_in(function))
    state = ForwardState(owners, arguments, settings, is_careful=True, copies=True)
    call = _Call(function, inputs, state, where, checks=settings.checks_metadata)
    call.add_note = settings.add_note
    call.arguments = args, kwargs
    tensors = [tensor for _, tensor in inputs.tensors]
    outputs = _Node.apply(call, *tensors)  # type: ignore[no-untyped-call]
    result = call.result(outputs)
    node.mark(tree_leaves(result))
    return result, inputs.bytes


# Autograd attaches the history of a node's outputs to the tensors themselves. So only tensors that the region made are
# outputs, and even those are replaced by aliases. An argument, parameter or buffer that is returned is returned as it
# is, and so is a tensor whose dtype allows no gradient.


class _Call:
    arguments: Any = None
    add_note: Callable[[BaseException], None]  # to an out-of-memory error

    def __init__(
        self, function: Callable[..., Any], inputs: Inputs, state: ForwardState, where: str, *, checks: bool
    ) -> None:
        self._checks = checks
        self.function, self.inputs, self.state, self.where = function, inputs, state, where
        self.indices = [index for index, _ in inputs.tensors]
        self._leaves: list[Any] = []  # of the result, until the forward ends
        self._spec: Any = None
        self._outputs: dict[int, int] = {}  # index of a leaf -> of the node's output
        self._lock = threading.RLock()  # of reruns: two threads may go through one graph
        self._is_dropped = False
        self.places: list[int] = []  # for each output of the node, its index among the leaves

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """Return the result of the call."""
        leaves, self._leaves = self._leaves, []
        for index, output in self._outputs.items():
            leaves[index] = outputs[output]
        return tree_unflatten(leaves, self._spec)

    def refuse(self, problem: str, fix: str = "") -> None:
        """Raise ``RegionError``."""
        raise RegionError(Problem(self.where, problem, fix=f"{fix}, or {_OTHER_MODE}" if fix else _OTHER_MODE))

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
        known, after = {id(tensor) for tensor in tensors}, tree_leaves((args, kwargs))
        for leaf in after:
            if _has_gradients(leaf) and id(leaf) not in known:
                problem = (
                    "the region put a tensor into a container that it was given, and autograd does not see it there"
                )
                self.refuse(problem, fix="return the tensor")
        outputs = self._take_outputs(tensors, {id(leaf) for leaf in after})
        self.inputs.end(partial(_held, hooks=active_hooks()))
        self.state.end()
        return outputs

    def _take_outputs(self, tensors: Sequence[Tensor], given: set[int]) -> list[Tensor]:
        """Take what the region made out of the leaves of its result; return aliases. ``given``: ids of arguments."""
        roots = Counter(id(_root(tensor)) for tensor in tensors)
        roots.update({id(leaf): id(_root(leaf)) for leaf in self._leaves if _has_gradients(leaf)}.values())
        known: dict[int, int] = {}
        aliases: list[Tensor] = []
        for index, leaf in enumerate(self._leaves):
            if is_own_object(leaf) and id(leaf) not in given and any(map(_has_gradients, attributes_of(leaf).values())):
                name = type(leaf).__qualname__
                problem = f"the region returned a {name}, and autograd does not see the tensors that it holds"
                self.refuse(problem, fix="return tuples, lists, dicts or what is registered as a pytree")
            if not isinstance(leaf, Tensor) or id(leaf) in given or not self._is_made_here(leaf):
                continue
            output = known.setdefault(id(leaf), len(known))
            if output == len(aliases):
                alias = leaf.detach()
                # Autograd refuses writes to this view: they would change an argument or another result, too.
                aliases.append(alias.view_as(alias) if roots[id(_root(leaf))] > 1 else alias)
                self.places.append(index)
            self._outputs[index] = output
        for index in self._outputs:
            self._leaves[index] = None
        return aliases

    def _is_made_here(self, leaf: Tensor) -> bool:
        if not _has_gradients(leaf) or self.state.holds(leaf):
            return False
        # A view of a tensor that needs a gradient, made without grad mode, says that it is a leaf that requires grad.
        return not leaf.requires_grad or not leaf.is_leaf or leaf._is_view()

    def run_again(self) -> tuple[list[Any], dict[int, Tensor]]:
        """Run the function again; return the outputs, and a dict for gradients that arrive at inputs."""
        if self._is_dropped:
            problem = "backward came here again after this region's memory had been freed"
            raise RegionError(
                Problem(self.where, problem, fix="pass retain_graph=True to the backward call before this one")
            )
        self.state.check(None, self.where)
        arrived: dict[int, Tensor] = {}
        with self._lock, self.state.restored(None), torch.enable_grad():
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
        return [leaves[place] if place < len(leaves) else None for place in self.places], arrived

    def paired(self, outputs: Sequence[Any], grads: Sequence[Any]) -> list[tuple[Tensor, Tensor]]:
        """Return the recomputed outputs that have a history, with the gradients that came in for them."""
        pairs = []
        for index, output, grad in zip(self.places, outputs, grads, strict=True):
            if grad is None:
                continue
            if not isinstance(output, Tensor) or (self._checks and metadata(output) != metadata(grad)):
                now = f"{describe(output)} on {output.device}" if isinstance(output, Tensor) else "not a tensor"
                then = f"{describe(grad)} on {grad.device}"
                self.refuse(f"result {index} was {then} in forward and is {now} in recomputation")
            if output.requires_grad:
                pairs.append((output, grad))
        return pairs

    def drop(self) -> None:
        """Release what a rerun needs."""
        self._is_dropped = True
        self.inputs.drop()
        self.state.drop()

    def check_backward(self) -> None:
        """Raise if this way does not support the running backward."""
        if not is_for_every_leaf():
            problem = "neither torch.autograd.grad nor backward(inputs=...) can go through a reentrant region"
            self.refuse(problem, fix="call backward() without inputs")
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
            outputs, arrived = call.run_again()
        except torch.OutOfMemoryError as error:
            call.add_note(error)
            raise
        pairs = call.paired(outputs, grads)
        del outputs
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        if not graph_is_retained():
            call.drop()
        return None, *(arrived.get(position) for position in range(len(ctx.needs_input_grad) - 1))


def can_be_reentrant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument requires a gradient, as a node needs, and the node sees all that do."""
    leaves = [*args, *kwargs.values()]
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
        leaves = tree_leaves((args, kwargs))
    for leaf in leaves:  # of tensors inside of objects (a cache of keys) the node knows nothing
        if is_own_object(leaf) and (any(map(_needs_grad, attributes_of(leaf).values())) or reaches_graph(leaf)):
            return False
    return any(map(_needs_grad, leaves))


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _has_gradients(value: Any) -> bool:
    """Return whether a value can have a gradient, by its dtype."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _held(tensor: Tensor, hooks: PackHooks | None) -> Any:
    """Return what to hold of an input: without its graph, and packed by the hooks around the region."""
    if type(tensor) is Parameter:
        return tensor
    return pack_with_outer_hooks(tensor if tensor.is_leaf else tensor.detach(), hooks)


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
