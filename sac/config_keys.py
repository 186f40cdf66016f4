"""The table of config keys: for each key its default, and how its value is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sac.errors import ConfigError, listing, nearest
from sac.policy import read
from sac.policy.load import load_policy
from sac.policy.model import ALL
from sac.policy.read import Reader, read_as, read_bool, word, word_of
from sac.policy.syntax import Node, all_problems, node_of
from sac.tables import LEGAL_BYTES, parse_bytes


@runtime_checkable
class StateProvider(Protocol):
    """User state that a region's forward reads or changes: FP8 scales, counters."""

    def snapshot(self) -> Any:
        """Return the current state; later changes must not affect the returned object."""

    def restore(self, state: Any) -> None:
        """Restore a state that ``snapshot`` returned."""


# -- Readers of values

_STORES = ("whole", "scattered", "host", "contiguous")


def _read_store(node: Node) -> str:
    words = [word_of(store) for store in node.text.split("+")]
    together = [store for store in _STORES[1:] if store in words] or ["whole"]
    if sorted(words) != sorted(together):
        wrong = next((store for store in words if store not in _STORES), "")
        legal, fix = f"{listing(_STORES)}, or some of the last three joined by +", f'correct "{wrong}"' if wrong else ""
        raise node.error(legal, nearest=nearest(wrong, _STORES), fix=fix)
    return "+".join(together)


def _read_state(node: Node) -> tuple[StateProvider, ...]:
    providers = tuple(node.value) if isinstance(node.value, list | tuple) else (node.value,)
    for provider in providers:
        if not isinstance(provider, StateProvider) or isinstance(provider, type):  # a class has the methods, too
            found = f"{provider!r} is not a provider of state"
            raise node.error("a tuple of objects with snapshot() and restore(state)", found=found)
    return providers


def _read_tracker(node: Node) -> Any:
    if node.value is not None and not callable(node.value):
        raise node.error("a function that returns a tracker", found=f"{node.value!r} cannot be called")
    return node.value


# -- Budgets

USABLE = 0.9  # of a device's memory, unless it is said: the driver, libraries and fragmentation need the rest
STATES = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""The states that an optimizer holds for each trained parameter, by its name; each has the parameter's size."""

LEGAL_BUDGET = f'{LEGAL_BYTES}, a share of the range such as "50%", auto, or {{device: 90%}}'


@dataclass(frozen=True, slots=True)
class StepBudget:
    """The most memory of a step: bytes, a share of the range, or a share of the device's memory.

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


def _share(text: str) -> float | None:
    share = float(text.strip().removesuffix("%")) / 100 if text.strip().endswith("%") else -1
    return share if 0 <= share <= 1 else None


_read_share = read_as(_share, "a share, 0% to 100%")
_read_bytes = read_as(lambda text: parse_bytes(text) or None, LEGAL_BUDGET, ("auto",))


def read_budget(node: Node) -> StepBudget:
    """Return the budget in a node."""
    text = node.text.strip()
    if isinstance(node.value, StepBudget):
        return node.value
    if node.kind == "map" and node.entries:
        share = read.read_fields(node, {"device": _read_share})["device"]
        return StepBudget(of_device=share, written=f"{{device: {node.value['device']}}}")
    if word_of(text) == "auto":
        return StepBudget(of_device=USABLE, written="auto")
    if text.endswith("%"):
        return StepBudget(share=_read_share(node), written=text)
    return StepBudget(_read_bytes(node), written=text)


# -- The table, in the order of the docs and of messages


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config value: its default, its reader, its line in the docs, and its legal words if it has some.

    A line is Markdown; its links are relative to ``docs/``.
    """

    default: Any
    read: Reader
    doc: str = ""
    words: tuple[str, ...] = ()


def _words(doc: str, *words: str) -> Key:
    return Key(words[0], word(*words), doc, words)


def _or_none(reader: Reader, doc: str, *words: str) -> Key:
    return Key(None, lambda node: None if node.kind == "empty" else reader(node), doc, words)


def _read_keep(node: Node) -> Any:
    return node.value if callable(node.value) else _read_kept(node)


_KEPT = "first", "all"
_read_kept = word(*_KEPT, legal=f"{listing(_KEPT)}, or a predicate (position, tensor) -> bool")
_OWN = {  # keys that `Config` holds itself
    "mode": _words("required; alone, it is written without a mapping", "none", "full", "selective"),
    "policy": Key(
        None,
        lambda node: load_policy(node.value, where=node.location),
        "for `selective`: a shipped name, a path or a mapping; by default that of the model's family",
    ),
    "engine": _words("replay recorded ops, or [run Python again](engines.md)", "auto", "rerun", "replay"),
    "verify": _words("when values are [compared](engines.md#which-values-are-compared)", "first", "always", "never"),
    "blocks": Key((), read.read_patterns, "which modules are regions: paths, `*` for a segment, `**` for any number"),
    "layers": Key(ALL, read.read_layer_spec, "which layers of each stack are regions, or how long chunks of them are"),
    "granularity": _words("one region per block, or one per larger part of it", "block", "submodule"),
    "strict": Key(False, read_bool, "a rule that matches nothing in the first step is an error, not a warning"),
    "budget": _or_none(read_budget, "for `selective`: the most [memory of a step](budget.md#what-a-budget-is)"),
    "optimizer": _or_none(word(*STATES), "with `budget`: reserve memory for the state of this optimizer", *STATES),
}
_OF_THE_CALL = {  # keys that are arguments of `sac.checkpoint` too
    "use_reentrant": Key(False, read_bool, "see [two modes](full-recompute.md#two-modes); not in `mode: selective`"),
    "distribute_saved_activations": Key(False, read_bool, "the same as `scattered` in `store`"),
    "preserve_rng_state": Key(True, read_bool, "restore random states for recomputation"),
    "early_stop": Key(True, read_bool, "stop recomputation when backward has what it needs"),
}
_OF_FULL_CONFIG = {
    "keep": Key("first", _read_keep, "the inputs that `store` applies to; the others are held whole", _KEPT),
    "store": Key("whole", _read_store, "[where they are kept](full-recompute.md#where-inputs-are-kept)", _STORES),
    "num_checkpoints": _or_none(read.whole(1), "slots of a contiguous store: regions that wait for backward at once"),
    "state": Key((), _read_state, "providers of [your own state](full-recompute.md#your-own-state)"),
    "host_memory": _or_none(read_as(parse_bytes, LEGAL_BYTES), "the most host memory to pin; budgets offload to it"),
}
CONFIG_KEYS: dict[str, Key] = _OWN | _OF_THE_CALL | _OF_FULL_CONFIG
DEFAULTS: dict[str, Any] = {name: key.default for name, key in CONFIG_KEYS.items()}
OWN_KEYS, CALL_KEYS, FULL_CONFIG_KEYS = tuple(_OWN), tuple(_OF_THE_CALL), tuple(_OF_FULL_CONFIG)
_NOT_KEYS = {  # of a config value
    "tp_group": "pass it as an argument: sac.apply(model, value, tp_group=…)",
    "get_rng_state_tracker": "pass it as an argument: sac.apply(model, value, get_rng_state_tracker=…)",
}
CALL_ARGUMENTS = {  # of `sac.checkpoint`, outside `FullConfig`
    **_OF_THE_CALL,
    "determinism_check": _words("", "default", "none"),
    "get_rng_state_tracker": Key(None, _read_tracker),
    "tp_group": Key(None, lambda node: node.value),
}
CALL_DEFAULTS: dict[str, Any] = {name: key.default for name, key in CALL_ARGUMENTS.items()}


def read_keys(given: Mapping[str, Any], where: str, keys: Mapping[str, Key] = CONFIG_KEYS) -> dict[str, Any]:
    """Return the values in ``given``; raises ``ConfigError`` with all problems, each with a place below ``where``."""
    with all_problems(ConfigError) as attempt:
        readers = {name: key.read for name, key in keys.items()}
        values: dict[str, Any] = attempt(read.read_fields, node_of(given, where), readers, _NOT_KEYS)
    return values
