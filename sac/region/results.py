"""What a region returned, and what of it becomes an output of the region's node in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from sac.region.detach import detached
from sac.region.parts import PLAIN, attributes_of

# Note [Results of a node]
#
# Autograd writes the history of a node's outputs onto the tensors themselves, so only what the region made can be one,
# and even that is stood for by an alias: a buffer that is returned must not get a history. An argument or a captured
# leaf that is returned is given back as it is, and so is what can have no gradient by its dtype.
#
# The alias may be written to in place, as the result of the plain call may. If the result is a view into an argument,
# into something that needs a gradient, or into what another result lies in too, such a write would have to change more
# than one history: then the alias is one that autograd refuses to write to. If the result is a view into an argument
# that the region wrote to, or got an alias of, it is made anew as a view of what the caller holds, once that has its
# history.


class Results:
    """The leaves of what a region returned, and those that are to be outputs of its node; see Note [Results of a node].

    ``given``: the leaves of its arguments, as the caller holds them. ``passed``: aliases of them, if the function was
    run on those with grad enabled; then a result that needs no gradient is no output of the node. ``written``: the
    positions of the arguments that the function wrote to.
    """

    __slots__ = ("_given", "_leaves", "_outputs", "_spec", "_tensors", "_views", "places", "problem")

    def __init__(
        self, result: Any, given: list[Any], passed: list[Any] | None = None, written: Collection[int] = ()
    ) -> None:
        self._given = given
        self._leaves, self._spec = leaves, _ = flatten(result)
        used = passed or given
        own = {id(one): place for place, one in enumerate(used)}
        parents = written if passed is None else [at for at, one in enumerate(used) if isinstance(one, torch.Tensor)]
        roots = {id(_root(used[position])): position for position in parents} if parents else {}
        self.places: list[int] = []  # for each output of the node, where it stands among the leaves
        self.problem: tuple[str, str] | None = None  # what is wrong with the result, and how to mend it
        self._tensors: list[torch.Tensor] = []
        self._outputs: list[tuple[int, int]] = []  # place of a leaf, and which of the outputs it is
        self._views: list[tuple[int, int]] = []  # place of a leaf, and position of the argument to make it anew of
        known: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in PLAIN and id(leaf) not in own and _holds_tensors(leaf):
                    self.problem = _hidden(leaf)
            elif id(leaf) in own:
                leaves[place] = given[own[id(leaf)]]
            elif roots and leaf._is_view() and id(_root(leaf)) in roots:
                position = roots[id(_root(leaf))]
                if _can_be_remade(leaf, given[position]):
                    self._views.append((place, position))
                elif position in written:
                    self.problem = _odd_view(position)
            elif _is_made_here(leaf) and (passed is None or leaf.requires_grad):
                index = known.setdefault(id(leaf), len(known))
                self._outputs.append((place, index))
                if index == len(self._tensors):
                    self._tensors.append(leaf)
                    self.places.append(place)

    def aliases(self) -> list[torch.Tensor]:
        """Return what the node is to return for its ``places``."""
        found = []
        for tensor in self._tensors:
            if tensor._is_view():
                return self._aliases_among_views()
            found.append(detached(tensor))
        return found

    def _aliases_among_views(self) -> list[torch.Tensor]:
        roots = [_root(tensor) for tensor in self._tensors]
        if len(roots) == 1 and not roots[0].requires_grad and not self._lies_in_an_argument(roots[0]):
            return [detached(self._tensors[0])]  # what most layers return: a product, laid out as its input was
        given = [_root(one) for one in self._given if isinstance(one, torch.Tensor)]
        lying_in = Counter(id(root) for root in (*roots, *given))
        return [
            _unwritable(tensor) if root.requires_grad or lying_in[id(root)] > 1 else detached(tensor)
            for tensor, root in zip(self._tensors, roots, strict=True)
        ]

    def _lies_in_an_argument(self, root: torch.Tensor) -> bool:
        return any(isinstance(one, torch.Tensor) and _root(one) is root for one in self._given)

    def value(self, outputs: Sequence[torch.Tensor]) -> Any:
        """Return the result with the ``outputs`` of the node in it; written arguments have their history by now."""
        leaves = self._leaves
        for place, index in self._outputs:
            leaves[place] = outputs[index]
        for place, position in self._views:
            leaf, own = leaves[place], self._given[position]
            leaves[place] = own.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
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
    # A view that is made without grad mode, of what needs a gradient, calls itself a leaf that requires grad.
    return not leaf.is_leaf or leaf._is_view()


def _root(tensor: torch.Tensor) -> torch.Tensor:
    base = tensor._base
    return tensor if base is None else base


def _can_be_remade(view: torch.Tensor, own: torch.Tensor) -> bool:
    """Return whether strides and an offset are all that makes ``view`` of ``own``."""
    sorts = [(type(one), one.dtype, one.is_conj(), one.is_neg()) for one in (view, own)]
    return sorts[0] == sorts[1]


def _unwritable(tensor: torch.Tensor) -> torch.Tensor:
    alias = tensor.detach()
    return alias.view_as(alias)


def _holds_tensors(leaf: Any) -> bool:
    """Return whether an object that is no pytree has something under a name that could have a gradient."""
    return any(isinstance(one, torch.Tensor) and has_gradients(one) for one in attributes_of(leaf).values())


def _hidden(leaf: Any) -> tuple[str, str]:
    found = f"the region returned a {type(leaf).__qualname__}, and autograd does not see the tensors that it holds"
    return found, "return tuples, lists, dicts or what is registered as a pytree"


def _odd_view(position: int) -> tuple[str, str]:
    found = f"the region wrote to its input {position} and returned a view of it that is conjugated or of another dtype"
    return found, "return a clone of it"
