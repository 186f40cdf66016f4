"""Compiled functions inside regions, and the tensors that autograd graphs save."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import torch

from sac.torch_private import (
    SAVED_TENSOR_PREFIX,
    SHOWS_SAVED_TENSORS,
    disable_dynamo,
    dynamo_is_loaded,
    run_in_eager,
    skip_dynamo,
    tree_leaves,
)

# -- Graphs of ``torch.compile`` inside a region, whose ops no rule sees

_NODE = "CompiledFunctionBackward"  # the class of AOTAutograd's nodes (torch 2.1 to 2.13, whatever the backend)


def count_compiled(output: Any, given: Any) -> int:
    """Return the number of compiled graphs between ``given`` and ``output``, both of any structure.

    A graph whose result needs no gradient is not counted.
    """
    if not dynamo_is_loaded():
        return 0
    seen: set[Any] = {leaf.grad_fn for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)} | {None}
    waiting: list[Any] = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    count = 0
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        count += type(node).__name__ == _NODE
        waiting.extend(following for following, _ in node.next_functions)
    return count


# -- Saved tensors of autograd nodes


def nodes_between(ends: Iterable[torch.Tensor], starts: Iterable[Any]) -> Iterator[Any]:
    """Yield the graph nodes that ``ends`` depend on, except those made before the first of ``starts``.

    Each thread numbers nodes in the order in which it makes them; without numbers the whole graph is walked.
    """
    first = min((node._sequence_nr() for node in starts if hasattr(node, "_sequence_nr")), default=-1)
    seen: set[Any] = set()
    waiting = [end.grad_fn for end in ends]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen or (first >= 0 and node._sequence_nr() < first):
            continue
        seen.add(node)
        yield node
        waiting.extend(following for following, _ in node.next_functions)


def saved_without_hooks(node: Any) -> Iterator[Any]:
    """Yield the tensors that a graph node saved, except those that hooks hold: reading these could recompute them.

    Yields nothing if ``SHOWS_SAVED_TENSORS`` is false.
    """
    if not SHOWS_SAVED_TENSORS:
        return
    for name in _names_of_saved(type(node)):  # type: ignore[arg-type]  # a class is hashable
        found = getattr(node, name)
        for saved in found if isinstance(found, (tuple, list)) else (found,):
            if saved is not None and saved.unpack_hook is None:
                yield saved


@lru_cache(maxsize=256)
def _names_of_saved(kind: type) -> tuple[str, ...]:
    """Return the attribute names under which nodes of one class have their saved tensors."""
    return tuple(name for name in dir(kind) if name.startswith(SAVED_TENSOR_PREFIX))


# -- Calls that Dynamo does not trace

# Note [Backward under Dynamo]
#
# Compiled autograd traces everything that the engine would do in backward, including sac's hooks. A region whose
# forward was not compiled must not be compiled when it runs again: a graph saves other tensors for backward than the
# single ops do. So the functions that backward calls are marked: Dynamo neither traces nor compiles them or the
# functions that they call. Functions that the user compiled inside the region run as usual. The functions are marked
# rather than wrapped, as `torch.compiler.disable` would do, because backward calls them for each saved tensor.

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Mark ``function`` as in Note [Backward under Dynamo], and return it."""
    run_in_eager(function, "sac recomputes in eager what ran in eager")
    skip_dynamo(function.__code__)
    return function


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def kept_out_of_graphs(reason: str) -> Callable[..., Any]:
    """Return a function that calls its first argument with the others, in eager; Dynamo reports ``reason`` for it."""
    wrapped: Callable[..., Any] = disable_dynamo(_call)
    run_in_eager(wrapped, reason)  # Dynamo reads it for its message; see tests/unit/region/test_eager.py
    return wrapped
