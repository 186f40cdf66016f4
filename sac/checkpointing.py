"""`sac.checkpoint`: full recomputation of one function."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

import torch

from sac.config import DEFAULT_CONFIG, FullConfig, settings_of
from sac.config_keys import CALL_DEFAULTS
from sac.engine.compiled import run_in_eager, run_traced
from sac.engine.region import FULL_TABLE, run_as_region
from sac.engine.settings import PLAIN, Settings


def checkpoint(
    function: Callable[..., Any],
    /,
    *args: Any,
    use_reentrant: bool = False,
    distribute_saved_activations: bool = False,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    preserve_rng_state: bool = True,
    early_stop: bool = True,
    determinism_check: str = "default",
    config: FullConfig | None = None,
    **kwargs: Any,
) -> Any:
    """Run ``function(*args, **kwargs)`` as a region that is recomputed as a whole in backward; return its result.

    Arguments and results may have any structure. Gradients are bit for bit those of the plain call, dropout included:
    recomputation restores random states, autocast and the buffers of ``function`` (if it is a module) to their state in
    forward. Nondeterministic routing ops keep their results. With grad mode off, this is the plain call. In a function
    that ``torch.compile`` compiles, the region is part of the graph; with any of the arguments below it runs in eager.

    ``use_reentrant``: recompute inside an autograd function whose backward calls backward again. Leave it off. Only the
    non-reentrant mode stops early, and supports ``torch.autograd.grad`` and double backward. Only the non-reentrant
    mode knows which results need a gradient (in reentrant mode every floating-point result requires grad), and keeps
    the graph of tensors that ``function`` stores elsewhere than in its result.
    ``distribute_saved_activations``: scatter the first floating-point input over ``tp_group`` (a process group or a
    one-dimensional mesh that contains this rank): each rank holds 1 / group size of it until backward.
    ``get_rng_state_tracker``: returns a tracker of named RNG states (ours, Megatron's, TransformerEngine's or
    DeepSpeed's), whose states are restored too. ``preserve_rng_state``: whether to restore random states at all.
    ``early_stop``: end recomputation as soon as it has all that backward needs. torch's
    ``set_checkpoint_early_stop`` around the call takes precedence. ``determinism_check``: ``default`` compares shape,
    dtype and device of the tensors that recomputation saves with those that forward saved; ``none`` does not.
    ``config``: all other options.

    Raises ``ConfigError`` at the call for options that cannot be carried out, and ``RegionError`` in backward if the
    function does not repeat itself or an input was modified in place after the forward.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    arguments = {  # in the order of `CALL_DEFAULTS`
        "use_reentrant": use_reentrant,
        "distribute_saved_activations": distribute_saved_activations,
        "preserve_rng_state": preserve_rng_state,
        "early_stop": early_stop,
        "determinism_check": determinism_check,
        "get_rng_state_tracker": get_rng_state_tracker,
        "tp_group": tp_group,
    }
    if config is None and all(map(is_, arguments.values(), CALL_DEFAULTS.values())):
        return run_with(PLAIN, function, args, kwargs)
    config = DEFAULT_CONFIG if config is None else config
    if torch.compiler.is_compiling():
        return run_in_eager(run_as, "sac.checkpoint", function, args, kwargs, config, **arguments)
    return run_as("sac.checkpoint", function, args, kwargs, config, **arguments)


def run_as(
    name: str, function: Callable[..., Any], args: Any, kwargs: Any, config: FullConfig = DEFAULT_CONFIG, **options: Any
) -> Any:
    """Run ``function(*args, **kwargs)`` as ``sac.checkpoint`` does; ``name`` names the call in messages."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    return run_with(settings_of(config, name, **options), function, args, kwargs)


def run_with(settings: Settings, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``function(*args, **kwargs)`` as a region with prepared settings; all keywords belong to the function."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        if settings.needs_frame:
            return run_in_eager(run_as_region, function, settings, args, kwargs)
        return run_traced(function, FULL_TABLE, args, kwargs)
    return run_as_region(function, settings, args, kwargs)
