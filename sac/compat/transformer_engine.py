"""TransformerEngine's ``checkpoint``, implemented with ``sac.checkpoint``.

Intentional differences: the caller's tensors are never touched; activations are scattered in both modes, for any
function, number of elements, strides and device. FP8 state (scales, histories of maxima, the autocast with its recipe
and group) is that of the forward in recomputation, for backwards in the order of their forwards, and advances once. A
function with modules that can run in FP8 is not reentrant, even with ``use_reentrant=True``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import noop_context_fn

from sac.checkpointing import run_as
from sac.config_keys import CALL_DEFAULTS
from sac.errors import ConfigError, Problem
from sac.rng_tracker import CudaRNGStatesTracker

__all__ = ["CudaRNGStatesTracker", "checkpoint"]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    context_fn: Callable[[], Any] = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region that is recomputed in backward; return its result.

    ``distribute_saved_activations``: keep the first floating-point input scattered over ``tp_group``; None is the
    default group. ``get_rng_state_tracker`` returns the tracker of named random states that the function forks. The old
    form, ``checkpoint(function, distribute_saved_activations, get_rng_state_tracker, tp_group, *args)``, is accepted
    with a ``DeprecationWarning``. ``debug`` changes nothing.

    Raises ``ConfigError`` for a ``context_fn``, and otherwise what ``sac.checkpoint`` raises.
    """
    is_group = len(args) > 3 and (args[2] is None or isinstance(args[2], getattr(dist, "ProcessGroup", ())))
    if is_group and isinstance(args[0], bool) and callable(args[1]):
        text = "distribute_saved_activations, get_rng_state_tracker and tp_group are keywords of checkpoint"
        warnings.warn(f"{text}: by position they will be arguments of the function", DeprecationWarning, stacklevel=2)
        distribute_saved_activations, get_rng_state_tracker, tp_group, *rest = args
        args = tuple(rest)
    if context_fn is not noop_context_fn and torch.is_grad_enabled():
        fix = 'choose per op with sac.apply(model, "selective"), or put state back with FullConfig(state=...)'
        raise ConfigError(Problem("transformer_engine.checkpoint.context_fn", "its contexts are not entered", fix=fix))
    if distribute_saved_activations is True and tp_group is None and dist.is_available() and dist.is_initialized():
        tp_group = dist.group.WORLD
    options = {name: value for name, value in locals().items() if name in CALL_DEFAULTS}
    return run_as("transformer_engine.checkpoint", function, args, kwargs, **options)
