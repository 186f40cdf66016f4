"""Parse and validate the config value of a training run and turn it into settings."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn

from sac.errors import ConfigError, PolicyError, Problem, SacError, listing, nearest
from sac.policy.load import load_policy, looks_like_path, shipped_policies
from sac.policy.model import Chunks, Decision, Layers, Policy
from sac.policy.patterns import PathPattern
from sac.policy.read import read_layer_spec, read_patterns
from sac.policy.syntax import Findings, node_from_value, shown
from sac.recompute.table import ResolvedPolicy, resolve_policy
from sac.region.settings import ALWAYS, AUTO, ENGINES, PLAIN, VERIFY, Settings, StateProvider
from sac.stores.contiguous import ContiguousBuffer
from sac.stores.host import OnHost
from sac.stores.scatter import FirstCalls, Scattered, VerifiedOnce, group_problem
from sac.stores.store import InputStore, InputStoring, OnDevice
from sac.torch_private import HAS_STACKS

# -- Checks of single keys of the full-recompute path

STORES = ("whole", "scattered", "host", "contiguous")
KEEPS = ("first", "all")
CHECKS = ("default", "none")

Finding = tuple[str, str, str, str]  # found, expected, nearest, fix: as in Problem

_QUOTE = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
_FLAG_WORDS = {"yes": "true", "on": "true", "true": "true", "1": "true"}
_FLAG_WORDS |= {"no": "false", "off": "false", "false": "false", "0": "false"}


def word_of(value: Any) -> str:
    """Return ``value`` as it is compared: stripped, in lower case, ``-`` as ``_``; ``""`` if it is not a string."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else ""


def stores_in(written: Any) -> tuple[str, ...]:
    """Return the words of a ``store`` value in the order written; an empty tuple if it is not a string."""
    return tuple(word_of(word) for word in written.split("+")) if isinstance(written, str) else ()


def check_flag(value: Any, besides: str = "") -> Finding | None:
    """Return the problem with a value that must be true, false or the word ``besides``; None if it is valid."""
    if isinstance(value, bool) or (besides and word_of(value) == besides):
        return None
    meant = _FLAG_WORDS.get(word_of(str(value)), "")
    word = f"{besides}, " if besides else ""
    fix = f"write {meant}, without quotes" if meant else ""
    return _shown(value, f"not {word}true or false"), f"{word}true, false", "", fix


def check_word(value: Any, words: tuple[str, ...], what: str, legal: str = "") -> Finding | None:
    """Return the problem with a value that must be one of ``words``; None if it is valid.

    ``what`` completes the message "<value> is ..."; ``legal`` is the list in the message, by default ``words``.
    """
    word = word_of(value)
    if word in words:
        return None
    fix = _QUOTE if isinstance(value, bool) else ""
    return _shown(value, what), legal or listing(words), nearest(word, words) if word else "", fix


def problems_in(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield the problems of the values in ``given``, each checked by itself; unknown keys are ignored.

    ``where`` is the prefix of the key in messages.
    """
    for key, value in given.items():
        check = _CHECK_OF.get(key)
        finding = check(value) if check is not None else None
        if finding is not None:
            found, expected, near, fix = finding
            yield Problem(f"{where}.{key}", found, expected=expected, nearest=near, fix=fix)


def _shown(value: Any, what: str) -> str:
    return f"{shown(repr(value))} is {what}"


def _check_keep(value: Any) -> Finding | None:
    legal = f"{listing(KEEPS)}, or a predicate (position, tensor) -> bool"
    return None if callable(value) else check_word(value, KEEPS, "not a choice of inputs", legal)


def _check_store(value: Any) -> Finding | None:
    legal = f"{listing(STORES)}, or some of the last three joined by +"
    words = stores_in(value)
    wrong = next((word for word in words if word not in STORES), None)
    if wrong is None and words:
        alone = len(set(words)) == len(words) and ("whole" not in words or len(words) == 1)
        return None if alone else (f"{shown(repr(value))} does not go together", legal, "", "")
    joined = _joined_otherwise(value)
    if joined:
        return _shown(value, "not a store"), legal, "", f'write "{joined}"'
    return check_word(value if wrong is None else wrong, STORES, "not a store", legal)


def _joined_otherwise(value: Any) -> str:
    """Return stores that are written as a list or with another separator, joined by ``+``; ``""`` if not stores."""
    parts = re.split(r"[\s,+&|/]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts or any(word_of(part) not in STORES for part in parts):
        return ""
    return "+".join(word_of(part) for part in parts)


def _check_count(value: Any) -> Finding | None:
    return None if value is None else _check_whole(value, 1, "not a number of checkpoints")


def _check_prefetch(value: Any) -> Finding | None:
    return _check_whole(value, 0, "not a number of regions")


def _check_whole(value: Any, least: int, what: str) -> Finding | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    number = _number_in(value)
    fix = f"write {number}{', without quotes' if isinstance(value, str) else ''}" if number is not None else ""
    return _shown(value, what), f"a whole number, {least} or more", "", fix if number and number >= least else ""


def _number_in(value: Any) -> int | None:
    """Return the whole number that a string or a float represents, or None."""
    try:
        number = float(value) if isinstance(value, (str, float)) else math.nan
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None


def _check_state(value: Any) -> Finding | None:
    return _check_members(value, StateProvider, "a tuple of objects with snapshot() and restore(state)")


def _check_generators(value: Any) -> Finding | None:
    return _check_members(value, torch.Generator, "a tuple of torch.Generator")


def _check_members(value: Any, cls: type, legal: str) -> Finding | None:
    if _is_one(value, cls):
        return f"{shown(repr(value))} is not in a tuple", legal, "", "write a comma after it, in parentheses: (…,)"
    if isinstance(value, (list, tuple)) and all(_is_one(member, cls) for member in value):
        return None
    wrong = next((one for one in value if not _is_one(one, cls)), value) if isinstance(value, (list, tuple)) else value
    return _shown(wrong, "none of them"), legal, "", ""


def _is_one(value: Any, cls: type) -> bool:
    return isinstance(value, cls) and not isinstance(value, type)  # a class has the methods too, without a self


def _check_determinism(value: Any) -> Finding | None:
    return check_word(value, CHECKS, "not a check")


_CHECK_OF: dict[str, Callable[[Any], Finding | None]] = {
    "keep": _check_keep,
    "store": _check_store,
    "num_checkpoints": _check_count,
    "verify_replicated": partial(check_flag, besides="first"),
    "prefetch": _check_prefetch,
    "release_input": check_flag,
    "state": _check_state,
    "generators": _check_generators,
    "freeze_buffers": check_flag,
    "use_reentrant": check_flag,
    "distribute_saved_activations": check_flag,
    "preserve_rng_state": check_flag,
    "early_stop": check_flag,
    "determinism_check": _check_determinism,
}


# -- ``FullConfig``: options of the full-recompute path in addition to the arguments of ``sac.checkpoint``

COMPARED_BY_CALLS = FirstCalls()  # used where each call has its own settings


@dataclass(frozen=True, slots=True)
class FullConfig:
    """How regions keep their inputs until backward, and which state they restore for recomputation.

    ``keep``: the inputs that ``store`` applies to; all others are held whole. ``first``: the first floating-point
    tensor among the leaves of ``(args, kwargs)``; ``all``: all floating-point tensors; or a predicate
    ``(position, tensor) -> bool``.

    ``store``: where these inputs are kept.
    - ``whole``: hold the caller's tensor, which must not change.
    - ``scattered``: scatter over the tensor-parallel group; each rank holds 1 / group size of the bytes.
    - ``host``: a copy in host memory.
    - ``contiguous``: a slot of one preallocated buffer with ``num_checkpoints`` slots. One FullConfig has one buffer.
    - several of the last three joined by ``+``, as in ``scattered+host``.
    All stores except ``whole`` copy before the forward, so later writes to the input do not matter.

    ``verify_replicated``: compare the input across the group before scattering it. This costs an all-reduce, so every
    rank has to make the call. ``first``: in the first call of each region of ``sac.apply``, and in the first 256 calls
    of functions over a group; True: in every call; False: never.

    ``prefetch``: the number of regions, in backward order, whose gathers start ahead of time. Regions are found along
    the autograd graph, with at most a few dozen ops from one to the next.

    ``release_input``: between forward and backward the caller's tensor holds only this rank's share, flattened (as in
    Megatron and TransformerEngine), provided that nothing else holds its memory. Meanwhile, ops that saved the tensor
    earlier raise, and code that reads it sees the share.

    ``state``: providers of user-defined state (``snapshot``, ``restore``). ``generators``: generators to restore in
    addition to the default ones. ``freeze_buffers``: buffers that a region updates advance once, not a second time in
    recomputation.

    Raises ``ConfigError`` that lists every problem.
    """

    keep: str | Callable[[int, torch.Tensor], bool] = "first"
    store: str = "whole"
    num_checkpoints: int | None = None
    verify_replicated: bool | str = "first"
    prefetch: int = 0
    release_input: bool = False
    state: tuple[StateProvider, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    freeze_buffers: bool = True
    buffer: ContiguousBuffer | None = field(default=None, init=False, repr=False, compare=False)
    host: OnHost | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        problems = [*problems_in(given, "FullConfig")] or [*contradictions(given, "FullConfig")]
        if problems:
            raise ConfigError(problems)
        if isinstance(self.keep, str):
            object.__setattr__(self, "keep", word_of(self.keep))
        if isinstance(self.verify_replicated, str):
            object.__setattr__(self, "verify_replicated", word_of(self.verify_replicated))
        object.__setattr__(self, "store", "+".join(self.stores))
        object.__setattr__(self, "state", tuple(self.state))
        object.__setattr__(self, "generators", tuple(self.generators))
        if "contiguous" in self.stores and self.num_checkpoints is not None:
            object.__setattr__(self, "buffer", ContiguousBuffer(self.num_checkpoints, on_host="host" in self.stores))
        elif "host" in self.stores:
            object.__setattr__(self, "host", OnHost())

    @property
    def stores(self) -> tuple[str, ...]:
        """The words of ``store``, in the order of ``STORES``."""
        return tuple(sorted(stores_in(self.store), key=STORES.index))

    def reset(self) -> None:
        """Free every slot of the contiguous buffer, for example after forwards whose backward will never run."""
        if self.buffer is not None:
            self.buffer.reset()


FULL_CONFIG_KEYS = tuple(one.name for one in fields(FullConfig) if one.init)
CALL_KEYS = (
    "use_reentrant",
    "distribute_saved_activations",
    "preserve_rng_state",
    "early_stop",
    "determinism_check",
)


def contradictions(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield the combinations of ``FullConfig`` values in ``given`` that conflict; each value is already checked."""
    is_contiguous, count = "contiguous" in stores_in(given.get("store")), given.get("num_checkpoints")
    if is_contiguous and count is None:
        yield Problem(
            f"{where}.num_checkpoints",
            "a contiguous store needs to know how many checkpoints it is to hold",
            fix="give num_checkpoints, the number of regions whose backward is pending at once: as a rule, of layers",
        )
    if count is not None and not is_contiguous:
        found = "it counts the slots of a contiguous store, and the store is another"
        yield Problem(f"{where}.num_checkpoints", found, fix="choose store contiguous, or leave num_checkpoints out")


_NEEDS_SCATTER = {"verify_replicated": "nothing to compare over the group", "prefetch": "nothing to gather ahead"}


def idle_keys(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield the keys in ``given`` that have no effect because no input is scattered or copied.

    ``given`` holds the keys of ``FullConfig`` and of the call: the call may turn on scattering, so ``FullConfig`` alone
    cannot decide this.
    """
    stores = stores_in(given.get("store", "whole"))
    if given.get("distribute_saved_activations") is True or "scattered" in stores:
        return
    fix = "turn distribute_saved_activations on, or leave {} out"
    for key, lacking in _NEEDS_SCATTER.items():
        if given.get(key) and given[key] != "first":
            yield Problem(f"{where}.{key}", f"no input is scattered, so there is {lacking}", fix=fix.format(key))
    if given.get("release_input") and stores == ("whole",):
        found = "inputs are held whole, so there is nothing that could take the place of the caller's tensor"
        yield Problem(f"{where}.release_input", found, fix=fix.format("release_input"))


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The arguments of ``sac.checkpoint`` outside ``FullConfig``; those in ``CALL_KEYS`` are also config keys."""

    use_reentrant: bool = False
    distribute_saved_activations: bool = False
    tp_group: Any = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    preserve_rng_state: bool = True
    early_stop: bool = True
    determinism_check: str = "default"


DEFAULT_CONFIG = FullConfig()
DEFAULT_OPTIONS = CallOptions()
_REENTRANT_OPTIONS = CallOptions(use_reentrant=True)
REENTRANT = Settings(use_reentrant=True)


def settings_of(
    config: FullConfig, options: CallOptions, where: str, compared: VerifiedOnce = COMPARED_BY_CALLS
) -> Settings:
    """Return the settings of frames; raises ``ConfigError`` for options that cannot be carried out.

    ``where`` names the call in messages: ``sac.checkpoint``. The group is checked only if inputs are scattered over it,
    so that a launcher can pass it with every config. ``compared``: see Note [Compared once].
    """
    if config is DEFAULT_CONFIG and options == DEFAULT_OPTIONS:
        return PLAIN
    if config is DEFAULT_CONFIG and options.use_reentrant is True and options == _REENTRANT_OPTIONS:
        return REENTRANT  # the usual call in this mode; the code below takes as long as a small region
    if not isinstance(config, FullConfig):
        fix = "write sac.full.FullConfig(…); for a keyword of the function's own, functools.partial(function, config=…)"
        raise ConfigError(
            Problem(f"{where}.config", f"{shown(repr(config))} is not a FullConfig", "a FullConfig", fix=fix)
        )
    problems = list(problems_in({key: getattr(options, key) for key in CALL_KEYS}, where))
    tracker = options.get_rng_state_tracker
    if tracker is not None and not callable(tracker):
        found = f"{tracker!r} cannot be called"
        problems.append(Problem(f"{where}.get_rng_state_tracker", found, "a function that returns a tracker"))
    scatters = options.distribute_saved_activations is True or "scattered" in config.stores
    if scatters:
        problems += group_problem(options.tp_group, where)
    elif config is not DEFAULT_CONFIG:
        problems += idle_keys({key: getattr(config, key) for key in FULL_CONFIG_KEYS}, where)
    if problems:
        raise ConfigError(problems)
    return Settings(
        input_storing=_keeping(config, options.tp_group if scatters else None, compared),
        trackers=(tracker,) if tracker is not None else (),
        generators=config.generators,
        providers=config.state,
        preserve_rng_state=options.preserve_rng_state,
        freeze_buffers=config.freeze_buffers,
        early_stop=options.early_stop,
        checks_metadata=word_of(options.determinism_check) == "default",
        use_reentrant=options.use_reentrant,
    )


def _keeping(config: FullConfig, group: Any, compared: VerifiedOnce) -> InputStoring | None:
    """Return which inputs are kept elsewhere and where; None if every input is held whole."""
    placement: InputStore | None = config.buffer or config.host
    if group is not None:
        share = placement if placement is not None else OnDevice()
        verify = config.verify_replicated if isinstance(config.verify_replicated, bool) else compared
        scattered = Scattered.over(group, share, verify=verify, prefetch=config.prefetch)
        placement = scattered if scattered is not None else placement  # a group of one rank has nothing to scatter
    return None if placement is None else InputStoring(placement, config.keep, config.release_input)


# -- The config value of ``activation_checkpointing:``

MODES = ("none", "full", "selective")
OWN_KEYS = ("mode", "policy", "engine", "verify", "blocks", "layers", "scope", "granularity", "strict")
FULL_KEYS = (*CALL_KEYS, *FULL_CONFIG_KEYS)
KEYS = (*OWN_KEYS, *FULL_KEYS)
ARGUMENTS = ("tp_group", "get_rng_state_tracker")  # of sac.apply: objects, which no config file can hold
SCOPES = ("all", "language", "vision", "audio", "multimodal")
NO_SCOPE = "not a part of a model"
GRANULARITIES = ("block", "submodule")
WHERE = "activation_checkpointing"
WORDS = "none, full, selective, a shipped policy's name, a path to a YAML file, or a mapping"


@dataclass(frozen=True, slots=True)
class Config:
    """A parsed config value.

    In mode selective, ``policy`` None means the policy of the model's family. ``full`` and ``options`` hold the
    settings that regions run with.
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
    """Return the parsed form of a config value.

    ``value`` is None or False (none), True (full), a word (``none``, ``full``, ``selective`` or the name of a shipped
    policy; case and hyphens do not matter), a path to a policy file, a ``Policy``, or a mapping with keys of ``KEYS``.

    ``layers`` chooses layers of each stack: ``all``, ``{first: n}`` or ``{block: n}``, ``{last: n}``,
    ``{every: k, offset: j}``, ``{fraction: f}`` (that share of them, spread evenly), or a list such as
    ``["0-7", "12"]``. It can also group layers into chunks that are one region each: ``{uniform: n}``, or ``sqrt`` for
    chunks whose size is the square root of the number of layers. Chunks require layers in an ``nn.Sequential``.

    Modes full and selective both accept the keys of the full path (those of ``FullConfig`` and the switches among the
    arguments of ``sac.checkpoint``); ``use_reentrant`` and chunks of layers are for mode full only. Mode none accepts
    and ignores every key, so that setting the mode turns a base config off.

    Raises ``ConfigError`` or ``PolicyError`` that lists every problem.
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
    """Yield the problems of legal keys that this mode does not allow, or that conflict with each other."""
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
    """Return the mode; if it is missing or invalid, append a problem and return ``""``."""
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
        return Problem(WHERE, f"{key} is not a key of a config value", fix=fix)
    near = nearest(key, KEYS) if isinstance(key, str) else ""
    return Problem(WHERE, f"unknown key {shown(repr(key))}", expected=listing(KEYS), nearest=near)


def _read_policy(value: Any) -> Policy:
    return load_policy(value, where=f"{WHERE}.policy")


def _read_engine(value: Any) -> str:
    return _read_word("engine", value, ENGINES, "not an engine")


def _read_verify(value: Any) -> str:
    return _read_word("verify", value, VERIFY, "not a time to verify at")


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
    layers = read_layer_spec(node_from_value(value, f"{WHERE}.layers", findings), "layers", findings)
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
    return _read_word("granularity", value, GRANULARITIES, "not a granularity")


def _read_strict(value: Any) -> bool:
    finding = check_flag(value)
    if finding is not None:
        raise ConfigError(_problem("strict", *finding))
    return bool(value)


def family_policy(model: nn.Module) -> Policy:
    """Return the shipped policy for ``model``, found by its config's ``model_type`` or its class, else ``general``."""
    return policy_of_family(family_names(model))


def policy_of_family(names: Iterable[str]) -> Policy:
    """Return the first shipped policy for a family with one of these names, else ``general``."""
    policies = [load_policy(name) for name in shipped_policies() if name != "general"]
    for name in names:
        for policy in policies:
            if any(fnmatchcase(name.lower(), pattern.lower()) for pattern in policy.models):
                return policy
    return load_policy("general")


def family_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names by which the family of ``model`` is known, the best first."""
    return tuple(_family_names(model))


def _family_names(model: nn.Module) -> Iterator[str]:
    for module in model.modules():
        config = getattr(module, "config", None)
        for one in (config, getattr(config, "text_config", None)):
            model_type = getattr(one, "model_type", None)
            if isinstance(model_type, str) and model_type:
                yield model_type
        yield type(module).__name__
        if not any(True for _ in module.children()):
            return


def usable_policy(policy: Policy) -> ResolvedPolicy:
    """Return ``policy`` with its names resolved; raises ``PolicyError`` for unknown names and unsupported features."""
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
        if rule.matches_module and rule.do != Decision.RECOMPUTE.value and not HAS_STACKS
    ]
    if policy.default is Decision.OFFLOAD:
        problems.append(Problem(policy.where("default"), "offloading is not built yet", "save, recompute"))
    try:
        bound = resolve_policy(policy)
    except PolicyError as error:
        problems += error.problems
    if problems:
        raise PolicyError(problems)
    return bound
