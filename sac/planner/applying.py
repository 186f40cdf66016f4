"""`sac.apply`, with or without a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sac.blocks import applying
from sac.config import parse_config
from sac.engine.table import resolve_policy
from sac.errors import ConfigError, Problem
from sac.planner.controller import Controller
from sac.policy.model import Decision, Policy
from sac.reporting import note_memory


def apply(
    model: nn.Module,
    value: Any,
    *,
    tp_group: Any = None,
    get_rng_state_tracker: Callable[[], Any] | None = None,
) -> nn.Module:
    """Apply activation checkpointing to ``model`` in place and return the model.

    ``value`` is the value under ``activation_checkpointing:`` in a training config; ``sac.config.parse_config``
    documents its forms. Gradients stay bit-identical. Parameter names, ``state_dict``, classes, ``deepcopy`` and pickle
    are unaffected. The model's own checkpointing cannot be turned on afterwards; see Note [Both on] in
    ``sac.blocks.other_checkpointing``.
    ``tp_group`` and ``get_rng_state_tracker`` are those of ``sac.checkpoint``. The group is used only if the config
    scatters inputs, so it can be passed with every config.

    With a ``budget``, the first step runs under full recomputation and is observed; from the second step on, the
    fastest policy within the budget is used. ``PlanError`` is raised when the second step begins if there is none.

    Under ``torch.compile``, regions are part of the graph. Features that a graph cannot contain (inputs kept elsewhere,
    trackers, generators, state providers, ``use_reentrant``, a budget) run in eager inside the compiled model, with a
    graph break.

    Raises ``ConfigError`` or ``PolicyError`` for an invalid value, and ``ModelError`` for a model that cannot be
    checkpointed (no blocks found, sac or the model's own checkpointing is already on, or chunks of layers in a model
    that calls its layers one by one). The model is then unchanged.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(Problem("sac.apply", f"model is a {type(model).__name__}", expected="a torch.nn.Module"))
    config = parse_config(value)
    arguments: dict[str, Any] = {"tp_group": tp_group, "get_rng_state_tracker": get_rng_state_tracker}
    if config.budget is None or config.mode != "selective":
        applying.apply(model, config, **arguments)
    else:
        if config.policy is not None:
            _check_policy(config.policy)
        controller = Controller(model, config)
        applied = controller.put_on(**arguments)
        if applied is not None:
            controller.attach(applied)
    note_memory(model)
    return model


def _check_policy(policy: Policy) -> None:
    resolve_policy(policy)
    if any(rule.matches_module and rule.do != Decision.RECOMPUTE.value for rule in policy.rules):
        found = "a rule saves whole modules, but a budget chooses among ops"
        fix = "add `ops` to the rule, or leave the budget out"
        raise ConfigError(Problem("activation_checkpointing.policy", found, fix=fix))
    if policy.default is Decision.OFFLOAD or any(rule.kept_as is Decision.OFFLOAD for rule in policy.rules):
        found = "it offloads, but with a budget sac only chooses between saving on the device and recomputing"
        fix = "take the rules that offload out of the policy, or leave the budget out"
        raise ConfigError(Problem("activation_checkpointing.policy", found, fix=fix))
