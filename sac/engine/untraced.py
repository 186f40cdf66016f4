"""Calls that Dynamo does not trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sac.torch_private import disable_dynamo, run_in_eager, skip_dynamo

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
    run_in_eager(wrapped, reason)  # Dynamo reads it for its message; see tests/unit/region/test_compiled_graphs.py
    return wrapped
