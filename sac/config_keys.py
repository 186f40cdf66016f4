"""The table of config keys: for each key its default, its check, the modes that refuse it, and its line in the docs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

from sac.errors import ConfigError, Problem, SacError, listing, nearest
from sac.policy.load import load_policy
from sac.policy.model import Chunks, Layers
from sac.policy.patterns import PathPattern
from sac.policy.read import LEGAL_BYTES, parse_bytes, read_layer_spec, read_patterns
from sac.policy.syntax import Findings, node_from_value, shown

# -- A key, and how its value is read

Finding: TypeAlias = tuple[str, str, str, str]  # found, expected, nearest, fix: as in Problem
Check: TypeAlias = Callable[[Any], Finding | None]
Reader: TypeAlias = Callable[[Any, str], Any]  # value, its place in messages


@runtime_checkable
class StateProvider(Protocol):
    """User state that a region's forward reads or changes: FP8 scales, counters."""

    def snapshot(self) -> Any:
        """Return the current state; later changes must not affect the returned object."""

    def restore(self, state: Any) -> None:
        """Restore a state that ``snapshot`` returned."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A mode that refuses a key, and the problem that is reported; ``applies`` tells for which values of the key."""

    mode: str
    found: str
    fix: str
    applies: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config value.

    ``default``: the value where the key is left out. ``read``: returns a value as it is compared and held; raises a
    ``SacError`` with every problem. ``words``: the legal words, if the value is one of some. ``values`` and ``meaning``
    are the key's line in the docs, as Markdown.
    """

    name: str
    default: Any
    read: Reader
    meaning: str
    values: str = ""
    words: tuple[str, ...] = ()
    refused_by: Refusal | None = None


def read_keys(given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values in ``given``, each read by itself, and the problems of the others; unknown keys are ignored.

    ``where`` is the prefix of a key in messages.
    """
    read: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        key = CONFIG_KEYS.get(name)
        if key is not None:
            try:
                read[name] = key.read(value, f"{where}.{name}")
            except SacError as error:
                problems += error.problems
    return read, problems


def word_of(value: Any) -> str:
    """Return ``value`` as it is compared: stripped, in lower case, ``-`` as ``_``; ``""`` if it is not a string."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else ""


def _as_is(value: Any) -> Any:
    return value


def _word_in(value: Any) -> Any:
    """Return a word as it is compared, and any other value as it is."""
    return word_of(value) if isinstance(value, str) else value


def _checked(check: Check, form: Callable[[Any], Any] = _as_is) -> Reader:
    """Return a reader of values without a problem; ``form`` returns such a value as it is held."""

    def read(value: Any, place: str) -> Any:
        finding = check(value)
        if finding is not None:
            raise ConfigError(Problem(place, *finding))
        return form(value)

    return read


# -- Checks of single values

_QUOTE = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
_FLAG_WORDS = {"yes": "true", "on": "true", "true": "true", "1": "true"}
_FLAG_WORDS |= {"no": "false", "off": "false", "false": "false", "0": "false"}


def _shown(value: Any, what: str) -> str:
    return f"{shown(repr(value))} is {what}"


def _check_flag(value: Any) -> Finding | None:
    """Return the problem with a value that must be true or false; None if it is valid."""
    if isinstance(value, bool):
        return None
    meant = _FLAG_WORDS.get(word_of(str(value)), "")
    fix = f"write {meant}, without quotes" if meant else ""
    return _shown(value, "not true or false"), "true, false", "", fix


def _check_word(value: Any, words: tuple[str, ...], what: str, legal: str = "") -> Finding | None:
    """Return the problem with a value that must be one of ``words``; None if it is valid.

    ``what`` completes the message "<value> is ..."; ``legal`` is the list in the message, by default ``words``.
    """
    word = word_of(value)
    if word in words:
        return None
    fix = _QUOTE if isinstance(value, bool) else ""
    return _shown(value, what), legal or listing(words), nearest(word, words) if word else "", fix


def _check_mode(value: Any) -> Finding | None:
    if value is None or isinstance(value, bool):  # as the whole config value, these are modes
        return f"{value!r} is not a mode", listing(_MODES), "full" if value is True else "none", ""
    return _check_word(value, _MODES, "not a mode")


def _check_keep(value: Any) -> Finding | None:
    legal = f"{listing(_KEEPS)}, or a predicate (position, tensor) -> bool"
    return None if callable(value) else _check_word(value, _KEEPS, "not a choice of inputs", legal)


def stores_in(written: Any) -> tuple[str, ...]:
    """Return the words of a ``store`` value in the order written; an empty tuple if it is not a string."""
    return tuple(word_of(word) for word in written.split("+")) if isinstance(written, str) else ()


def _sorted_stores(written: str) -> str:
    return "+".join(sorted(stores_in(written), key=_STORES.index))


def _check_store(value: Any) -> Finding | None:
    legal = f"{listing(_STORES)}, or some of the last three joined by +"
    words = stores_in(value)
    wrong = next((word for word in words if word not in _STORES), None)
    if wrong is None and words:
        alone = len(set(words)) == len(words) and ("whole" not in words or len(words) == 1)
        return None if alone else (f"{shown(repr(value))} does not go together", legal, "", "")
    joined = _joined_otherwise(value)
    if joined:
        return _shown(value, "not a store"), legal, "", f'write "{joined}"'
    return _check_word(value if wrong is None else wrong, _STORES, "not a store", legal)


def _joined_otherwise(value: Any) -> str:
    """Return stores that are written as a list or with another separator, joined by ``+``; ``""`` if not stores."""
    parts = re.split(r"[\s,+&|/]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts or any(word_of(part) not in _STORES for part in parts):
        return ""
    return "+".join(word_of(part) for part in parts)


def _check_optimizer(value: Any) -> Finding | None:
    return None if value is None else _check_word(value, tuple(STATES), "not the name of an optimizer")


def _check_count(value: Any) -> Finding | None:
    return None if value is None else _check_whole(value, 1, "not a number of checkpoints")


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


def _check_members(value: Any, cls: type, legal: str) -> Finding | None:
    if _is_one(value, cls):
        return f"{shown(repr(value))} is not in a tuple", legal, "", "write a comma after it, in parentheses: (…,)"
    if isinstance(value, (list, tuple)) and all(_is_one(member, cls) for member in value):
        return None
    wrong = next((one for one in value if not _is_one(one, cls)), value) if isinstance(value, (list, tuple)) else value
    return _shown(wrong, "none of them"), legal, "", ""


def _is_one(value: Any, cls: type) -> bool:
    return isinstance(value, cls) and not isinstance(value, type)  # a class has the methods too, without a self


# -- Readers that are of use elsewhere too, and readers of values with a structure of their own

read_flag: Reader = _checked(_check_flag)
read_determinism_check: Reader = _checked(partial(_check_word, words=("default", "none"), what="not a check"), word_of)


def _read_policy(value: Any, place: str) -> Any:
    return load_policy(value, where=place)


def _read_blocks(value: Any, place: str) -> tuple[PathPattern, ...]:
    findings = Findings()
    patterns = read_patterns(node_from_value(value, place, findings), "blocks", findings)
    if len(findings):
        raise ConfigError(findings.problems())
    return patterns


def _read_layers(value: Any, place: str) -> Layers | Chunks:
    findings = Findings()
    layers = read_layer_spec(node_from_value(value, place, findings), "layers", findings)
    if layers is None or len(findings):
        raise ConfigError(findings.problems())
    return layers


# -- Budgets

USABLE = 0.9  # of a device's memory, unless it is said: the driver, libraries and fragmentation need the rest
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""The states that an optimizer holds for each trained parameter, by its name; each has the parameter's size."""

LEGAL_BUDGET = f'{LEGAL_BYTES}, a share of the range such as "50%", auto, or {{device: 90%}}'


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The most memory of a step: bytes, a share of the range, or a share of the device's memory; one of them is given.

    The range goes from the least peak to the peak without checkpointing. Shares are from 0 to 1.
    """

    bytes: int | None = None
    share: float | None = None
    of_device: float | None = None
    written: str = ""

    def __str__(self) -> str:
        return self.written


def _share_in(text: str) -> float:
    """Return a percentage as a number from 0 to 1; raises ``ValueError`` with the reason."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise ValueError("a share is a number with %") from None
    if not (text.strip().endswith("%") and 0 <= share <= 1):
        raise ValueError("a share is 0% to 100%")
    return share


def _read_budget(value: Any, place: str) -> StepBudget | None:
    if value is None or isinstance(value, StepBudget):
        return value
    written = f"{{device: {value['device']}}}" if _is_of_device(value) else str(value)
    try:
        if _is_of_device(value):
            return StepBudget(of_device=_share_in(str(value["device"])), written=written)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return StepBudget(value, written=written)
        if word_of(value) == "auto":
            return StepBudget(of_device=USABLE, written="auto")
        if isinstance(value, str) and value.strip().endswith("%"):
            return StepBudget(share=_share_in(value), written=written)
        if isinstance(value, str) and (count := parse_bytes(value.strip())):
            return StepBudget(count, written=written)
    except ValueError as error:
        raise ConfigError(Problem(place, f"{shown(repr(value))} is not a budget: {error}", LEGAL_BUDGET)) from None
    near = nearest(word_of(value), ("auto",)) if isinstance(value, str) else ""
    raise ConfigError(Problem(place, _shown(value, "not a budget"), LEGAL_BUDGET, near))


def _is_of_device(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == {"device"}


def _read_host_memory(value: Any, place: str) -> int | None:
    """Return a number of bytes; None stands for no limit."""
    reason = ""
    try:
        if value is None:
            return None
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return parse_bytes(str(value))
    except ValueError as error:
        reason = f": {error}"
    raise ConfigError(Problem(place, _shown(value, "not an amount of host memory") + reason, LEGAL_BYTES))


# -- The table, in the order of the docs and of messages

_MODES = ("none", "full", "selective")
_ENGINES = ("auto", "rerun", "replay")
_TIMES = ("first", "always", "never")
_GRANULARITIES = ("block", "submodule")
_KEEPS = ("first", "all")
_STORES = ("whole", "scattered", "host", "contiguous")


def _always(value: Any) -> bool:
    return True


def _is_given(value: Any) -> bool:
    return value is not None


def _is_chunks(layers: Any) -> bool:
    return isinstance(layers, Chunks)


def _is_true(value: Any) -> bool:
    return value is True


def _word_key(name: str, words: tuple[str, ...], what: str, meaning: str, *, default: str) -> Key:
    """Return a key whose value is one of ``words``; ``what`` as in ``_check_word``."""
    check = partial(_check_word, words=words, what=what)
    return Key(name, default, _checked(check, word_of), meaning, _in_code(words), words)


def _flag_key(name: str, meaning: str, *, default: bool, refused_by: Refusal | None = None) -> Key:
    return Key(name, default, read_flag, meaning, "`true`, `false`", refused_by=refused_by)


def _in_code(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words)


# Keys that `Config` holds itself.
_OWN = (
    Key(
        "mode",
        "none",
        _checked(_check_mode, word_of),
        "required; if it is the only key, write its value without a mapping (`true` is `full`, `false` is `none`)",
        _in_code(_MODES),
        _MODES,
    ),
    Key(
        "policy",
        None,
        _read_policy,
        "for `selective`; default: the policy of the model's family",
        "a shipped name, a path, a mapping",
        refused_by=Refusal(
            "full", "mode full takes no policy", "write `mode: selective`, or leave the policy out", _always
        ),
    ),
    _word_key(
        "engine",
        _ENGINES,
        "not an engine",
        "how to recompute: `auto` replays recorded ops where that is as good as running Python again in every respect; "
        "see [engines.md](engines.md#when-rerun-is-used)",
        default="auto",
    ),
    _word_key(
        "verify",
        _TIMES,
        "not a time to verify at",
        "when recomputed values are compared with those of the forward",
        default="first",
    ),
    Key(
        "blocks",
        (),
        _read_blocks,
        "which modules are regions, if sac does not find them by itself",
        "module paths, `*` for one segment, `**` for any number",
    ),
    Key(
        "layers",
        Layers(),
        _read_layers,
        "which layers of each stack; in mode full also `sqrt` and `{uniform: n}`, chunks of layers",
        '`all`, `{first: n}`, `{last: n}`, `{every: k, offset: j}`, `{fraction: f}`, `["0-7", "12"]`',
        refused_by=Refusal(
            "selective",
            "mode selective decides op by op within one layer, and a chunk of layers is one region",
            "write `mode: full`, or choose layers: {every: k}, {fraction: f}, …",
            _is_chunks,
        ),
    ),
    _word_key(
        "granularity",
        _GRANULARITIES,
        "not a granularity",
        "one region per block, or one for each of its larger parts",
        default="block",
    ),
    _flag_key(
        "strict",
        "`true`: a rule that matches nothing in the first step raises an error; `false`: it warns, and results that it "
        "matches later are saved",
        default=False,
    ),
    Key(
        "budget",
        None,
        _read_budget,
        "for `selective`: the most memory of a step; the first step is observed, and the fastest policy that fits is "
        "used from the second; see [a budget in the config](budget.md)",
        "`60GiB`, `50%` of the range, `auto`, `{device: 90%}`",
        refused_by=Refusal(
            "full", "mode full leaves nothing to choose", "write `mode: selective`, or leave the budget out", _is_given
        ),
    ),
    Key(
        "optimizer",
        None,
        _checked(_check_optimizer, _word_in),
        "with `budget`: the optimizer whose state is reserved for until it is there; default: two states per trained "
        "parameter",
        _in_code(tuple(STATES)),
        tuple(STATES),
    ),
)

# Keys of `CallOptions`, which are arguments of `sac.checkpoint` too.
_OF_THE_CALL = (
    _flag_key(
        "use_reentrant",
        "see above; not in `mode: selective`",
        default=False,
        refused_by=Refusal(
            "selective",
            "mode selective has no reentrant form",
            "leave it out: per-op decisions need the non-reentrant mode",
            _is_true,
        ),
    ),
    _flag_key("distribute_saved_activations", "the same as `scattered` in `store`", default=False),
    _flag_key("preserve_rng_state", "restore random states for recomputation", default=True),
    _flag_key(
        "early_stop",
        "stop recomputation when backward has what it needs; `false`: run every op that is not saved, under every "
        "engine; torch's `set_checkpoint_early_stop` takes precedence",
        default=True,
    ),
)

# Keys of `FullConfig`.
_OF_FULL_CONFIG = (
    Key(
        "keep",
        "first",
        _checked(_check_keep, _word_in),
        "which inputs `store` applies to; the others are held whole. `first`: the first floating-point tensor; `all`; "
        "or a predicate `(position, tensor) -> bool`",
        words=_KEEPS,
    ),
    Key("store", "whole", _checked(_check_store, _sorted_stores), "see above", words=_STORES),
    Key(
        "num_checkpoints",
        None,
        _checked(_check_count),
        "number of slots of a contiguous store: the number of regions whose backward is pending at once",
    ),
    Key(
        "state",
        (),
        _checked(
            partial(_check_members, cls=StateProvider, legal="a tuple of objects with snapshot() and restore(state)"),
            tuple,
        ),
        "objects with `snapshot()` and `restore(state)`: your own state that is restored for recomputation",
    ),
    Key(
        "host_memory",
        None,
        _read_host_memory,
        "how much host memory `do: offload` and `store: host` may pin for one device, such as `60GiB`; no limit by "
        "default. What finds no room stays on the device, with one warning; under `strict` that is an error",
    ),
)

CONFIG_KEYS: dict[str, Key] = {key.name: key for key in (*_OWN, *_OF_THE_CALL, *_OF_FULL_CONFIG)}
DEFAULTS: dict[str, Any] = {name: key.default for name, key in CONFIG_KEYS.items()}
OWN_KEYS, CALL_KEYS, FULL_CONFIG_KEYS = (
    tuple(key.name for key in keys) for keys in (_OWN, _OF_THE_CALL, _OF_FULL_CONFIG)
)
