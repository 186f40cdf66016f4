"""Frozen towers: blocks whose recomputation could not serve any gradient."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from sac.blocks.block import Block
from sac.blocks.paths import walk
from sac.blocks.towers import TOWERS, Towers

# What may run before each tower: encoders begin at their own inputs, projectors follow encoders, language follows all.
UPSTREAM = {
    "vision": frozenset({"vision"}),
    "audio": frozenset({"audio"}),
    "multimodal": frozenset({"vision", "audio", "multimodal"}),
    "language": frozenset(TOWERS),
}


def is_trained(module: nn.Module) -> bool:
    """Return whether any parameter at or below ``module`` requires grad; an adapter's parameters count."""
    return any(parameter.requires_grad for parameter in module.parameters())


def drop_frozen(blocks: Sequence[Block], model: nn.Module) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Return the blocks through which a gradient may pass, and those to be left alone, each in order.

    A stack is left alone when none of its blocks is trained and nothing trained can run before it: no parameter of its
    own tower and of the towers that feed it requires grad. A vision or audio tower is fed by itself, a projector by
    those two and itself, a language model by everything. So a frozen vision tower is left alone, with or without a
    projector trained behind it, while a frozen language model behind a trained projector keeps its blocks, since the
    projector's gradient comes through them.

    Where nothing at all is trained, no block is left alone: as a rule adapters are to come. Regions that no gradient
    passes through keep nothing and are not run again.
    """
    if not is_trained(model):
        return tuple(blocks), ()
    trained_stacks = {block.stack for block in blocks if is_trained(block.module)}
    trained_towers = _trained_towers(model)
    kept = tuple(
        block
        for block in blocks
        if block.stack in trained_stacks or not trained_towers.isdisjoint(UPSTREAM[block.tower])
    )
    return kept, tuple(block for block in blocks if block not in kept)


def _trained_towers(model: nn.Module) -> frozenset[str]:
    towers = Towers(model)
    direct = (
        node.path
        for node in walk(model)
        if any(p.requires_grad for p in node.module._parameters.values() if p is not None)
    )
    return frozenset(towers.of(path) for path in direct)
