"""The config value of ``activation_checkpointing:``, read once into what the rest of sac works with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sac.errors import ConfigError, PolicyError, Problem, SacError, listing, nearest
from sac.policy.files import load_policy, shipped_policies
from sac.policy.matchers import read_layers, read_patterns
from sac.policy.model import Decision, Layers, Policy
from sac.policy.nodes import Findings, node_from_value
from sac.policy.patterns import PathPattern
from sac.selective.bind import BoundPolicy, bind_policy

MODES = ("none", "full", "selective")
KEYS = ("mode", "policy", "engine", "blocks", "layers", "scope", "granularity", "strict")
ENGINES = ("auto", "rerun")
WORDS = "none, full, selective, a shipped policy's name, a path to a YAML file, or a mapping"


@dataclass(frozen=True, slots=True)
class Config:
    """A config value as it was meant; ``policy`` None in mode selective means the family's policy."""

    mode: str = "none"
    policy: Policy | None = None
    engine: str = "auto"
    blocks: tuple[PathPattern, ...] = ()
    layers: Layers = field(default_factory=Layers)
    scope: str | tuple[str, ...] = "all"
    granularity: str = "block"
    strict: bool = False


def parse_config(value: Any) -> Config:
    """Return what a config value means.

    ``value`` is None or False (none), True (full), a word (``none``, ``full``, ``selective``, a shipped policy's name:
    case and hyphens do not matter), a path to a policy file, a ``Policy``, or a mapping with the keys of ``KEYS``.
    Raises ``ConfigError`` or ``PolicyError`` with all that is wrong.
    """
    if value is None or value is False:
        return Config()
    if value is True:
        return Config("full")
    if isinstance(value, Config):
        return value
    if isinstance(value, Policy):
        return Config("selective", value)
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    if isinstance(value, os.PathLike):
        return Config("selective", load_policy(value, where="activation_checkpointing"))
    if isinstance(value, str):
        return _parse_word(value)
    raise ConfigError(
        Problem("activation_checkpointing", f"a value of type {type(value).__name__}: {value!r}", expected=WORDS)
    )


def _parse_word(text: str) -> Config:
    word = text.strip().lower().replace("-", "_")
    if word in MODES:
        return Config(word)
    if word in ("false", "true"):
        return Config("none" if word == "false" else "full")
    if word in shipped_policies():
        return Config("selective", load_policy(word))
    if text.endswith((".yaml", ".yml")) or os.sep in text:
        return Config("selective", load_policy(text, where="activation_checkpointing"))
    legal = (*MODES, *shipped_policies())
    raise ConfigError(
        Problem(
            "activation_checkpointing",
            f'"{text}" is not known',
            expected=f"{listing(legal)}, a path to a YAML file, or a mapping",
            nearest=nearest(word, legal),
        )
    )


def _parse_mapping(value: Mapping[Any, Any]) -> Config:
    problems: list[Problem] = []
    for key in value:
        if key not in KEYS:
            problems.append(_unknown_key(key))
    mode = value.get("mode")
    if mode is None:
        problems.append(_problem("mode", "the key `mode` is missing", listing(MODES)))
    elif not isinstance(mode, str) or mode.strip().lower() not in MODES:
        near = nearest(mode, MODES) if isinstance(mode, str) else ""
        problems.append(_problem("mode", f"{mode!r} is not a mode", listing(MODES), near))
    readers = {
        "policy": _read_policy,
        "engine": _read_engine,
        "blocks": _read_blocks,
        "layers": _read_layers,
        "scope": _read_scope,
        "granularity": _read_granularity,
        "strict": _read_strict,
    }
    read: dict[str, Any] = {}
    for key, reader in readers.items():
        if key in value:
            try:
                read[key] = reader(value[key])
            except SacError as error:
                problems.extend(error.problems)
    if "policy" in value and isinstance(mode, str) and mode.strip().lower() != "selective":
        problems.append(_problem("policy", f"mode {mode} takes no policy", "policy goes with mode: selective"))
    if problems:
        raise ConfigError(problems)
    assert isinstance(mode, str)
    return Config(mode.strip().lower(), **read)


def _problem(key: str, found: str, expected: str = "", near: str = "", fix: str = "") -> Problem:
    return Problem(f"activation_checkpointing.{key}", found, expected=expected, nearest=near, fix=fix)


def _unknown_key(key: Any) -> Problem:
    near = nearest(key, KEYS) if isinstance(key, str) else ""
    return Problem("activation_checkpointing", f"unknown key {key!r}", expected=listing(KEYS), nearest=near)


def _read_policy(value: Any) -> Policy:
    return load_policy(value, where="activation_checkpointing.policy")


def _read_engine(value: Any) -> str:
    word = value.strip().lower() if isinstance(value, str) else ""
    if word not in ENGINES:
        fix = "leave `engine` out: this version has one engine, rerun" if word == "replay" else ""
        raise ConfigError(_problem("engine", f"{value!r} is no engine", listing(ENGINES), nearest(word, ENGINES), fix))
    return word


def _read_blocks(value: Any) -> tuple[PathPattern, ...]:
    where = "activation_checkpointing.blocks"
    findings = Findings()
    patterns = read_patterns(node_from_value(value, where, findings), "blocks", findings)
    if len(findings):
        raise ConfigError(findings.problems())
    return patterns


def _read_layers(value: Any) -> Layers:
    where = "activation_checkpointing.layers"
    findings = Findings()
    layers = read_layers(node_from_value(value, where, findings), "layers", findings)
    if layers is None or len(findings):
        raise ConfigError(findings.problems())
    return layers


def _read_scope(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise ConfigError(
        _problem("scope", f"{value!r} is no scope", "all, language, vision, audio, multimodal, or a list")
    )


def _read_granularity(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ConfigError(_problem("granularity", f"{value!r} is no granularity", "block, submodule"))


def _read_strict(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(_problem("strict", f"{value!r} is not true or false", "true, false"))


def family_policy(model: nn.Module) -> Policy:
    """Return the shipped policy for ``model``, by its config's ``model_type`` or its class; else ``general``."""
    names = list(_family_names(model))
    policies = [load_policy(name) for name in shipped_policies() if name != "general"]
    for name in names:
        for policy in policies:
            if any(fnmatchcase(name.lower(), pattern.lower()) for pattern in policy.models):
                return policy
    return load_policy("general")


def _family_names(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        config = getattr(module, "config", None)
        for one in (config, getattr(config, "text_config", None)):
            kind = getattr(one, "model_type", None)
            if isinstance(kind, str) and kind:
                yield kind
        yield type(module).__name__
        if not any(True for _ in module.children()):
            return


def usable_policy(policy: Policy) -> BoundPolicy:
    """Return ``policy`` with its names resolved; raises ``PolicyError`` for these and for what is not built yet."""
    problems = [
        Problem(
            rule.where("do"),
            f'rule "{rule.id}" offloads, and offloading is not built yet',
            "save, recompute, alternate",
        )
        for rule in policy.rules
        if rule.do == Decision.OFFLOAD.value
    ]
    problems += [
        Problem(
            rule.where("module"),
            f'rule "{rule.id}" speaks of whole modules (`module` without `ops`), which comes with the replay engine',
            fix='add `ops`, for example ops: "*", to speak of the ops inside the module',
        )
        for rule in policy.rules
        if rule.speaks_of_module
    ]
    if policy.default is Decision.OFFLOAD:
        problems.append(Problem(policy.where("default"), "offloading is not built yet", "save, recompute"))
    if problems:
        raise PolicyError(problems)
    return bind_policy(policy)


@dataclass(frozen=True, slots=True)
class PolicyCheck:
    """What `sac check` shows of a good policy; ``missing``: per rule, what this build of torch lacks."""

    policy: Policy
    missing: Mapping[str, tuple[str, ...]]


def check_policy(policy: Policy) -> PolicyCheck:
    """Resolve a policy's names on this build of torch; raises ``PolicyError`` with all that mean nothing."""
    bound = bind_policy(policy)
    return PolicyCheck(bound.policy, bound.missing)
