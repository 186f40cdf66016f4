"""Reentrant regions: recomputed inside of an autograd function whose backward calls backward again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sac.engine.flags import under_function_modes
from sac.engine.frame import Frame
from sac.engine.objects import is_own_object, tensors_in
from sac.engine.untraced import never_compiled
from sac.errors import Problem, RegionError
from sac.outer_hooks import active_hooks
from sac.tensors import describe, metadata
from sac.torch_private import graph_is_retained, is_for_every_leaf, tree_flatten, tree_leaves, tree_unflatten


class ReentrantFrame(Frame):
    """A call that is one node of the graph, which needs an argument that requires a gradient.

    Grad mode is off, so it is unknown which results depend on a trained tensor: each that can have a gradient counts.
    """

    records = False
    _leaves: Sequence[Any] = ()  # of the result, until the forward ends
    _spec: Any = None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function and return its result."""
        self.begin(args, kwargs, active_hooks())
        self._indices = [index for index, _ in self.inputs.tensors]
        outputs = _Node.apply(self, (args, kwargs), *(one for _, one in self.inputs.tensors))  # type: ignore[no-untyped-call]
        self.input_bytes, leaves, self._leaves = self.inputs.bytes, self._leaves, []
        aliases = dict(zip(map(id, _outputs(leaves)), outputs, strict=True))
        result = tree_unflatten([aliases.get(id(leaf), leaf) for leaf in leaves], self._spec)
        if self.call is not None:
            self.call.mark(tree_leaves(result))
        return result

    def refuse(self, problem: str, fix: str = "pass use_reentrant=False") -> None:
        """Raise ``RegionError``."""
        raise RegionError(Problem(self.where, problem, fix=fix))

    def forward(self, arguments: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the forward; return aliases of the tensors in its result: autograd attaches a history to them."""
        args, kwargs = arguments
        self._leaves, self._spec = tree_flatten(self.function(*args, **kwargs))
        if written := self.inputs.written():
            self.refuse(f"a reentrant region may not write to an argument, here {describe(written[0])}")
        known = {id(tensor) for tensor in tensors}
        for leaf in (*tree_leaves(arguments), *(one for one in self._leaves if is_own_object(one))):
            if id(leaf) not in known and any(map(_has_gradients, tensors_in(leaf))):
                self.refuse("the region put a tensor into a container or object, where autograd does not see it")
        outputs = _outputs(self._leaves)
        roots = Counter(id(_root(tensor)) for tensor in (*tensors, *outputs))
        self.inputs.end(self._packer())
        self.state.end()
        # Autograd refuses writes to a view: they would change an argument or another result, too.
        return [one.detach().view_as(one) if roots[id(_root(one))] > 1 else one.detach() for one in outputs]

    def backward(self, grads: Sequence[Any]) -> Sequence[Tensor | None]:
        """Run the function again, and backward through it; return the gradients of the tensors among the arguments."""
        if not is_for_every_leaf():
            self.refuse("neither torch.autograd.grad nor backward(inputs=...) can go through a reentrant region")
        if torch.is_grad_enabled():
            self.refuse("a reentrant region has no double backward (this one was called with create_graph=True)")
        if not self.inputs.leaves:
            problem = "backward came here again after this region's memory had been freed"
            self.refuse(problem, fix="pass retain_graph=True to the backward call before this one")
        self.state.check(None, self.where)
        arrived: dict[int, Tensor] = {}
        with self.state.restored(None), torch.enable_grad():
            args, kwargs = self.inputs.again(self.where, self.function, written=False)
            leaves = tree_leaves((args, kwargs))
            starts = {id(leaves[index]): position for position, index in reversed([*enumerate(self._indices)])}
            for leaf in leaves:
                if id(leaf) in starts and leaf.requires_grad:  # the gradient as it arrives: `grad` has other strides
                    leaf.register_hook(partial(arrived.__setitem__, starts.pop(id(leaf))))
            with under_function_modes(self.state.modes):
                outputs = _outputs(tree_leaves(self.function(*args, **kwargs)))
        if len(outputs) != len(grads):
            self.refuse(f"it returned {len(grads)} tensors in forward and {len(outputs)} in recomputation")
        pairs = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
        del outputs
        for index, (output, grad) in enumerate(pairs if self.settings.checks_metadata else ()):
            if metadata(output) != metadata(grad):
                now, then = f"{describe(output)} on {output.device}", f"{describe(grad)} on {grad.device}"
                self.refuse(f"result {index} was {then} in forward and is {now} in recomputation")
        if pairs := [pair for pair in pairs if pair[0].requires_grad]:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        if not graph_is_retained():
            self._drop()
        return [arrived.get(position) for position in range(len(self._indices))]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: ReentrantFrame, arguments: Any, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(call.forward(arguments, tensors))

    @staticmethod
    @never_compiled
    def backward(ctx: Any, *grads: Any) -> Any:
        call: ReentrantFrame = ctx.call
        try:
            return None, None, *call.backward(grads)
        except torch.OutOfMemoryError as error:
            call.settings.add_note(error)
            raise


def can_be_reentrant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an argument requires a gradient, as a node needs, and the node sees all that do."""
    leaves = [*args, *kwargs.values()]
    if any(isinstance(leaf, (list, tuple, dict)) for leaf in leaves):
        leaves = tree_leaves((args, kwargs))
    # Of tensors inside of objects (a cache of keys) the node knows nothing.
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves) and not any(
        map(is_own_object, leaves)
    )


def _outputs(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among the leaves of a result that can have a gradient, by their dtype, each once."""
    return list({id(leaf): leaf for leaf in leaves if _has_gradients(leaf)}.values())


def _has_gradients(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _root(tensor: Tensor) -> Tensor:
    base = tensor._base
    return tensor if base is None else base
