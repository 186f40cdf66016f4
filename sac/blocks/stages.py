"""Pipeline stages: models that are a part of a whole, and hold some of its blocks or none.

Note [Stages]
A stage is made by taking layers away from the whole model, and two things tell of it: a list named as stacks of blocks
are named with nothing in it but placeholders, and a stack whose layers are counted to more than it holds. On a stage it
is no mistake that no block is there, that `layers` chooses none of those that are, or that a rule finds no place: they
may be on another stage. The user is told once, and training goes on, so that one loop over the parts serves every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sac.blocks.block import Block
from sac.blocks.paths import Node, walk
from sac.blocks.stacks import STACK_NAMES
from sac.policy.model import Rule

LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def emptied_stacks(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the lists that are named as stacks are and hold no block; see Note [Stages]."""
    return tuple(node.path for node in walk(model) if _is_emptied(node))


def is_stage(model: nn.Module, blocks: Sequence[Block]) -> bool:
    """Return whether ``model``, whose blocks are ``blocks``, holds only some of the layers of a whole."""
    sizes = {block.stack: block.stack_size for block in blocks}
    held = {node.path: _held(node.module) for node in walk(model) if isinstance(node.module, LISTS)}
    return bool(emptied_stacks(model)) or any(size > held.get(path, size) for path, size in sizes.items())


def rules_here(rules: Sequence[Rule], blocks: Sequence[Block]) -> tuple[Rule, ...]:
    """Return the rules that speak of some region of ``blocks``, or of all there are."""
    return tuple(
        rule
        for rule in rules
        if not rule.speaks_of_some_regions
        or any(rule.speaks_of_region(block.path, block.layer, block.stack_size) for block in blocks)
    )


def idle_note(model: nn.Module, blocks: Sequence[Block]) -> str:
    """Return what to tell of a stage on which nothing is to be done, ``blocks`` being those it has."""
    if blocks:
        layers = ", ".join(f"{block.layer} of {block.stack_size}" for block in blocks)
        why = f"`layers` chooses none of the layers it has ({layers})"
    else:
        why = f"nothing is in `{'`, `'.join(emptied_stacks(model))}`"
    return f"{type(model).__name__}: no block to checkpoint in this part of a model: {why}. sac.apply had nothing to do"


def _is_emptied(node: Node) -> bool:
    named = node.path.rpartition(".")[2].lower() in STACK_NAMES
    return named and isinstance(node.module, LISTS) and _held(node.module) == 0


def _held(module: nn.Module) -> int:
    """Return how many children a list has, apart from what stands in for layers that are elsewhere."""
    return sum(child is not None and not isinstance(child, nn.Identity) for child in module._modules.values())
