"""NeMo Automodel's activation checkpointing, carried out by regions.

``from sac.compat.nemo import …`` takes the place of the import from
``nemo_automodel.components.distributed.activation_checkpointing``.

What is different: nothing is wrapped. The layers themselves become regions, so that lists of them stay valid and
``sac.remove`` takes the regions off. What is saved is said by a policy file (the one of the model's family, where there
is one) and not by a list in code; ``SAC_TRACE`` and ``sac.report`` tell it. The policy of a family may choose other
matrix products than every second one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from sac.blocks.attach_modules import Chosen, put_regions
from sac.blocks.cache import is_attention, shares_kv, turn_off_cache
from sac.blocks.context import context_fn
from sac.blocks.paths import Node, children_of, root_node
from sac.blocks.stacks import is_callable
from sac.config import family_policy
from sac.errors import ModelError, Problem, SacWarning

__all__ = [
    "SELECTIVE_AC_WRAPPER_FLAG",
    "apply_selective_checkpointing_to_layers",
    "apply_submodule_checkpointing",
    "detect_kv_sharing_and_maybe_disable_cache",
    "is_selective_activation_checkpointing",
    "make_selective_checkpoint_context_fn",
]

# What NeMo sets on a wrapper, so that the wrapper is compiled and not what is in it. Without wrappers a layer is always
# compiled with its region, so nothing has it; the name is here for those who import it.
SELECTIVE_AC_WRAPPER_FLAG = "_nemo_selective_ac"


def is_selective_activation_checkpointing(activation_checkpointing: object) -> bool:
    """Return whether a config value is the word ``selective``, in any case."""
    return isinstance(activation_checkpointing, str) and activation_checkpointing.lower() == "selective"


def make_selective_checkpoint_context_fn() -> Callable[[], Any]:
    """Return a context function for non-reentrant ``torch.utils.checkpoint``, with the policy for any model."""
    return context_fn("general")


def detect_kv_sharing_and_maybe_disable_cache(model: nn.Module) -> bool:
    """Return whether layers of ``model`` read keys and values of others through the cache; if none does, turn it off.

    Raises ``ModelError`` for a config that cannot be written to: recomputation would then write to the cache again.
    """
    is_shared = shares_kv(model)
    if not is_shared:
        turn_off_cache(model)
    return is_shared


def apply_selective_checkpointing_to_layers(
    model: nn.Module, layers: list[nn.Module], has_kv_sharing: bool, enable_compile: bool = False
) -> None:
    """Make each of ``layers``, transformer blocks of ``model``, a region under the policy of the model's family.

    With ``has_kv_sharing`` attention cannot be run again: then the other sub-modules are regions that are recomputed as
    a whole, with a warning. ``enable_compile`` changes nothing: a region is part of what is compiled.

    Raises ``ModelError``, with nothing changed, for layers that are regions already.
    """
    del enable_compile
    if has_kv_sharing:
        warnings.warn(
            "these layers share keys and values, so that attention cannot be recomputed: their other sub-modules are "
            "recomputed as a whole",
            SacWarning,
            stacklevel=2,
        )
        apply_submodule_checkpointing(layers, has_kv_sharing)
        return
    put_regions(model, [Chosen(tuple(layers), family_policy(model))])


def apply_submodule_checkpointing(layers: list[nn.Module], has_kv_sharing: bool) -> None:
    """Make the parts of each layer (attention, MLP, norms) regions that are recomputed as a whole.

    With ``has_kv_sharing`` those that are or hold attention are left alone. Raises ``ModelError``, with nothing
    changed, for parts that are regions already, and if there are none at all.
    """
    parts = tuple(part for layer in layers for part in _parts(root_node(layer), without_attention=has_kv_sharing))
    if layers and not parts:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        raise ModelError(Problem(kinds, "these layers have no sub-modules with parameters that could be regions"))
    put_regions(nn.ModuleList(layers), [Chosen(parts)])


def _parts(node: Node, *, without_attention: bool) -> Iterator[nn.Module]:
    for child in children_of(node):
        module = child.module
        holds = without_attention and any(is_attention(name, part) for name, part in module.named_modules())
        if is_attention(child.path, module) and without_attention:
            continue
        if holds or not is_callable(module):
            yield from _parts(child, without_attention=without_attention)
        elif any(True for _ in module.parameters()):
            yield module
