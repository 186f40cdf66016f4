"""Autocast inside the body of a custom op, which a dispatch mode would turn off."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sac.torch_private import OpOverload, autocast_of_caller, excluding

# Torch excludes the autocast key while a mode's handler runs (2.11 to 2.13), and excluding it is what turns autocast
# off: a custom op whose body leans on autocast would compute in another precision than without the mode. The state
# at the op's call is in the snapshot that torch takes for reentrant dispatch. An op with an autocast kernel of its own
# has had its casts made before the mode sees it, and its body runs without autocast in either case.

_BUILT_IN = frozenset({"aten", "prim", "prims", "_c10d_functional", "c10d", "fsdp", "profiler", "inductor"})


def is_custom_op(op: Any) -> bool:
    """Return whether ``op`` comes from a library, so that its body may call ops that autocast casts for."""
    return isinstance(op, OpOverload) and op.namespace not in _BUILT_IN


def as_called(op: Any, args: Any) -> AbstractContextManager[Any]:
    """Return the context that gives the body of ``op`` the autocast of its caller."""
    return as_then(callers_autocast(op, args))


def callers_autocast(op: Any, args: Any) -> tuple[Any, bool] | None:
    """Return a dispatch key, and whether the caller of ``op`` had it excluded; None where the body does not care."""
    tensor = next((value for value in args if isinstance(value, torch.Tensor)), None)
    return autocast_of_caller(op, "cpu" if tensor is None else tensor.device.type)


def as_then(found: tuple[Any, bool] | None) -> AbstractContextManager[Any]:
    """Return the context that puts back what ``callers_autocast`` has found."""
    return nullcontext() if found is None else excluding(*found)
