"""``sac.context_fn``: a policy for ``torch.utils.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sac.blocks.install import track_modules
from sac.engine.compiled import checkpoint_contexts
from sac.engine.table import NAMES, DecisionTable, layer_index, resolve_policy
from sac.errors import PolicyError, Problem
from sac.policy.load import PolicySource, load_policy
from sac.policy.model import ALL, Decision, Policy, Rule

_NO_MODULE = nn.Module()
_tables: WeakKeyDictionary[nn.Module, dict[Policy, DecisionTable]] = WeakKeyDictionary()


def context_fn(policy: PolicySource, module: nn.Module | None = None) -> Callable[[], Any]:
    """Return a ``context_fn`` for ``torch.utils.checkpoint.checkpoint(…, use_reentrant=False, context_fn=…)``.

    ``policy`` is anything that ``sac.load_policy`` accepts. It is carried out as under ``sac.apply``. Rules that
    match modules or layers need ``module``, the checkpointed block: its sub-modules are then tracked while they run
    (``sac.remove`` removes the tracking). Without it, optional ones that save match nothing. The position of the
    block in a model is unknown here, so rules with ``blocks`` are refused. It may be called once, or before each call
    of the block: what earlier calls with the same policy and module have shown is kept.

    Raises ``PolicyError`` for an invalid policy, one that offloads, and rules that cannot be carried out here.
    """
    policy = load_policy(policy)
    tables = _tables.setdefault(_NO_MODULE if module is None else module, {})
    if policy not in tables:
        tables[policy] = _table(policy, module)
    if module is None:
        return partial(checkpoint_contexts, tables[policy], "")
    track_modules([module])
    return partial(checkpoint_contexts, tables[policy], "", module)


def _table(policy: Policy, module: nn.Module | None) -> DecisionTable:
    resolved = resolve_policy(policy)
    layer = None if module is None else layer_index(module)
    problems, left_out = [], set()
    for one in resolved.rules:
        key, why = _obstacle(one.rule, module, layer)
        if key not in ("", "do") and module is None and one.rule.optional and one.saves:
            left_out.add(one.index)
        elif key:
            found = f'rule "{one.rule.id}" {why}'
            problems.append(Problem(one.rule.where(key), found, fix="use sac.apply on the whole model"))
    if resolved.policy.default is Decision.OFFLOAD:
        problems.append(Problem(policy.where("default"), f"the default {_OFFLOADS}", "save, recompute"))
    if problems:
        raise PolicyError(problems)
    rules = resolved.rules_of("", layer or 0, (layer or 0) + 1, lambda rule: True)
    return resolved.table(rule.index for rule in rules if rule.index not in left_out)


_OFFLOADS = "offloads, but torch.utils.checkpoint keeps nothing in host memory"


def _obstacle(rule: Rule, module: nn.Module | None, layer: int | None) -> tuple[str, str]:
    """Return the key of ``rule`` that cannot be carried out here, and why; two empty texts if there is none."""
    if rule.do == Decision.OFFLOAD:
        return "do", _OFFLOADS
    if rule.blocks:
        return "blocks", "matches blocks, and sac.context_fn does not know where in the model a block is"
    if module is None and rule.module is not None:
        return "module", "matches by module, and sac.context_fn was given none: sac.context_fn(policy, module=block)"
    if rule.layers in (None, ALL):
        return "", ""
    if rule.layers.form in ("last", "fraction"):
        return "layers", "needs the number of layers, which a block does not tell"
    return ("layers", f"selects layers, which a block tells by {', '.join(NAMES)}") if layer is None else ("", "")
