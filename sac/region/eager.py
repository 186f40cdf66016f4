"""Calls that Dynamo does not look into."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

# Note [Backward under Dynamo]
#
# Compiled autograd traces what the engine would do in backward, our hooks among it. A region whose forward was not
# compiled must not be compiled when it runs again either: graphs do not save for backward what the ops would, one by
# one. So the functions that backward calls are marked as ones that Dynamo neither traces nor compiles, nor anything
# that they call; what the user has compiled inside the region runs as ever. They are marked, and not wrapped as
# `torch.compiler.disable` would: backward calls them for each saved tensor.

Function = TypeVar("Function", bound=Callable[..., Any])


def never_compiled(function: Function) -> Function:
    """Mark ``function`` as in Note [Backward under Dynamo], and return it."""
    reason = "sac recomputes in eager what ran in eager"
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    # Private names (torch 2.7 to 2.13). Without them Dynamo may compile parts of the recomputation.
    core: Any = getattr(torch._C._dynamo, "eval_frame", None)
    set_strategy = getattr(core, "set_code_exec_strategy", None)
    if set_strategy is not None:
        skip = core._FrameAction.SKIP
        set_strategy(function.__code__, core._FrameExecStrategy(skip, skip))
    return function


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def kept_out_of_graphs(reason: str) -> Callable[..., Any]:
    """Return a function that calls its first argument with the others, in eager; Dynamo gives ``reason`` for it."""
    # Private name (torch 2.1 to 2.13): `torch.compiler.disable` does the same, and loads all of Dynamo right now.
    disable: Callable[..., Any] = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    wrapped: Callable[..., Any] = disable(_call)
    # Read by Dynamo for its message (torch 2.13, held by tests/unit/region/test_eager.py).
    vars(wrapped).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return wrapped
