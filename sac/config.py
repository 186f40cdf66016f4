"""The config value of ``activation_checkpointing:``, read once into what the rest of sac works with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sac.errors import ConfigError, PolicyError, Problem, SacError, listing, nearest
from sac.full import full_config
from sac.full.full_config import CallOptions, FullConfig
from sac.policy.files import load_policy, shipped_policies
from sac.policy.matchers import read_layers, read_patterns
from sac.policy.model import Decision, Layers, Policy
from sac.policy.nodes import Findings, node_from_value, shown
from sac.policy.patterns import PathPattern
from sac.policy.shipped import looks_like_path
from sac.selective.bind import BoundPolicy, bind_policy

MODES = ("none", "full", "selective")
OWN_KEYS = ("mode", "policy", "engine", "blocks", "layers", "scope", "granularity", "strict")
KEYS = (*OWN_KEYS, *full_config.CALL_KEYS, *full_config.KEYS)
ENGINES = ("auto", "rerun")
SCOPES = ("all", "language", "vision", "audio", "multimodal")
GRANULARITIES = ("block", "submodule")
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
    full: FullConfig = full_config.DEFAULT_CONFIG
    options: CallOptions = full_config.DEFAULT_OPTIONS


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
        Problem(
            "activation_checkpointing", f"a value of type {type(value).__name__}: {shown(repr(value))}", expected=WORDS
        )
    )


def _parse_word(text: str) -> Config:
    word = text.strip().lower().replace("-", "_")
    if word in MODES:
        return Config(word)
    if word in ("false", "true"):
        return Config("none" if word == "false" else "full")
    if word in shipped_policies():
        return Config("selective", load_policy(word))
    if looks_like_path(text):
        return Config("selective", load_policy(text, where="activation_checkpointing"))
    legal = (*MODES, *shipped_policies())
    raise ConfigError(
        Problem(
            "activation_checkpointing",
            f'"{shown(text)}" is not known',
            expected=f"{listing(legal)}, a path to a YAML file, or a mapping",
            nearest=nearest(word, legal),
        )
    )


def _parse_mapping(value: Mapping[Any, Any]) -> Config:
    problems: list[Problem] = [_unknown_key(key) for key in value if key not in KEYS]
    mode = _read_mode(value, problems)
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
    if "policy" in value and mode in ("none", "full"):
        fix = "write `mode: selective`, or leave the policy out"
        problems.append(_problem("policy", f"mode {mode} takes no policy", fix=fix))
    given = {key: value[key] for key in (*full_config.CALL_KEYS, *full_config.KEYS) if key in value}
    problems += full_config.problems_in(given, "activation_checkpointing")
    if given.get("use_reentrant") is True and mode != "full":
        fix = "leave it out: per-op decisions need the non-reentrant mode"
        problems.append(_problem("use_reentrant", f"mode {mode} has no reentrant form", fix=fix))
    if problems:
        raise ConfigError(problems)
    options = CallOptions(**{key: given[key] for key in full_config.CALL_KEYS if key in given})
    full = FullConfig(**{key: given[key] for key in full_config.KEYS if key in given})
    return Config(mode, **read, full=full, options=options)


def _read_mode(value: Mapping[Any, Any], problems: list[Problem]) -> str:
    """Return the mode; where it is none, note a problem and return an empty word."""
    if "mode" not in value:
        problems.append(_problem("mode", "the key `mode` is missing", listing(MODES)))
        return ""
    mode = value["mode"]
    word = mode.strip().lower() if isinstance(mode, str) else ""
    if word in MODES:
        return word
    near = {True: "full", False: "none", None: "none"}[mode] if mode is None or isinstance(mode, bool) else ""
    near = nearest(word, MODES) if word else near
    problems.append(_problem("mode", f"{shown(repr(mode))} is not a mode", listing(MODES), near))
    return ""


def _problem(key: str, found: str, expected: str = "", near: str = "", fix: str = "") -> Problem:
    return Problem(f"activation_checkpointing.{key}", found, expected=expected, nearest=near, fix=fix)


def _unknown_key(key: Any) -> Problem:
    near = nearest(key, KEYS) if isinstance(key, str) else ""
    return Problem("activation_checkpointing", f"unknown key {shown(repr(key))}", expected=listing(KEYS), nearest=near)


def _read_policy(value: Any) -> Policy:
    return load_policy(value, where="activation_checkpointing.policy")


def _read_engine(value: Any) -> str:
    word = _word_of(value)
    if word == "replay":
        fix = "leave `engine` out: this version has one engine, rerun"
        raise ConfigError(_problem("engine", "the replay engine is not built yet", listing(ENGINES), fix=fix))
    if word not in ENGINES:
        raise ConfigError(_illegal("engine", value, "no engine", ENGINES, listing(ENGINES)))
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
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    legal = f"{listing(SCOPES)}, or a list of them"
    wrong = [word for word in words if _word_of(word) not in SCOPES]
    if wrong or not words:
        raise ConfigError(_illegal("scope", word, "no part of a model", SCOPES, legal) for word in wrong or [value])
    return _word_of(value) if isinstance(value, str) else tuple(_word_of(word) for word in words)


def _read_granularity(value: Any) -> str:
    if _word_of(value) not in GRANULARITIES:
        raise ConfigError(_illegal("granularity", value, "no granularity", GRANULARITIES, listing(GRANULARITIES)))
    return _word_of(value)


def _word_of(value: Any) -> str:
    return value.strip().lower() if isinstance(value, str) else ""


def _illegal(key: str, value: Any, what: str, words: tuple[str, ...], legal: str) -> Problem:
    near = nearest(value, words) if isinstance(value, str) else ""
    return _problem(key, f"{shown(repr(value))} is {what}", legal, near)


def _read_strict(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(_problem("strict", f"{shown(repr(value))} is not true or false", "true, false"))


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
    try:
        bound = bind_policy(policy)
    except PolicyError as error:
        problems += error.problems
    if problems:
        raise PolicyError(problems)
    return bound
