"""The config value of ``activation_checkpointing:``, read once into what the rest of sac works with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sac.errors import ConfigError, PolicyError, Problem, SacError, listing, nearest
from sac.full.checks import check_flag, check_word, problems_in, word_of
from sac.full.full_config import (
    CALL_KEYS,
    DEFAULT_CONFIG,
    DEFAULT_OPTIONS,
    FULL_CONFIG_KEYS,
    CallOptions,
    FullConfig,
    contradictions,
    idle_keys,
)
from sac.policy.files import load_policy, shipped_policies
from sac.policy.matchers import read_layer_plan, read_patterns
from sac.policy.model import Chunks, Decision, Layers, Policy
from sac.policy.nodes import Findings, node_from_value, shown
from sac.policy.patterns import PathPattern
from sac.policy.shipped import looks_like_path
from sac.region.settings import ALWAYS, AUTO, ENGINES, VERIFY
from sac.selective.around import CAN_TAKE_OFF
from sac.selective.bind import BoundPolicy, bind_policy

MODES = ("none", "full", "selective")
OWN_KEYS = ("mode", "policy", "engine", "verify", "blocks", "layers", "scope", "granularity", "strict")
FULL_KEYS = (*CALL_KEYS, *FULL_CONFIG_KEYS)
KEYS = (*OWN_KEYS, *FULL_KEYS)
ARGUMENTS = ("tp_group", "get_rng_state_tracker")  # of sac.apply: objects, which no config file can hold
SCOPES = ("all", "language", "vision", "audio", "multimodal")
NO_SCOPE = "no part of a model"
GRANULARITIES = ("block", "submodule")
WHERE = "activation_checkpointing"
WORDS = "none, full, selective, a shipped policy's name, a path to a YAML file, or a mapping"


@dataclass(frozen=True, slots=True)
class Config:
    """A config value as it was meant.

    ``policy`` None in mode selective means the family's policy. ``full`` and ``options`` say how regions are run.
    """

    mode: str = "none"
    policy: Policy | None = None
    engine: str = AUTO
    verify: str = ALWAYS
    blocks: tuple[PathPattern, ...] = ()
    layers: Layers | Chunks = field(default_factory=Layers)
    scope: str | tuple[str, ...] = "all"
    granularity: str = "block"
    strict: bool = False
    full: FullConfig = DEFAULT_CONFIG
    options: CallOptions = DEFAULT_OPTIONS


def parse_config(value: Any) -> Config:
    """Return what a config value means.

    ``value`` is None or False (none), True (full), a word (``none``, ``full``, ``selective``, a shipped policy's name:
    case and hyphens do not matter), a path to a policy file, a ``Policy``, or a mapping with the keys of ``KEYS``.

    ``layers`` chooses layers of each stack: ``all``, ``{first: n}`` or ``{block: n}``, ``{last: n}``,
    ``{every: k, offset: j}``, ``{fraction: f}`` (that share of them, spread evenly), or a list such as
    ``["0-7", "12"]``; or it puts chunks of layers together as one region each: ``{uniform: n}``, or ``sqrt`` for chunks
    of the square root of their number. Chunks need layers that stand in an ``nn.Sequential``.

    Modes full and selective both take the keys of the full path (those of ``FullConfig``, and the switches among the
    arguments of ``sac.checkpoint``), except that ``use_reentrant`` and chunks of layers are for mode full alone. Mode
    none takes every key and makes nothing of it, so that a base config can be turned off by its mode.

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
        return Config("selective", load_policy(value, where=WHERE))
    if isinstance(value, str):
        return _parse_word(value)
    raise ConfigError(Problem(WHERE, f"a value of type {type(value).__name__}: {shown(repr(value))}", expected=WORDS))


def _parse_word(text: str) -> Config:
    word = word_of(text)
    if word in MODES:
        return Config(word)
    if word in ("false", "true"):
        return Config("none" if word == "false" else "full")
    if word in shipped_policies():
        return Config("selective", load_policy(word))
    if looks_like_path(text):
        return Config("selective", load_policy(text, where=WHERE))
    legal = (*MODES, *shipped_policies())
    raise ConfigError(
        Problem(
            WHERE,
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
        "verify": _read_verify,
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
    given = {key: value[key] for key in FULL_KEYS if key in value}
    wrong = [*problems_in(given, WHERE)]
    problems += [*wrong, *_misplaced(value, mode, read.get("layers"))]
    if mode in ("full", "selective") and not wrong:
        problems += idle_keys(given, WHERE)
    if not wrong:
        problems += contradictions(given, WHERE)
    if problems:
        raise ConfigError(problems)
    options = CallOptions(**{key: given[key] for key in CALL_KEYS if key in given})
    full = FullConfig(**{key: given[key] for key in FULL_CONFIG_KEYS if key in given})
    return Config(mode, **read, full=full, options=options)


def _misplaced(value: Mapping[Any, Any], mode: str, layers: Layers | Chunks | None) -> Iterator[Problem]:
    """Yield the keys that are legal, and not in this mode or beside each other."""
    if "policy" in value and mode == "full":
        fix = "write `mode: selective`, or leave the policy out"
        yield _problem("policy", "mode full takes no policy", fix=fix)
    if value.get("use_reentrant") is True and mode == "selective":
        fix = "leave it out: per-op decisions need the non-reentrant mode"
        yield _problem("use_reentrant", "mode selective has no reentrant form", fix=fix)
    if mode == "none" or not isinstance(layers, Chunks):
        return
    if mode == "selective":
        found = "mode selective decides op by op within one layer, and a chunk of layers is one region"
        yield _problem("layers", found, fix="write `mode: full`, or choose layers: {every: k}, {fraction: f}, …")
    if word_of(value.get("granularity")) == "submodule":
        found = "a chunk of layers is one region, and granularity submodule makes several of each layer"
        yield _problem("layers", found, fix="leave one of the two out")


def _read_mode(value: Mapping[Any, Any], problems: list[Problem]) -> str:
    """Return the mode; where it is none, note a problem and return an empty word."""
    if "mode" not in value:
        problems.append(_problem("mode", "the key `mode` is missing", listing(MODES)))
        return ""
    mode = value["mode"]
    word = word_of(mode)
    if word in MODES:
        return word
    near = {True: "full", False: "none", None: "none"}[mode] if mode is None or isinstance(mode, bool) else ""
    near = nearest(word, MODES) if word else near
    problems.append(_problem("mode", f"{shown(repr(mode))} is not a mode", listing(MODES), near))
    return ""


def _problem(key: str, found: str, expected: str = "", near: str = "", fix: str = "") -> Problem:
    return Problem(f"{WHERE}.{key}", found, expected=expected, nearest=near, fix=fix)


def _unknown_key(key: Any) -> Problem:
    if key in ARGUMENTS:
        fix = f"pass it as an argument: sac.apply(model, value, {key}=…)"
        return Problem(WHERE, f"{key} is no key of a config value", fix=fix)
    near = nearest(key, KEYS) if isinstance(key, str) else ""
    return Problem(WHERE, f"unknown key {shown(repr(key))}", expected=listing(KEYS), nearest=near)


def _read_policy(value: Any) -> Policy:
    return load_policy(value, where=f"{WHERE}.policy")


def _read_engine(value: Any) -> str:
    return _read_word("engine", value, ENGINES, "no engine")


def _read_verify(value: Any) -> str:
    return _read_word("verify", value, VERIFY, "no time to verify at")


def _read_word(key: str, value: Any, words: tuple[str, ...], what: str, legal: str = "") -> str:
    finding = check_word(value, words, what, legal)
    if finding is not None:
        raise ConfigError(_problem(key, *finding))
    return word_of(value)


def _read_blocks(value: Any) -> tuple[PathPattern, ...]:
    findings = Findings()
    patterns = read_patterns(node_from_value(value, f"{WHERE}.blocks", findings), "blocks", findings)
    if len(findings):
        raise ConfigError(findings.problems())
    return patterns


def _read_layers(value: Any) -> Layers | Chunks:
    findings = Findings()
    layers = read_layer_plan(node_from_value(value, f"{WHERE}.layers", findings), "layers", findings)
    if layers is None or len(findings):
        raise ConfigError(findings.problems())
    return layers


def _read_scope(value: Any) -> str | tuple[str, ...]:
    words = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    legal = f"{listing(SCOPES)}, or a list of them"
    findings = [finding for word in words or [value] if (finding := check_word(word, SCOPES, NO_SCOPE, legal))]
    if findings:
        raise ConfigError(_problem("scope", *finding) for finding in findings)
    return word_of(value) if isinstance(value, str) else tuple(word_of(word) for word in words)


def _read_granularity(value: Any) -> str:
    return _read_word("granularity", value, GRANULARITIES, "no granularity")


def _read_strict(value: Any) -> bool:
    finding = check_flag(value)
    if finding is not None:
        raise ConfigError(_problem("strict", *finding))
    return bool(value)


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
            f'rule "{rule.id}" saves whole modules (`module` without `ops`), and torch {torch.__version__} does not '
            "let saved-tensor hooks and modes be taken off",
            fix='add `ops`, for example ops: "*", to speak of the ops inside the module',
        )
        for rule in policy.rules
        if rule.speaks_of_module and rule.do != Decision.RECOMPUTE.value and not CAN_TAKE_OFF
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
