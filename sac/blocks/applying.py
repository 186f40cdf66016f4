"""Make the blocks of a model regions: `sac.apply` without a budget, and regions on chosen modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sac.blocks.chunks import find_chunks, install_chunks
from sac.blocks.find import (
    Block,
    find_blocks,
    idle_note,
    is_stage,
    numbered_blocks,
    rules_here,
    submodules,
)
from sac.blocks.install import (
    Applied,
    InstalledForward,
    ModelReference,
    RegionForward,
    UnmatchedRules,
    has_module,
    install,
    ours_on,
    rules_without_place,
    take_off,
)
from sac.blocks.kv_cache import refuse_shared_kv, turn_off_cache
from sac.blocks.other_checkpointing import enable_guards, refuse_existing_checkpointing
from sac.blocks.paths import parts_of, walk
from sac.config import Config, family_policy, parse_config, settings_of
from sac.decision_log import check_trace_target
from sac.engine.region import FULL, RegionGroup
from sac.engine.settings import PLAIN, Settings
from sac.engine.table import ResolvedPolicy, resolve_policy
from sac.errors import ModelError, Problem, warn
from sac.policy.model import Policy

NONE = "none"

# -- ``sac.apply``: all checks run before anything is changed


def apply(
    model: nn.Module,
    value: Any,
    *,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    forward: type[RegionForward] = RegionForward,
) -> nn.Module:
    """Apply activation checkpointing without a budget; see ``sac.apply``.

    ``forward`` is put on each block.
    """
    config = parse_config(value)
    check_trace_target()
    refuse_second(model)
    if config.mode == NONE:
        return model
    arguments = {**config.options, "tp_group": tp_group, "get_rng_state_tracker": get_rng_state_tracker}
    settings = settings_of(config.full, "sac.apply", set(), **arguments)
    settings = replace(settings, engine=config.engine, verify=config.verify, strict=config.strict)
    refuse_existing_checkpointing(model)
    named = FULL if config.mode == "full" else config.policy
    resolved = None if named is None else resolve_policy(named)
    blocks, stage = _choose_blocks(model, config, named or FULL)
    if not blocks:
        return model
    if resolved is None:
        resolved = resolve_policy(family_policy(model, (block.module for block in blocks)))
    policy = resolved.policy
    notes = (_ADAPTERS,) if named is None and policy.name == "adapters" else ()
    for problem in rules_without_place(resolved, blocks, strict=config.strict, stage=stage):
        warn(problem)
    chunks = find_chunks(model, blocks, config.layers) if config.layers.form == "uniform" else ()
    pairs = groups_of(resolved, [chunk.block for chunk in chunks] or blocks, config.mode)
    rules = rules_here(policy.rules, blocks) if stage else policy.rules
    watch = UnmatchedRules(rules, len(pairs), strict=config.strict)
    applied = Applied(config.mode, turn_off_cache(model), watch, notes, settings, unchecked=ModelReference(model))
    if chunks:
        install_chunks(chunks, [group for _, group in pairs], applied)
    else:
        install(pairs, applied, forward)
    enable_guards(model)
    return model


_ADAPTERS = "policy adapters, since most parameters of the blocks are frozen; name a policy to use another"


def refuse_second(model: nn.Module) -> None:
    """Raise ``ModelError`` if sac is already on the model, a part of it, or a module that contains it."""
    for path, module in model.named_modules():
        if ours_on(module) is not None:
            raise ModelError(_already_on(path or type(model).__name__))


def _already_on(where: str) -> Problem:
    found = "sac is on this module already: by sac.apply, sac.context_fn or sac.compat, or as a part of a region"
    return Problem(where, found, fix="call sac.remove on the whole model first")


def _choose_blocks(model: nn.Module, config: Config, policy: Policy) -> tuple[tuple[Block, ...], bool]:
    """Return the modules that become regions, and whether the model is a stage.

    A stage without blocks has no such modules, which is a warning; see Note [Stages].
    """
    blocks = find_blocks(model, patterns=config.blocks or policy.blocks)
    stage = is_stage(model, blocks)
    layers = (config.layers, policy.layers)
    chosen = tuple(block for block in blocks if all(one.matches(block.layer, block.stack_size) for one in layers))
    if not chosen and stage:
        warn(idle_note(model, blocks))
    elif not chosen:
        sizes = ", ".join(map(str, sorted({block.stack_size for block in blocks})))
        found = f"`layers` leaves no block: the model has stacks of {sizes}"
        raise ModelError(Problem(type(model).__name__, found, fix="choose layers that exist"))
    if config.granularity == "submodule":
        chosen = submodules(chosen)
    refuse_shared_kv(model, (part.module for part in chosen), reentrant=config.options["use_reentrant"])
    return chosen, stage


def groups_of(resolved: ResolvedPolicy, blocks: Sequence[Block], mode: str) -> list[tuple[Block, RegionGroup]]:
    """Return each block with its region group.

    Blocks of the same structure in one stack share a group if the same rules apply.
    """
    groups: dict[tuple[object, ...], RegionGroup] = {}
    pairs = []
    for block in blocks:
        position = block.path, block.layer, block.stack_size
        rules = tuple(rule.index for rule in resolved.rules_of(*position, has_module(block)))
        part = block.path.removeprefix(block.stack).lstrip(".").partition(".")[2]
        structure = tuple((path, type(module)) for path, module in parts_of(block.module))
        key = (rules, block.stack, part, structure)
        pairs.append((block, groups.setdefault(key, RegionGroup(resolved.table(rules), mode))))
    return pairs


# -- Regions on modules that the caller chooses one by one


def put_regions(
    model: nn.Module, modules: Iterable[nn.Module], policy: Policy = FULL, settings: Settings = PLAIN
) -> None:
    """Make each of ``modules``, parts of ``model``, a region; regions may be nested.

    ``sac.remove`` removes them again. Turns off the model's K/V cache, as ``sac.apply`` does. Raises ``ModelError`` for
    modules that are already regions or have their own checkpointing, and ``PolicyError`` for policies that cannot be
    carried out; the model is then unchanged.
    """
    blocks, mode = blocks_at(model, modules), "full" if policy is FULL else "selective"
    for block in blocks:
        if isinstance(ours_on(block.module), InstalledForward):
            raise ModelError(_already_on(block.path))
        refuse_existing_checkpointing(block.module)
    rules = resolve_policy(policy)
    applied = Applied(mode, turn_off_cache(model), settings=settings)
    for block in blocks:
        take_off(block.module)  # the module tracking of an outer region: the region installed here tracks instead
    install(groups_of(rules, blocks, mode), applied)


def blocks_at(model: nn.Module, modules: Iterable[nn.Module]) -> list[Block]:
    """Return ``modules`` as blocks of ``model``, each once; a module outside of ``model`` is a block by itself."""
    wanted = {id(module): module for module in modules}
    nodes = {}
    for node in walk(model):
        if node.path and wanted.pop(id(node.module), None) is not None:
            nodes[node.path] = node
    outside = (Block(type(module).__name__, module, 0, "", 1) for module in wanted.values())
    return [*numbered_blocks(model, nodes), *outside]
