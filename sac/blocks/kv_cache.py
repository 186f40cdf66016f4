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
did, so whole blocks can be regions. Older releases pass keys and values through the
cache, and in reentrant mode the gradients of values read from the dictionary would be lost. In these two cases only the
sub-modules without attention become regions. If layers share keys and values through the cache, its switch is not
changed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sac.blocks.find import Block, part_of, substantial_children
from sac.blocks.paths import Node, root_node
from sac.errors import ModelError, Problem

SHARED_STATES = "shared_kv_states"  # the argument through which layers pass on keys and values
SHARED_LAYERS = "num_kv_shared_layers"  # on a config: how many layers read another layer's keys and values
SHARING_MODES = "kv_sharing_modes"  # on a config: per layer None, "store", or a word that starts with "reuse"
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
KV_ARGUMENTS = frozenset({SHARED_STATES, "past_key_values", "past_key_value", "layer_past"})


@dataclass(frozen=True, slots=True)
class Restore:
    """One changed attribute of a config and its previous value."""

    config: object
    name: str
    value: object

    def undo(self) -> None:
        """Set the attribute to its previous value."""
        setattr(self.config, self.name, self.value)


def cache_configs(model: nn.Module) -> Iterator[Any]:
    """Yield each config of the model and its sub-models whose ``use_cache`` is on, each object once."""
    return (config for config in _configs(model) if getattr(config, "use_cache", False) is True)


def turn_off_cache(model: nn.Module) -> tuple[Restore, ...]:
    """Set ``use_cache`` to False on every config where it is on, and return the changes, which can be undone.

    A config whose layers share keys and values through the cache keeps it; see Note [K/V cache]. Raises ``ModelError``,
    with nothing changed, if a config cannot be written to.
    """
    done: list[Restore] = []
    for config in cache_configs(model):
        if any(_is_shared(part) for part in _with_parts(config)) and not _attention_takes_shared_kv(model):
            continue
        try:
            config.use_cache = False
        except (AttributeError, TypeError) as error:
            for restore in done:
                restore.undo()
            raise ModelError(_cannot_turn_off(config)) from error
        done.append(Restore(config, "use_cache", True))
    return tuple(done)


def shares_kv(model: nn.Module) -> bool:
    """Return whether layers of the model read keys and values that another layer computed; see Note [K/V cache]."""
    if any(_is_shared(config) for config in _configs(model)):
        return True
    return any(getattr(module, "is_kv_shared_layer", False) is True for module in model.modules())


def takes_shared_kv(block: nn.Module) -> bool:
    """Return whether ``block`` takes the shared keys and values as an argument that its attention also takes."""
    own = _parameters_of(block)
    passes_on = SHARED_STATES in own or any(one.kind is one.VAR_KEYWORD for one in own.values())
    return passes_on and _attention_takes_shared_kv(block)


def _attention_takes_shared_kv(module: nn.Module) -> bool:
    return any(SHARED_STATES in _parameters_of(part) for part in module.modules())


def _parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a module's forward; empty for a scripted module, which has no signature."""
    try:
        return inspect.signature(type(module).forward).parameters
    except (AttributeError, TypeError, ValueError):
        return {}


def _is_shared(config: Any) -> bool:
    count, modes = getattr(config, SHARED_LAYERS, 0), getattr(config, SHARING_MODES, None)
    if isinstance(count, int) and count > 0:
        return True
    return isinstance(modes, (list, tuple)) and any(str(mode).startswith("reuse") for mode in modes)


def kv_free_submodules(block: Block) -> tuple[Block, ...]:
    """Return the sub-modules of a block that neither are nor contain attention, such as its mlp; may be empty."""
    return tuple(part_of(block, node) for node in _without_kv(root_node(block.module)))


def _without_kv(node: Node) -> Iterator[Node]:
    for child in substantial_children(node):
        if not any(is_attention(name, part) for name, part in child.module.named_modules()):
            yield child
        elif not is_attention(child.path, child.module):
            yield from _without_kv(child)


def is_attention(path: str, module: nn.Module) -> bool:
    """Return whether a module looks like attention, by its name, its class or its arguments."""
    if hasattr(module, "is_kv_shared_layer") or ATTENTION.search(path.rpartition(".")[2]):
        return True
    if ATTENTION.search(type(module).__name__):
        return True
    return not KV_ARGUMENTS.isdisjoint(_parameters_of(module))


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield every config object of a model once: those on its modules, and configs nested in them."""
    seen: set[int] = set()
    for module in model.modules():
        for config in _with_parts(getattr(module, "config", None)):
            if id(config) not in seen:
                seen.add(id(config))
                yield config


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs nested in it, at any depth."""
    seen: set[int] = set()
    ahead = [config]
    while ahead:
        part = ahead.pop()
        if part is None or id(part) in seen or isinstance(part, (nn.Module, type, str, int, float)):
            continue
        seen.add(id(part))
        yield part
        ahead.extend(value for value in getattr(part, "__dict__", {}).values() if _is_config(value))


def _is_config(value: object) -> bool:
    return hasattr(value, "use_cache") or hasattr(value, "model_type")


def _cannot_turn_off(config: object) -> Problem:
    return Problem(
        type(config).__name__,
        "use_cache is on, so a recomputed block would write its cache twice, and this config cannot be changed",
        fix="build the model with use_cache=False",
    )
