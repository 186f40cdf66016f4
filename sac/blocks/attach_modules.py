"""Regions on modules that the caller has chosen one by one, instead of on the blocks that a config value chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from sac.blocks.attach import kinds_of, refuse_own_checkpointing
from sac.blocks.cache import turn_off_cache
from sac.blocks.find import Block, numbered_blocks
from sac.blocks.paths import walk
from sac.blocks.wrap import Applied, InstalledForward, install, ours_on, take_off
from sac.blocks.zero_hits import HitWatch
from sac.config import usable_policy
from sac.errors import ModelError, Problem
from sac.full.function_regions import FULL
from sac.policy.model import Policy
from sac.region.settings import PLAIN, Settings


@dataclass(frozen=True, slots=True)
class Chosen:
    """Modules that are to be regions under one policy, with the same settings."""

    modules: tuple[nn.Module, ...]
    policy: Policy = FULL
    settings: Settings = PLAIN


def put_regions(model: nn.Module, groups: Sequence[Chosen]) -> None:
    """Make each module of ``groups``, parts of ``model``, a region; regions may lie inside one another.

    ``sac.remove`` takes them off again. The model's K/V cache is turned off as by ``sac.apply``. Raises ``ModelError``
    or ``PolicyError``, with nothing changed, for modules that are regions already or have checkpointing of their own,
    and for policies that cannot be carried out.
    """
    blocks = [blocks_at(model, group.modules) for group in groups]
    refuse_regions(block for of_group in blocks for block in of_group)
    bound = [usable_policy(group.policy) for group in groups]
    restores = turn_off_cache(model)
    for group, of_group, rules in zip(groups, blocks, bound, strict=True):
        for block in of_group:
            take_off(block.module)  # what told a region around it which of its modules runs: the region here will tell
        mode = "full" if group.policy is FULL else "selective"
        watch = HitWatch((), (), strict=False)
        install(kinds_of(rules, of_group, mode), Applied(mode, restores, watch, settings=group.settings))


def refuse_regions(blocks: Iterable[Block]) -> None:
    """Raise ``ModelError`` for blocks that are regions already, or have checkpointing of their own."""
    problems = []
    for block in blocks:
        forward = ours_on(block.module)
        if isinstance(forward, InstalledForward):
            found = "this module is a region of sac already"
            if not forward.regions:
                found = "offload_wrapper is on this module: make it a region before, not after"
            problems.append(Problem(block.path, found, fix="call sac.remove(model) first"))
        refuse_own_checkpointing(block.module)
    if problems:
        raise ModelError(problems)


def blocks_at(model: nn.Module, modules: Iterable[nn.Module]) -> list[Block]:
    """Return the blocks of ``model`` that are ``modules``, each once; one that is not in it is a block by itself."""
    wanted = {id(module): module for module in modules}
    nodes = {}
    for node in walk(model):
        if node.path and wanted.pop(id(node.module), None) is not None:
            nodes[node.path] = node
    inside = list(numbered_blocks(model, nodes))
    return inside + [Block(type(module).__name__, module, 0, "", 1, "language") for module in wanted.values()]
