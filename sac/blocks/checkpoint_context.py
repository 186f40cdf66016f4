"""``sac.context_fn``: a policy for ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sac.blocks.install import track_modules
from sac.engine.compiled import checkpoint_contexts
from sac.engine.table import NAMES, DecisionTable, ResolvedPolicy, layer_index, resolve_policy
from sac.errors import ConfigError, ModelError, PolicyError, Problem
from sac.policy.load import PolicySource, load_policy
from sac.policy.model import Decision, Policy, Rule

_without_module: dict[Policy, DecisionTable] = {}
_tables: WeakKeyDictionary[nn.Module, dict[Policy, DecisionTable]] = WeakKeyDictionary()
_MOST_TABLES = 64


def context_fn(policy: PolicySource, module: nn.Module | None = None) -> Callable[[], Any]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=…)``.

    ``policy`` is anything that ``sac.load_policy`` accepts. It is carried out as under ``sac.apply``. Rules that
    match modules or layers need ``module``, the checkpointed block: its sub-modules are then tracked while they run
    (``sac.remove`` removes the tracking). Without it, optional ones that save match nothing. The position of the
    block in a model is unknown here, so rules with ``blocks`` are refused. It may be called once, or before each call
    of the block: what earlier calls with the same policy and module have shown is kept.

    Raises ``PolicyError`` for an invalid policy or one that offloads, ``ConfigError`` if a rule needs ``module`` and it
    is missing, and ``ModelError`` if ``module`` does not provide what a rule needs.
    """
    policy = load_policy(policy)
    tables = _without_module if module is None else _tables.setdefault(module, {})
    if policy not in tables:
        if len(tables) >= _MOST_TABLES:
            tables.clear()
        tables[policy] = _table(policy, module)
    table = tables[policy]
    if module is None:
        return partial(checkpoint_contexts, table, "")
    track_modules([module])
    return partial(checkpoint_contexts, table, "", module)


def _table(policy: Policy, module: nn.Module | None) -> DecisionTable:
    resolved = resolve_policy(policy)
    if offloading := _offloading(resolved.policy):
        raise PolicyError(offloading)
    needing = [one for one in resolved.rules if one.rule.module is not None or one.rule.is_for_some_regions]
    if module is None:
        needed = [one.rule for one in needing if not (one.rule.optional and one.always_saves)]
        if needed:
            raise ConfigError([_needs_module(rule) for rule in needed])
        left = tuple(one for one in resolved.rules if one not in needing)
        return resolved.table(one.index for one in left)
    located = [one.rule for one in needing if one.rule.blocks]
    if located:
        raise ModelError([_needs_model(rule) for rule in located])
    return _table_of_layer(resolved, module, [one.rule for one in needing])


def _offloading(policy: Policy) -> list[Problem]:
    fix = "use sac.apply on the whole model, or save"
    problems = [
        Problem(
            rule.where("do"),
            f'rule "{rule.id}" offloads, but torch.utils.checkpoint keeps nothing in host memory',
            "save, recompute, alternate",
            fix=fix,
        )
        for rule in policy.rules
        if rule.kept_as is Decision.OFFLOAD
    ]
    if policy.default is Decision.OFFLOAD:
        found = "the default offloads, but torch.utils.checkpoint keeps nothing in host memory"
        problems.append(Problem(policy.where("default"), found, "save, recompute", fix=fix))
    return problems


def _table_of_layer(resolved: ResolvedPolicy, module: nn.Module, needing: list[Rule]) -> DecisionTable:
    layered = [rule for rule in needing if rule.layers is not None and not rule.layers.is_all]
    if not layered:
        return _table_of(resolved, 0)
    layer = layer_index(module)
    counting = [rule for rule in layered if rule.layers is not None and rule.layers.needs_count]
    if layer is None or counting:
        rule, name = counting[0] if counting else layered[0], type(module).__name__
        if counting:
            found = f'rule "{rule.id}" {_counts(rule)}, but {name} does not say how many layers there are'
        else:
            found = f'rule "{rule.id}" selects layers, but {name} has no attribute with its number: {", ".join(NAMES)}'
        raise ModelError(Problem(rule.where("layers"), found, fix="use sac.apply on the whole model"))
    return _table_of(resolved, layer)


def _counts(rule: Rule) -> str:
    from_the_end = rule.layers is not None and rule.layers.last is not None
    return "counts from the last layer" if from_the_end else "selects a fraction of the layers"


def _table_of(resolved: ResolvedPolicy, layer: int) -> DecisionTable:
    return resolved.table(rule.index for rule in resolved.rules_of("", layer, layer + 1, lambda rule: True))


def _needs_model(rule: Rule) -> Problem:
    return Problem(
        rule.where("blocks"),
        f'rule "{rule.id}" matches blocks, and sac.context_fn does not know where in the model a block is',
        fix="use sac.apply on the whole model",
    )


def _needs_module(rule: Rule) -> Problem:
    if rule.blocks:
        return _needs_model(rule)
    key = "module" if rule.module is not None else "layers"
    return Problem(
        rule.where(key),
        f'rule "{rule.id}" matches by {key}, and sac.context_fn was given no module',
        fix="pass the block that is checkpointed: sac.context_fn(policy, module=block)",
    )
