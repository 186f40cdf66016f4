"""What is wrong with a value of one key of the full-recompute path, wherever it was written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from sac.errors import Problem, listing, nearest
from sac.policy.nodes import shown
from sac.region.settings import StateProvider

STORES = ("whole", "scattered", "host", "contiguous")
KEEPS = ("first", "all")
CHECKS = ("default", "none")

Finding = tuple[str, str, str, str]  # found, expected, nearest, fix: as in Problem

_QUOTE = "quote the word that is meant: YAML 1.1 reads on, off, yes and no as booleans"
_FLAG_WORDS = {"yes": "true", "on": "true", "true": "true", "1": "true"}
_FLAG_WORDS |= {"no": "false", "off": "false", "false": "false", "0": "false"}


def word_of(value: Any) -> str:
    """Return how a word is compared: case, hyphens and spaces around it do not matter; ``""`` for what is no text."""
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else ""


def stores_in(written: Any) -> tuple[str, ...]:
    """Return the words of a ``store`` as they stand there; none for what is no text."""
    return tuple(word_of(word) for word in written.split("+")) if isinstance(written, str) else ()


def check_flag(value: Any, besides: str = "") -> Finding | None:
    """Return what is wrong with a value that is to be true or false, or the word ``besides``."""
    if isinstance(value, bool) or (besides and word_of(value) == besides):
        return None
    meant = _FLAG_WORDS.get(word_of(str(value)), "")
    word = f"{besides}, " if besides else ""
    fix = f"write {meant}, without quotes" if meant else ""
    return _shown(value, f"not {word}true or false"), f"{word}true, false", "", fix


def check_word(value: Any, words: tuple[str, ...], what: str, legal: str = "") -> Finding | None:
    """Return what is wrong with a value that is to be one of ``words``.

    ``what`` says what it is not; ``legal`` is what the message lists, ``words`` if it is empty.
    """
    word = word_of(value)
    if word in words:
        return None
    fix = _QUOTE if isinstance(value, bool) else ""
    return _shown(value, what), legal or listing(words), nearest(word, words) if word else "", fix


def problems_in(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield what is wrong with the values in ``given`` by key, each by itself; other keys are passed over.

    ``where`` stands before the key in messages.
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
    return None if callable(value) else check_word(value, KEEPS, "no choice of inputs", legal)


def _check_store(value: Any) -> Finding | None:
    legal = f"{listing(STORES)}, or some of the last three joined by +"
    words = stores_in(value)
    wrong = next((word for word in words if word not in STORES), None)
    if wrong is None and words:
        alone = len(set(words)) == len(words) and ("whole" not in words or len(words) == 1)
        return None if alone else (f"{shown(repr(value))} does not go together", legal, "", "")
    joined = _joined_otherwise(value)
    if joined:
        return _shown(value, "no store"), legal, "", f'write "{joined}"'
    return check_word(value if wrong is None else wrong, STORES, "no store", legal)


def _joined_otherwise(value: Any) -> str:
    """Return stores that are joined in another way than by ``+`` (a list, commas, spaces) as they are to be joined."""
    parts = re.split(r"[\s,+&|/]+", value.strip()) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts or any(word_of(part) not in STORES for part in parts):
        return ""
    return "+".join(word_of(part) for part in parts)


def _check_count(value: Any) -> Finding | None:
    return None if value is None else _check_whole(value, 1, "no number of checkpoints")


def _check_prefetch(value: Any) -> Finding | None:
    return _check_whole(value, 0, "no number of regions")


def _check_whole(value: Any, least: int, what: str) -> Finding | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return None
    number = _number_in(value)
    fix = f"write {number}{', without quotes' if isinstance(value, str) else ''}" if number is not None else ""
    return _shown(value, what), f"a whole number, {least} or more", "", fix if number and number >= least else ""


def _number_in(value: Any) -> int | None:
    """Return the whole number that a text or a float holds."""
    try:
        number = float(value) if isinstance(value, (str, float)) else math.nan
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None


def _check_state(value: Any) -> Finding | None:
    return _check_members(value, StateProvider, "a tuple of objects with snapshot() and restore(state)")


def _check_generators(value: Any) -> Finding | None:
    return _check_members(value, torch.Generator, "a tuple of torch.Generator")


def _check_members(value: Any, kind: type, legal: str) -> Finding | None:
    if _is_one(value, kind):
        return f"{shown(repr(value))} stands alone", legal, "", "write a comma behind it, in parentheses: (…,)"
    if isinstance(value, (list, tuple)) and all(_is_one(member, kind) for member in value):
        return None
    wrong = next((one for one in value if not _is_one(one, kind)), value) if isinstance(value, (list, tuple)) else value
    return _shown(wrong, "none of them"), legal, "", ""


def _is_one(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, type)  # a class has the methods too, without a self


def _check_determinism(value: Any) -> Finding | None:
    return check_word(value, CHECKS, "no check")


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
