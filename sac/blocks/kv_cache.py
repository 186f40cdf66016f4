"""A model's K/V cache: turning it off for training, and models whose layers share keys and values.

Note [K/V cache]
A block that writes its keys and values into a cache does so again when it is recomputed, and its sequence is then twice
as long. So the cache is turned off where training reads the switch: on the model's config and each config below it.
``generation_config`` keeps its own: ``generate`` runs without grad and hands its switch to the forward itself, so
generating stays as fast as it was (held by a test). A call that asks for a cache all the same, or brings one, is right
too (Note [Objects as arguments] in ``sac.region.inputs``), but holds all keys and values until backward.

Models whose layers read the keys and values of another layer (Gemma 3n, Gemma 4) hand these through a dictionary that
attention writes into: an argument of each block, which recomputation finds as the forward did (Note [Objects as
arguments]), so that whole blocks can be regions. Older releases hand them through the cache, and in the reentrant mode
gradients of what is read from the dictionary would be lost: there only the other sub-modules are regions. Where the
cache is what layers share by, its switch is left as it is.
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
from sac.region.inputs import SHARED_STATES

SHARED_LAYERS = "num_kv_shared_layers"  # on a config: how many layers read another's keys and values
SHARING_MODES = "kv_sharing_modes"  # on a config: per layer None, "store", or a word that begins with "reuse"
ATTENTION = re.compile(r"attn|attention", re.IGNORECASE)
KV_ARGUMENTS = frozenset({SHARED_STATES, "past_key_values", "past_key_value", "layer_past"})


@dataclass(frozen=True, slots=True)
class Restore:
    """One attribute of a config that was changed, and what it was."""

    config: object
    name: str
    value: object

    def undo(self) -> None:
        """Set the attribute to what it was."""
        setattr(self.config, self.name, self.value)


def cache_configs(model: nn.Module) -> Iterator[Any]:
    """Yield each config of the model and its sub-models whose ``use_cache`` is on, each object once."""
    return (config for config in _configs(model) if getattr(config, "use_cache", False) is True)


def turn_off_cache(model: nn.Module) -> tuple[Restore, ...]:
    """Set ``use_cache`` to False on every config that has it on, and return what undoes that.

    A config whose layers share keys and values through the cache keeps it; see Note [K/V cache]. Raises ``ModelError``,
    with nothing changed, when a config cannot be written to.
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
    """Return whether layers of the model read the keys and values that another layer computed; Note [K/V cache]."""
    if any(_is_shared(config) for config in _configs(model)):
        return True
    return any(getattr(module, "is_kv_shared_layer", False) is True for module in model.modules())


def takes_shared_kv(block: nn.Module) -> bool:
    """Return whether ``block`` is handed what layers share as an argument, which attention in it takes."""
    own = _parameters_of(block)
    passes_on = SHARED_STATES in own or any(one.kind is one.VAR_KEYWORD for one in own.values())
    return passes_on and _attention_takes_shared_kv(block)


def _attention_takes_shared_kv(module: nn.Module) -> bool:
    return any(SHARED_STATES in _parameters_of(part) for part in module.modules())


def _parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return what a module's forward takes; a scripted one does not tell."""
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
    """Return the sub-modules of a block that neither are nor hold attention, such as its mlp; perhaps none."""
    return tuple(part_of(block, node) for node in _without_kv(root_node(block.module)))


def _without_kv(node: Node) -> Iterator[Node]:
    for child in substantial_children(node):
        if not any(is_attention(name, part) for name, part in child.module.named_modules()):
            yield child
        elif not is_attention(child.path, child.module):
            yield from _without_kv(child)


def is_attention(path: str, module: nn.Module) -> bool:
    """Return whether a module looks like attention, by its name, its class or the arguments that it takes."""
    if hasattr(module, "is_kv_shared_layer") or ATTENTION.search(path.rpartition(".")[2]):
        return True
    if ATTENTION.search(type(module).__name__):
        return True
    return not KV_ARGUMENTS.isdisjoint(_parameters_of(module))


def _configs(model: nn.Module) -> Iterator[Any]:
    """Yield every config object of a model once: on its modules, and inside one another."""
    seen: set[int] = set()
    for module in model.modules():
        for config in _with_parts(getattr(module, "config", None)):
            if id(config) not in seen:
                seen.add(id(config))
                yield config


def _with_parts(config: Any) -> Iterator[Any]:
    """Yield a config and the configs it holds, at any depth."""
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
        "use_cache is on and this config cannot be written to; a recomputed block would write its cache twice",
        fix="build the model with use_cache=False",
    )
