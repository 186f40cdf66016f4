"""`sac.apply`: activation checkpointing of a model; `sac.checkpoint`: full recomputation of one function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import nn

from sac.blocks import applying
from sac.config import DEFAULT_CONFIG, FullConfig, parse_config, settings_of
from sac.config_keys import CALL_DEFAULTS
from sac.engine.compiled import run_in_eager, run_traced
from sac.engine.region import FULL_TABLE, run_as_region
from sac.engine.settings import PLAIN, Settings
from sac.errors import ConfigError, Problem
from sac.planner.controller import Controller
from sac.reporting import note_memory


def apply(
    model: nn.Module,
    value: Any,
    *,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
) -> nn.Module:
    """Apply activation checkpointing to ``model`` in place and return the model.

    ``value`` is the value under ``activation_checkpointing:`` in a training config; ``sac.config.parse_config``
    documents its forms. Gradients stay bit-identical. Parameter names, ``state_dict``, classes, ``deepcopy`` and pickle
    are unaffected. The model's own checkpointing cannot be turned on afterwards; see Note [Both on] in
    ``sac.blocks.other_checkpointing``.
    ``tp_group`` and ``get_rng_state_tracker`` are those of ``sac.checkpoint``. The group is used only if the config
    scatters inputs, so it can be passed with every config.

    With a ``budget``, the first step runs under full recomputation and is observed; from the second step on, the
    fastest policy within the budget is used. ``PlanError`` is raised when the second step begins if there is none.

    Under ``torch.compile``, regions are part of the graph. Features that a graph cannot contain (inputs kept elsewhere,
    trackers, generators, state providers, ``use_reentrant``, a budget) run in eager inside the compiled model, with a
    graph break.

    Raises ``ConfigError`` or ``PolicyError`` for an invalid value, and ``ModelError`` for a model that cannot be
    checkpointed (no blocks found, sac or the model's own checkpointing is already on, or chunks of layers in a model
    that calls its layers one by one). The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("sac.apply", f"model is a {type(model).__name__}", expected="a torch.nn.Module"))
    config = parse_config(value)
    put_on = partial(applying.apply, model, config) if config.budget is None else Controller(model, config).put_on
    put_on(tp_group=tp_group, get_rng_state_tracker=get_rng_state_tracker)
    note_memory(model)
    return model


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
