"""A model's K/V cache: turning it off for training, and models whose layers share keys and values.

Note [K/V cache]
A block that writes its keys and values into a cache writes them again when it is recomputed, which doubles the sequence
length. So ``sac.apply`` turns the cache off at the switch that training reads: on the model's config and each config
below it. ``generation_config`` keeps its own switch: ``generate`` runs without grad and passes that switch to the
forward, so generation stays as fast as before (a test checks this). A call that asks for a cache anyway, or passes
one, is also correct (a rerun gets a copy of the objects among the arguments), but holds all keys and values until
backward.

In some models (Gemma 3n, Gemma 4), layers read the keys and values of another layer from a dictionary that attention
writes into. The dictionary is an argument of each block, and recomputation finds it in the same state as the forward
did, so whole blocks can be regions. Older releases pass keys and values through the cache, and in reentrant mode the
gradients of values read from the dictionary would be lost: there, regions that contain attention are refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from sac.errors import ModelError, Problem

SHARED_STATES = "shared_kv_states"  # the argument through which layers pass on keys and values
SHARES = "is_kv_shared_layer"  # on attention: whether it reads another layer's keys and values
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)


def turn_off_cache(model: nn.Module) -> tuple[Callable[[], None], ...]:
    """Set ``use_cache`` to False on every config where it is on, and return what turns it on again.

    A model whose layers share keys and values through the cache keeps it; see Note [K/V cache]. Raises ``ModelError``,
    with nothing changed, if a config cannot be written to.
    """
    if shares_kv(model) and not _passes_shared_kv(model):
        return ()
    undo: list[Callable[[], None]] = []
    for config in _configs(model):
        if getattr(config, "use_cache", False) is not True:
            continue
        try:
            config.use_cache = False
        except (AttributeError, TypeError) as error:
            for restore in undo:
                restore()
            found = "use_cache is on, so a recomputed block would write its cache twice, and it cannot be changed"
            fix = "build the model with use_cache=False"
            raise ModelError(Problem(type(config).__name__, found, fix=fix)) from error
        undo.append(partial(setattr, config, "use_cache", True))
    return tuple(undo)


def shares_kv(model: nn.Module) -> bool:
    """Return whether layers of the model read keys and values that another layer computed; see Note [K/V cache]."""
    return any(getattr(module, SHARES, False) is True for module in model.modules())


def refuse_shared_kv(model: nn.Module, blocks: Iterable[nn.Module], *, reentrant: bool) -> None:
    """Raise ``ModelError`` if recomputing ``blocks`` would lose or repeat keys and values that layers share."""
    if not shares_kv(model) or (_passes_shared_kv(model) and not reentrant):
        return
    if any(hasattr(part, SHARES) for block in blocks for part in block.modules()):
        why = "in reentrant mode" if reentrant else "because they pass through the K/V cache"
        fix = "leave use_reentrant out" if reentrant else "use a later release of transformers"
        found = f"its layers share keys and values, so attention cannot be recomputed {why}"
        fix = f'{fix}, or make parts without attention regions: blocks: ["**.mlp"]'
        raise ModelError(Problem(type(model).__name__, found, fix=fix))


def _passes_shared_kv(model: nn.Module) -> bool:
    """Return whether attention takes the shared keys and values as an argument."""
    sharing = (type(part).forward for part in model.modules() if hasattr(part, SHARES))
    return any(SHARED_STATES in inspect.signature(forward).parameters for forward in sharing)


def is_attention(path: str, module: nn.Module) -> bool:
    """Return whether a module looks like attention, by its name or its class."""
    return any(ATTENTION.search(name) for name in (path.rpartition(".")[2], type(module).__name__))


def _configs(model: nn.Module) -> Iterable[Any]:
    """Return every config object of a model once: those on its modules, and configs nested in them."""
    found: dict[int, Any] = {}
    ahead = [module.config for module in model.modules() if hasattr(module, "config")]
    while ahead:
        config = ahead.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = getattr(config, "__dict__", {}).values()
            ahead += [part for part in parts if hasattr(part, "use_cache") or hasattr(part, "model_type")]
    return found.values()
