"""Parse and validate the config value of a training run and turn it into settings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from sac.config_keys import (
    CALL_ARGUMENTS,
    CALL_DEFAULTS,
    CALL_KEYS,
    CONFIG_KEYS,
    DEFAULTS,
    FULL_CONFIG_KEYS,
    OWN_KEYS,
    StateProvider,
    StepBudget,
    read_keys,
)
from sac.engine.settings import PLAIN, RERUN, Settings
from sac.errors import ConfigError, Problem, listing, nearest
from sac.policy.load import load_policy, looks_like_path, shipped_policies
from sac.policy.model import Layers, Policy
from sac.policy.patterns import PathPattern
from sac.policy.read import word_of
from sac.policy.syntax import all_problems, shown
from sac.stores.contiguous import ContiguousBuffer
from sac.stores.scatter import Compared, FirstCalls, Scattered, check_group, process_group
from sac.stores.store import InputStore, InputStoring, OnDevice, OnHost
from sac.stores.transfers import TransfersByDevice

# -- ``FullConfig``: options of the full-recompute path in addition to the arguments of ``sac.checkpoint``

COMPARED_BY_CALLS = FirstCalls()  # used where each call has its own settings


@dataclass(frozen=True, slots=True)
class FullConfig:
    """How regions keep their inputs until backward, and which state they restore for recomputation.

    The fields are keys of ``CONFIG_KEYS``, where each has its line; ``docs/full-recompute.md`` says more. All stores
    except ``whole`` copy before the forward, so later writes to the input do not matter. Scattered inputs are compared
    over the group first, once per region of ``sac.apply`` and in the first 256 calls of functions: every rank has to
    make these calls.

    Raises ``ConfigError`` that lists every problem.
    """

    keep: str | Callable[[int, torch.Tensor], bool] = DEFAULTS["keep"]
    store: str = DEFAULTS["store"]
    num_checkpoints: int | None = DEFAULTS["num_checkpoints"]
    state: tuple[StateProvider, ...] = DEFAULTS["state"]
    host_memory: int | None = DEFAULTS["host_memory"]
    placement: InputStore | None = field(init=False, repr=False, compare=False)  # without scattering
    transfers: TransfersByDevice = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read = read_keys({name: getattr(self, name) for name in FULL_CONFIG_KEYS}, "FullConfig")
        refuse(_full_conflicts(read), "FullConfig")
        read["transfers"] = transfers = TransfersByDevice(read["host_memory"])
        buffer = ContiguousBuffer(read["num_checkpoints"]) if "contiguous" in read["store"] else None
        read["placement"] = OnHost(transfers) if "host" in read["store"] else buffer
        for name, value in read.items():
            object.__setattr__(self, name, value)

    def reset(self) -> None:
        """Free every slot of the contiguous buffer, for example after forwards whose backward will never run."""
        if isinstance(self.placement, ContiguousBuffer):
            self.placement.reset()


Conflict: TypeAlias = tuple[bool, str, str, str]  # of legal values: whether it is there, key, what is found, fix


def _full_conflicts(values: Mapping[str, Any]) -> Iterator[Conflict]:
    is_contiguous, has_count = "contiguous" in values["store"], values["num_checkpoints"] is not None
    found = "a contiguous store needs to know how many checkpoints it is to hold"
    fix = "give num_checkpoints, the number of regions whose backward is pending at once: as a rule, of layers"
    yield is_contiguous and not has_count, "num_checkpoints", found, fix
    found = "it counts the slots of a contiguous store, but `store` is not contiguous"
    yield has_count and not is_contiguous, "num_checkpoints", found, "choose store contiguous, or leave it out"


def refuse(conflicts: Iterable[Conflict], where: str) -> None:
    """Raise ``ConfigError`` with the conflicts that there are; ``where`` is the place above their keys."""
    problems = [Problem(f"{where}.{name}", found, fix=fix) for is_wrong, name, found, fix in conflicts if is_wrong]
    if problems:
        raise ConfigError(problems)


DEFAULT_CONFIG = FullConfig()


def settings_of(config: FullConfig, where: str, compared: Compared = COMPARED_BY_CALLS, **arguments: Any) -> Settings:
    """Return the settings of frames; raises ``ConfigError`` for options that cannot be carried out.

    ``where`` names the call in messages: ``sac.checkpoint``. ``arguments``: those of ``sac.checkpoint`` outside
    ``FullConfig``. The group is checked only if inputs are scattered over it, so that a launcher can pass it with every
    config. ``compared``: see Note [Compared once].
    """
    unusual = {key: value for key, value in arguments.items() if value is not CALL_DEFAULTS.get(key, CALL_DEFAULTS)}
    if config is DEFAULT_CONFIG and not unusual:
        return PLAIN
    if not isinstance(config, FullConfig):
        fix = "write sac.full.FullConfig(…); for a keyword of the function's own, functools.partial(function, config=…)"
        found = f"{shown(repr(config))} is not a FullConfig"
        raise ConfigError(Problem(f"{where}.config", found, "a FullConfig", fix=fix))
    scatters = unusual.get("distribute_saved_activations") is True or "scattered" in config.store
    unread = {key: value for key, value in unusual.items() if key not in CALL_KEYS or not isinstance(value, bool)}
    values = CALL_DEFAULTS | unusual
    if unread or scatters:  # this runs in each call of `sac.checkpoint`
        with all_problems(ConfigError) as attempt:
            values |= attempt(read_keys, unread, where, CALL_ARGUMENTS) or {}
            if scatters:
                attempt(check_group, unusual.get("tp_group"), where)
    return Settings(
        input_storing=_keeping(config, values["tp_group"] if scatters else None, compared),
        trackers=(values["get_rng_state_tracker"],) if values["get_rng_state_tracker"] is not None else (),
        providers=config.state,
        preserve_rng_state=values["preserve_rng_state"],
        early_stop=values["early_stop"],
        checks_metadata=values["determinism_check"] == "default",
        use_reentrant=values["use_reentrant"],
        transfers=config.transfers,
    )


def _keeping(config: FullConfig, group: Any, compared: Compared) -> InputStoring | None:
    """Return which inputs are kept elsewhere and where; None if every input is held whole."""
    placement = config.placement
    if group is not None and (over := process_group(group)).size() > 1:
        placement = Scattered(over, placement or OnDevice(), compared)
    return None if placement is None else InputStoring(placement, config.keep)


# -- The config value of ``activation_checkpointing:``

MODES = CONFIG_KEYS["mode"].words
WHERE = "activation_checkpointing"


@dataclass(frozen=True, slots=True)
class Config:
    """A parsed config value.

    In mode selective, ``policy`` None means the policy of the model's family, or with a ``budget`` any that fits.
    ``full`` and ``options`` hold the settings that regions run with.
    """

    mode: str = DEFAULTS["mode"]
    policy: Policy | None = DEFAULTS["policy"]
    engine: str = DEFAULTS["engine"]
    verify: str = DEFAULTS["verify"]
    blocks: tuple[PathPattern, ...] = DEFAULTS["blocks"]
    layers: Layers = DEFAULTS["layers"]
    granularity: str = DEFAULTS["granularity"]
    strict: bool = DEFAULTS["strict"]
    budget: StepBudget | None = DEFAULTS["budget"]
    optimizer: str | None = DEFAULTS["optimizer"]
    full: FullConfig = DEFAULT_CONFIG
    options: Mapping[str, Any] = field(default_factory=lambda: {key: DEFAULTS[key] for key in CALL_KEYS})


def parse_config(value: Any) -> Config:
    """Return the parsed form of a config value.

    ``value`` is None or False (none), True (full), a word (``none``, ``full``, ``selective`` or the name of a shipped
    policy; case and hyphens do not matter), a path to a policy file, a ``Policy``, or a mapping with the keys of
    ``CONFIG_KEYS``. Mode none accepts and ignores every key, so that setting the mode turns a base config off.

    Raises ``ConfigError`` or ``PolicyError`` that lists every problem.
    """
    if isinstance(value, Config):
        return value
    if isinstance(value, Mapping):
        return _parse_mapping(value)
    text = str(value) if value is None or isinstance(value, str | bool) else ""
    word = {"false": "none", "true": "full"}.get(word_of(text), word_of(text))
    if word in MODES:
        return Config(word)
    if isinstance(value, Policy | os.PathLike) or word in shipped_policies() or looks_like_path(text):
        return Config("selective", load_policy(value, where=WHERE))
    legal = (*MODES, *shipped_policies())
    expected = f"{listing(legal)}, a path to a YAML file, or a mapping"
    found = f'"{shown(text)}" is not known' if text else f"a value of type {type(value).__name__}: {shown(repr(value))}"
    raise ConfigError(Problem(WHERE, found, expected, nearest(word, legal)))


def _parse_mapping(value: Mapping[Any, Any]) -> Config:
    read = read_keys(value, WHERE)
    values = DEFAULTS | read
    refuse([*_conflicts(read.get("mode"), values), *_full_conflicts(values)], WHERE)
    own, call, full = ({name: values[name] for name in names} for names in (OWN_KEYS, CALL_KEYS, FULL_CONFIG_KEYS))
    config = FullConfig(**full)
    config.transfers.strict = values["strict"]
    return Config(**own, full=config, options=call)


def _conflicts(mode: str | None, values: Mapping[str, Any]) -> Iterator[Conflict]:
    in_chunks, has_budget = values["layers"].form == "uniform", values["budget"] is not None
    yield mode is None, "mode", "the key `mode` is missing", f"add one of {listing(MODES)}"
    if mode == "full":
        fix = "write `mode: selective`, or leave the policy out"
        yield values["policy"] is not None, "policy", "mode full takes no policy", fix
        yield has_budget, "budget", "mode full leaves nothing to choose", fix
    if mode == "selective":
        fix = "leave it out: per-op decisions need the non-reentrant mode"
        yield values["use_reentrant"], "use_reentrant", "mode selective has no reentrant form", fix
        found = "mode selective decides op by op within one layer, and a chunk of layers is one region"
        yield in_chunks, "layers", found, "write `mode: full`, or choose layers: {every: k}, {fraction: f}, …"
        found = "it says how a budget is met, and there is none"
        yield values["optimizer"] is not None and not has_budget, "optimizer", found, "give a budget"
        found = "a budget chooses among all ops"
        yield values["policy"] is not None and has_budget, "policy", found, "leave out the policy, or the budget"
        found = "a budget is planned for the replay engine"
        yield values["engine"] == RERUN and has_budget, "engine", found, "leave the engine out"
    if mode != "none":
        found = "a chunk of layers is one region, but granularity submodule makes several regions of each layer"
        yield in_chunks and values["granularity"] == "submodule", "layers", found, "leave one of the two out"


def family_policy(model: nn.Module, blocks: Iterable[nn.Module] = ()) -> Policy:
    """Return the shipped policy for ``model``, found by its config's ``model_type`` or its class, else ``general``.

    It is ``adapters`` where more than half of the parameters of ``blocks`` are frozen, not counting wholly frozen ones.
    """
    of_blocks = [[*block.parameters()] for block in blocks]
    partly = [part for of_block in of_blocks if any(one.requires_grad for one in of_block) for part in of_block]
    if sum(-one.numel() if one.requires_grad else one.numel() for one in partly) > 0:
        return load_policy("adapters")
    policies = [load_policy(name) for name in shipped_policies() if name != "general"]
    for name in _family_names(model):
        for policy in policies:
            if any(fnmatchcase(name.lower(), pattern.lower()) for pattern in policy.models):
                return policy
    return load_policy("general")


def _family_names(model: nn.Module) -> Iterator[str]:
    """Yield the names by which the family of ``model`` is known, the best first."""
    for module in model.modules():
        config = getattr(module, "config", None)
        for one in (config, getattr(config, "text_config", None)):
            yield str(getattr(one, "model_type", None) or "")
        yield type(module).__name__
        if not any(True for _ in module.children()):
            return
