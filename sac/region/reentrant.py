"""The reentrant frame: backward runs the region again under grad mode, as `use_reentrant=True` does in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from sac.errors import RegionError
from sac.region.ambient import subclasses_on
from sac.region.compiled_graphs import never_compiled
from sac.region.fingerprint import PLAIN, attributes_of
from sac.region.frame import ALL, RETAIN, NoEarlyStop, RegionCall
from sac.region.inputs import RegionInputs
from sac.region.undo import UndoStack
from sac.region.writes import check_writes, give_history
from sac.tensors import describe, detached, metadata, unchanged
from sac.torch_private import graph_is_retained, is_for_every_leaf, tree_flatten, tree_unflatten

# -- Results of a region and outputs of its node

# Note [Results of a node]
#
# Autograd attaches the history of a node's outputs to the tensors themselves. So only tensors that the region made can
# be outputs, and even those are replaced by aliases: a buffer that is returned must not get a history. A returned
# argument or captured leaf is returned as it is, and so is a tensor whose dtype allows no gradient.
#
# The alias may be written to in place, like the result of the plain call. If the result is a view of an argument, of a
# tensor that needs a gradient, or of the storage of another result, such a write would have to change more than one
# history: autograd refuses to write to the alias in this case. If the result is a view of an argument that the region
# wrote to or received as an alias, it is rebuilt as a view of the caller's tensor, after that tensor has its history.


class Results:
    """The leaves of a region's result, and which of them become outputs of its node; see Note [Results of a node].

    ``given``: the leaves of its arguments, as the caller holds them. ``passed``: aliases of these leaves, if the
    function ran on them with grad enabled; then a result that needs no gradient is not an output of the node.
    ``written``: the positions of the arguments that the function wrote to.
    """

    __slots__ = ("_given", "_leaves", "_outputs", "_spec", "_tensors", "_views", "indices", "problem")

    def __init__(
        self, result: Any, given: list[Any], passed: list[Any] | None = None, written: Collection[int] = ()
    ) -> None:
        self._given = given
        self._leaves, self._spec = leaves, _ = flatten(result)
        used = passed or given
        own = {id(one): number for number, one in enumerate(used)}
        parents = written if passed is None else [at for at, one in enumerate(used) if isinstance(one, torch.Tensor)]
        roots = {id(_root(used[position])): position for position in parents} if parents else {}
        self.indices: list[int] = []  # for each output of the node, its index among the leaves
        self.problem: tuple[str, str] | None = None  # what is wrong with the result, and how to fix it
        self._tensors: list[torch.Tensor] = []
        self._outputs: list[tuple[int, int]] = []  # index of a leaf, index of the output
        self._views: list[tuple[int, int]] = []  # index of a leaf, position of the argument to rebuild the view from
        known: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in PLAIN and id(leaf) not in own and _holds_tensors(leaf):
                    self.problem = _hidden(leaf)
            elif id(leaf) in own:
                leaves[number] = given[own[id(leaf)]]
            elif roots and leaf._is_view() and id(_root(leaf)) in roots:
                position = roots[id(_root(leaf))]
                if _can_be_remade(leaf, given[position]):
                    self._views.append((number, position))
                elif position in written:
                    self.problem = _odd_view(position)
            elif _is_made_here(leaf) and (passed is None or leaf.requires_grad):
                index = known.setdefault(id(leaf), len(known))
                self._outputs.append((number, index))
                if index == len(self._tensors):
                    self._tensors.append(leaf)
                    self.indices.append(number)

    def aliases(self) -> list[torch.Tensor]:
        """Return the outputs of the node, one for each of ``indices``."""
        found = []
        for tensor in self._tensors:
            if tensor._is_view():
                return self._aliases_among_views()
            found.append(detached(tensor))
        return found

    def _aliases_among_views(self) -> list[torch.Tensor]:
        roots = [_root(tensor) for tensor in self._tensors]
        if len(roots) == 1 and not roots[0].requires_grad and not self._lies_in_an_argument(roots[0]):
            return [detached(self._tensors[0])]  # the result of most layers: a product, viewed in the input's shape
        given = [_root(one) for one in self._given if isinstance(one, torch.Tensor)]
        lying_in = Counter(id(root) for root in (*roots, *given))
        return [
            _unwritable(tensor) if root.requires_grad or lying_in[id(root)] > 1 else detached(tensor)
            for tensor, root in zip(self._tensors, roots, strict=True)
        ]

    def _lies_in_an_argument(self, root: torch.Tensor) -> bool:
        return any(isinstance(one, torch.Tensor) and _root(one) is root for one in self._given)

    def value(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the result with the node's ``outputs`` in it; call it when written arguments have their history."""
        leaves = self._leaves
        for number, index in self._outputs:
            leaves[number] = outputs[index]
        for number, position in self._views:
            leaf, own = leaves[number], self._given[position]
            leaves[number] = own.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
        return leaves[0] if self._spec is None else tree_unflatten(leaves, self._spec)


def flatten(result: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a result and its structure, None for a single tensor."""
    return ([result], None) if isinstance(result, torch.Tensor) else tree_flatten(result)


def has_gradients(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can have a gradient, by its dtype."""
    return tensor.is_floating_point() or tensor.is_complex()


def _is_made_here(leaf: torch.Tensor) -> bool:
    if not leaf.requires_grad:
        return has_gradients(leaf)
    # A view of a tensor that needs a gradient, made without grad mode, reports that it is a leaf that requires grad.
    return not leaf.is_leaf or leaf._is_view()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


def _can_be_remade(view: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether ``view`` differs from ``own`` only in shape, strides and offset."""
    sorts = [(type(one), one.dtype, one.is_conj(), one.is_neg()) for one in (view, own)]
    return sorts[0] == sorts[1]


def _unwritable(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    return alias.view_as(alias)


def _holds_tensors(leaf: Any) -> bool:
    """Return whether an object that is not a pytree has an attribute that could have a gradient."""
    return any(isinstance(one, torch.Tensor) and has_gradients(one) for one in attributes_of(leaf).values())


def _hidden(leaf: Any) -> tuple[str, str]:
    found = f"the region returned a {type(leaf).__qualname__}, and autograd does not see the tensors that it holds"
    return found, "return tuples, lists, dicts or what is registered as a pytree"


def _odd_view(position: int) -> tuple[str, str]:
    found = f"the region wrote to its input {position} and returned a view of it that is conjugated or of another dtype"
    return found, "return a clone of it"


# -- The reentrant frame

# Note [The reentrant walk]
#
# Forward. The function runs on the caller's own arguments with grad disabled: autograd saves nothing. Then one node,
# `_Reentrant`, is put into the graph between the arguments that need a gradient and the results that can have one. Grad
# mode was off, so it is unknown which results depend on a trained tensor: each floating-point result counts, and
# gradients of results that turn out not to depend on one are dropped. If no argument and no parameter of the region's
# modules needs a gradient, a closure may still hold a weight: the forward then runs with grad enabled, and its graph,
# which is not kept, gives the answer. A node needs an input that requires grad; a region that has none but trains
# weights gets an empty one. Some modules choose other kernels without grad mode (an LSTM on a CPU, attention in
# evaluation): the results then come from those kernels, as in torch's own reentrant mode.
#
# Backward. The function runs again with grad enabled, and backward is called on its results with the incoming
# gradients. This accumulates into parameters directly, and the node returns the gradients that arrive at the arguments.
# The run is never stopped early, because the whole graph is needed, including its last node. The graph is built and
# consumed at once, so a second backward builds another. Because backward runs inside backward, this mode allows neither
# `torch.autograd.grad` nor `backward(inputs=...)` (the inner one would accumulate into every parameter) nor double
# backward (the returned gradients have no graph). The node covers only tensors in the function's result, not tensors
# that the function stores elsewhere. If the function reads an activation that is not an argument, the inner backward
# goes through the graph of that activation.


class _Reentrant(torch.autograd.Function):
    """The node of a region in the graph."""

    @staticmethod
    def forward(ctx: Any, call: ReentrantFrame, outputs: Sequence[torch.Tensor], *inputs: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return None, None, *ctx.call.backward(grads)


class _Start(torch.autograd.Function):
    """An argument of the recomputation: records the gradient that arrives there unchanged.

    A leaf's own ``grad`` may be a copy, with other strides than those that the plain backward would pass on.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, arrived: dict[int, torch.Tensor], position: int) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.arrived, ctx.position = arrived, position
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if grads[0] is not None:
            ctx.arrived[ctx.position] = grads[0]
        return None, None, None


_OTHER_MODE = "pass use_reentrant=False"


class ReentrantFrame(RegionCall):
    """The frame of ``use_reentrant=True``; see Note [The reentrant walk]."""

    def run(self, inputs: RegionInputs, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See ``RegionCall.run``."""
        self._begin(inputs)
        given = inputs.leaves_of(args, kwargs)
        passed = None
        if self._trains(given):
            with torch.no_grad():
                result = self._run_forward(args, kwargs)
        else:
            aliases = {
                id(one): detached(one)
                for one in given
                if isinstance(one, torch.Tensor) and not isinstance(one, Parameter)
            }
            passed = [aliases.get(id(one), one) for one in given]  # a tensor that is passed twice gets one alias
            args, kwargs = inputs.unflatten(passed)
            with saved_tensors_hooks(detached, unchanged):  # hides this graph from the outer hooks: they get the inputs
                result = self._run_forward(args, kwargs)
        written = self._written(given)
        results = Results(result, given, passed, written)
        self._check_left(inputs.leaves_of(args, kwargs), passed or given, results.problem)
        self._keep([], ALL if results.indices or written else -1)
        changed = self._get_history(written, given, passed) if written else []
        if results.indices or changed:
            return self._attached(results, changed, given)
        self._drop()
        return results.value(()) if passed or written else result

    def _trains(self, given: list[Any]) -> bool:
        """Return whether an argument needs a gradient, or a parameter of the region's modules."""
        for one in given:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                return True
        parameters = (one for owner in self.owners for one in owner._parameters.values())
        return any(one is not None and one.requires_grad for one in parameters)

    def _attached(self, results: Results, changed: list[int], given: list[Any]) -> Any:
        """Put the node into the graph; return the result with its outputs."""
        self._places, self._changed = results.indices, changed
        self._sources = [kept.position for kept in self.inputs.tensors if kept.needs_grad]
        outputs = results.aliases() + [detached(given[position]) for position in changed]
        sources = [given[position] for position in self._sources] or [torch.empty(0, requires_grad=True)]
        outputs = _Reentrant.apply(self, outputs, *sources)  # type: ignore[no-untyped-call]
        for position, output in zip(changed, outputs[len(results.indices) :], strict=True):
            give_history(given[position], output)
        return results.value(outputs)

    @never_compiled
    def backward(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Run the region and its backward; return the gradients of the arguments that are the node's inputs."""
        self._check_backward()
        try:
            return self._again_and_backward(grads)
        except torch.OutOfMemoryError as error:
            self.settings.add_note(error)
            raise

    def _again_and_backward(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        last = not graph_is_retained()
        with self._lock:
            result, tensors, arrived = self._run_again()
        pairs = self._paired(result, tensors, grads)
        del result, tensors
        if pairs:
            torch.autograd.backward([root for root, _ in pairs], [grad for _, grad in pairs])
        if last:
            self._drop()
        return tuple(arrived.get(position) for position in self._sources) or (None,)

    def _run_again(self) -> tuple[Any, dict[int, torch.Tensor], dict[int, torch.Tensor]]:
        """Run the function again; return its result, its tensor arguments, and a dict for gradients arriving there."""
        arrived: dict[int, torch.Tensor] = {}

        def start(leaf: torch.Tensor, position: int) -> torch.Tensor:
            return _Start.apply(leaf, arrived, position)  # type: ignore[no-untyped-call,no-any-return]

        with torch.enable_grad(), subclasses_on():
            args, kwargs, tensors = self.inputs.rebuild(self.path, start)
        with UndoStack() as stack:
            self._enter_forward_again(stack, tensors, NoEarlyStop())
            result = self.function(*args, **kwargs)
        if self.recorder is not None:
            self.recorder.check_recomputed()
        return result, dict(tensors), arrived

    def _paired(
        self, result: Any, tensors: dict[int, torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each recomputed output that has a graph, and the gradient that came in for it."""
        leaves, _ = flatten(result)
        count = len(self._places)
        pairs = [
            (self._checked(number, leaves, grad), grad)
            for number, grad in zip(self._places, grads[:count], strict=True)
            if grad is not None
        ]
        written = [tensors[position] for position in self._changed]
        pairs += [(root, grad) for root, grad in zip(written, grads[count:], strict=True) if grad is not None]
        return [(root, grad) for root, grad in pairs if root.requires_grad]

    # Writes to arguments

    def _written(self, given: list[Any]) -> list[int]:
        """Return the positions of the arguments that the function wrote to, and that may have a gradient."""
        kept = [one.position for one in self.inputs.tensors if one.written or one.was_changed]
        return [position for position in kept if has_gradients(given[position])]

    def _get_history(self, written: list[int], given: list[Any], passed: list[Any] | None) -> list[int]:
        """Return which of the ``written`` arguments have a history that leads through the region."""
        try:
            check_writes({position: given[position] for position in written}, self.path)
        except RegionError:
            self._take_back(written, given)
            raise
        if passed is None and not all(given[position].requires_grad for position in written):
            with saved_tensors_hooks(detached, unchanged):  # an extra run: only grad mode shows what was written there
                _, tensors, _ = self._run_again()
            return [position for position in written if tensors[position].requires_grad]
        return [position for position in written if passed is None or passed[position].requires_grad]

    def _take_back(self, written: list[int], given: list[Any]) -> None:
        """Restore the caller's tensors to their values before the region."""
        _, _, before = self.inputs.rebuild(self.path, lambda leaf, _: leaf)
        with torch.no_grad():
            for position, tensor in before:
                if position in written:
                    given[position].copy_(tensor)

    # Unsupported uses

    def _check_left(self, after: list[Any], before: list[Any], problem: tuple[str, str] | None) -> None:
        """Raise if the function left tensors where their gradients would be lost."""
        if problem is not None:
            found, fix = problem
            raise RegionError(self._problem(found, fix=f"{fix}, or {_OTHER_MODE}"))
        known = {id(one) for one in before}
        if any(id(one) not in known and isinstance(one, torch.Tensor) and has_gradients(one) for one in after):
            raise RegionError(
                self._problem(
                    "the region put a tensor into a container that it was given, and autograd does not see it there",
                    fix=f"return the tensor, or {_OTHER_MODE}",
                )
            )

    def _check_backward(self) -> None:
        """Raise if this mode does not support this backward."""
        if not is_for_every_leaf():
            found = "neither torch.autograd.grad nor backward(inputs=...) can go through a reentrant region"
            raise RegionError(self._problem(found, fix=f"call backward() without inputs, or {_OTHER_MODE}"))
        if torch.is_grad_enabled():
            found = "a reentrant region has no double backward (this one was called with create_graph=True)"
            raise RegionError(self._problem(found, fix=_OTHER_MODE))
        if self._dropped:
            raise RegionError(
                self._problem("backward came here again after this region's memory had been freed", RETAIN)
            )

    def _checked(self, position: int, leaves: list[Any], grad: torch.Tensor) -> torch.Tensor:
        """Return the recomputed result at ``position``; raise if it does not match forward's, and thus ``grad``."""
        again = leaves[position] if position < len(leaves) else None
        if not isinstance(again, torch.Tensor):
            raise RegionError(
                self._problem(f"result {position} was a tensor in forward and is not a tensor in recomputation")
            )
        if self.settings.checks_metadata and metadata(again) != metadata(grad):
            forward, now = (f"{describe(one)} on {one.device}" for one in (grad, again))
            raise RegionError(
                self._problem(f"result {position} was {forward} in forward and is {now} in recomputation")
            )
        return again
