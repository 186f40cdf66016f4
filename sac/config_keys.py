"""The table of config keys: for each key its default, and how its value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from sac.errors import ConfigError, Problem, SacError, nearest
from sac.policy import read as policies
from sac.policy.load import load_policy
from sac.policy.model import Layers
from sac.policy.read import LEGAL_BYTES, parse_bytes, word_of
from sac.policy.syntax import Findings, node_from_value, shown

# -- A key, and how its value is read

Reader: TypeAlias = Callable[[Any, str], Any]  # a value, its place in messages


@runtime_checkable
class StateProvider(Protocol):
    """User state that a region's forward reads or changes: FP8 scales, counters."""

    def snapshot(self) -> Any:
        """Return the current state; later changes must not affect the returned object."""

    def restore(self, state: Any) -> None:
        """Restore a state that ``snapshot`` returned."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config value.

    ``default``: the value where the key is left out. ``read``: returns a value as it is compared and held; raises a
    ``SacError`` with every problem. ``words``: the legal words, if the value is one of some.
    """

    default: Any
    read: Reader
    words: tuple[str, ...] = ()


def read_keys(given: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[Problem]]:
    """Return the values in ``given``, each read by itself, and the problems of the others.

    ``where`` is the prefix of a key in messages.
    """
    read: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in given.items():
        try:
            read[name] = CONFIG_KEYS[name].read(value, f"{where}.{name}")
        except SacError as error:
            problems += error.problems
    return read, problems


def _as_in_policies(reader: policies.Reader) -> Reader:
    def read(value: Any, place: str) -> Any:
        findings = Findings()
        found = reader(node_from_value(value, place, findings), place.rpartition(".")[2], findings)
        if len(findings):
            raise ConfigError(findings.problems())
        return found

    return read


def _or_none(reader: Reader) -> Reader:
    return lambda value, place: None if value is None else reader(value, place)


# -- Readers of values

_KEEPS = ("first", "all")
_STORES = ("whole", "scattered", "host", "contiguous")

_read_bool = _as_in_policies(policies.read_bool)
_read_keep = _as_in_policies(policies.word(*_KEEPS, legal="first, all, or a predicate (position, tensor) -> bool"))
read_determinism_check = _as_in_policies(policies.word("default", "none"))


def read_flag(value: Any, place: str) -> Any:
    """Return ``value``, which is true or false."""
    return value if isinstance(value, bool) else _read_bool(value, place)


def stores_in(written: Any) -> tuple[str, ...]:
    """Return the words of a ``store`` value in the order written; an empty tuple if it is not a string."""
    return tuple(word_of(word) for word in written.split("+")) if isinstance(written, str) else ()


def _read_store(value: Any, place: str) -> str:
    words = stores_in(value)
    wrong = next((word for word in words if word not in _STORES), "")
    together = [word for word in _STORES[1:] if word in words] or ["whole"]
    if sorted(words) != sorted(together):
        legal = f"{', '.join(_STORES)}, or some of the last three joined by +"
        raise ConfigError(Problem(place, f"store is {shown(repr(value))}", legal, nearest(wrong, _STORES)))
    return "+".join(together)


def _read_state(value: Any, place: str) -> tuple[StateProvider, ...]:
    providers = tuple(value) if isinstance(value, list | tuple) else (value,)
    for one in providers:
        if not isinstance(one, StateProvider) or isinstance(one, type):  # a class has the methods, without a self
            expected = "a tuple of objects with snapshot() and restore(state)"
            raise ConfigError(Problem(place, f"{shown(repr(one))} is none of them", expected))
    return providers


def _read_host_memory(value: Any, place: str) -> int:
    try:
        return parse_bytes(str(value))
    except ValueError as error:
        found = f"{shown(repr(value))} is not an amount of host memory: {error}"
        raise ConfigError(Problem(place, found, LEGAL_BYTES)) from None


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

    def within(self, least: int, most: int, memory_bytes: int) -> int:
        """Return it in bytes, for a model whose peak ranges from ``least`` to ``most``, on a device of this memory."""
        if self.share is not None:
            return least + int(self.share * max(0, most - least))
        return int((self.of_device or 0) * memory_bytes) if self.bytes is None else self.bytes


def read_budget(value: Any, place: str) -> StepBudget:
    """Return a budget as it is written; raises ``ConfigError``."""
    if isinstance(value, StepBudget):
        return value
    text = str(value).strip()
    try:
        if isinstance(value, Mapping) and value.keys() == {"device"}:
            share = str(value["device"])
            return StepBudget(of_device=_share_in(share), written=f"{{device: {share}}}")
        if text.lower() == "auto":
            return StepBudget(of_device=USABLE, written="auto")
        if text.endswith("%"):
            return StepBudget(share=_share_in(text), written=text)
        if not (count := parse_bytes(text)):
            raise ValueError("it is nothing")
        return StepBudget(count, written=text)
    except ValueError as error:
        found = f"{shown(repr(value))} is not a budget: {error}"
        raise ConfigError(Problem(place, found, LEGAL_BUDGET, nearest(text, ("auto",)))) from None


def _share_in(text: str) -> float:
    """Return a percentage as a number from 0 to 1; raises ``ValueError`` with the reason."""
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise ValueError("a share is a number with %") from None
    if not (text.strip().endswith("%") and 0 <= share <= 1):
        raise ValueError("a share is 0% to 100%")
    return share


# -- The table, in the order of the docs and of messages


def _words(*words: str) -> Key:
    return Key(words[0], _as_in_policies(policies.word(*words)), words)


_OWN = {  # keys that `Config` holds itself
    "mode": _words("none", "full", "selective"),
    "policy": Key(None, lambda value, place: load_policy(value, where=place)),
    "engine": _words("auto", "rerun", "replay"),
    "verify": _words("first", "always", "never"),
    "blocks": Key((), _as_in_policies(policies.read_patterns)),
    "layers": Key(Layers(), _as_in_policies(policies.read_layer_spec)),
    "granularity": _words("block", "submodule"),
    "strict": Key(False, read_flag),
    "budget": Key(None, _or_none(read_budget)),
    "optimizer": Key(None, _or_none(_as_in_policies(policies.word(*STATES)))),
}
_OF_THE_CALL = {  # keys of `CallOptions`, which are arguments of `sac.checkpoint` too
    "use_reentrant": Key(False, read_flag),
    "distribute_saved_activations": Key(False, read_flag),
    "preserve_rng_state": Key(True, read_flag),
    "early_stop": Key(True, read_flag),
}
_OF_FULL_CONFIG = {
    "keep": Key("first", lambda value, place: value if callable(value) else _read_keep(value, place), _KEEPS),
    "store": Key("whole", _read_store, _STORES),
    "num_checkpoints": Key(None, _or_none(_as_in_policies(policies.whole(1)))),
    "state": Key((), _read_state),
    "host_memory": Key(None, _or_none(_read_host_memory)),
}
CONFIG_KEYS: dict[str, Key] = _OWN | _OF_THE_CALL | _OF_FULL_CONFIG
DEFAULTS: dict[str, Any] = {name: key.default for name, key in CONFIG_KEYS.items()}
OWN_KEYS, CALL_KEYS, FULL_CONFIG_KEYS = tuple(_OWN), tuple(_OF_THE_CALL), tuple(_OF_FULL_CONFIG)
