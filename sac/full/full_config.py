"""``FullConfig``: what the full-recompute path can be told beside the arguments of ``sac.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from sac.errors import ConfigError, Problem, listing, nearest
from sac.region.contiguous import ContiguousBuffer
from sac.region.host import Host
from sac.region.placements import Here, Keeping, Placement
from sac.region.scatter import Scattered, group_problem
from sac.region.settings import PLAIN, Settings, StateProvider

STORES = ("whole", "scattered", "host", "contiguous")
KEEPS = ("first", "all")
CHECKS = ("default", "none")


@dataclass(frozen=True, slots=True)
class FullConfig:
    """How regions keep their inputs until backward, and what they put back for their recomputation.

    ``keep``: which inputs ``store`` speaks of, the others being held whole: ``first`` (the first floating-point tensor
    among the leaves of ``(args, kwargs)``), ``all`` of them, or a predicate ``(position, tensor) -> bool``.

    ``store``: ``whole`` (the caller's tensor is held and must not change), ``scattered`` over the tensor-parallel group
    (1 / group size of the bytes per rank), ``host`` (a copy in host memory), ``contiguous`` (a slot of one
    preallocated buffer, of ``num_checkpoints`` slots; one FullConfig has one buffer), or several joined by ``+``:
    ``scattered+host``. All but ``whole`` copy before the forward, so what is written later does not matter.

    ``verify_replicated``: compare the input over the group before it is scattered (costs an all-reduce).
    ``prefetch``: how many regions ahead, in backward order, gathers are started. ``release_input``: after the forward
    the caller's tensor holds this rank's share only, flat, until backward (as in Megatron and TransformerEngine).

    ``state``: providers of state of your own (``snapshot``, ``restore``). ``generators``: put back beside the default
    ones. ``freeze_buffers``: buffers that a region updates advance once, not again in recomputation.

    Raises ``ConfigError`` with all that is wrong.
    """

    keep: str | Callable[[int, torch.Tensor], bool] = "first"
    store: str = "whole"
    num_checkpoints: int | None = None
    verify_replicated: bool = False
    prefetch: int = 0
    release_input: bool = False
    state: tuple[StateProvider, ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    freeze_buffers: bool = True
    buffer: ContiguousBuffer | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        problems = list(problems_in(given, "FullConfig"))
        if problems:
            raise ConfigError(problems)
        object.__setattr__(self, "state", tuple(self.state))
        object.__setattr__(self, "generators", tuple(self.generators))
        if "contiguous" in self.stores and self.num_checkpoints is not None:
            object.__setattr__(self, "buffer", ContiguousBuffer(self.num_checkpoints, on_host="host" in self.stores))

    @property
    def stores(self) -> tuple[str, ...]:
        """The words of ``store``."""
        return stores_in(self.store)

    def reset(self) -> None:
        """Take every slot of the contiguous buffer back, as after forwards whose backward will never run."""
        if self.buffer is not None:
            self.buffer.reset()


KEYS = tuple(one.name for one in fields(FullConfig) if one.init)
CALL_KEYS = (
    "use_reentrant",
    "distribute_saved_activations",
    "preserve_rng_state",
    "early_stop",
    "determinism_check",
)


def stores_in(written: str) -> tuple[str, ...]:
    """Return the words of a ``store``, however they are spaced and cased."""
    return tuple(word.strip().lower() for word in written.split("+"))


def problems_in(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    """Yield what is wrong with values for the fields of ``FullConfig``; ``where`` stands before the key in messages."""
    for key, value in given.items():
        check = _CHECKS_BY_KEY.get(key)
        if check is not None:
            found, expected, near, fix = check(value) or ("", "", "", "")
            if found:
                yield Problem(f"{where}.{key}", found, expected=expected, nearest=near, fix=fix)
    yield from _contradictions(given, where)


def _contradictions(given: Mapping[str, Any], where: str) -> Iterator[Problem]:
    store = given.get("store", "whole")
    stores = stores_in(store) if isinstance(store, str) else ()
    count = given.get("num_checkpoints")
    if "contiguous" in stores and count is None:
        yield Problem(
            f"{where}.num_checkpoints",
            "a contiguous store needs to know how many checkpoints it is to hold",
            fix="give num_checkpoints, the number of regions whose backward is pending at once: as a rule, of layers",
        )
    if "contiguous" not in stores and count is not None and isinstance(store, str):
        yield Problem(f"{where}.num_checkpoints", "it belongs to store contiguous", fix="write store: contiguous")


Finding = tuple[str, str, str, str]


def _check_keep(value: Any) -> Finding | None:
    if callable(value) or value in KEEPS:
        return None
    near = nearest(value, KEEPS) if isinstance(value, str) else ""
    return f"{value!r} is not known", f"{listing(KEEPS)}, or a predicate (position, tensor) -> bool", near, ""


def _check_store(value: Any) -> Finding | None:
    legal = f"{listing(STORES)}, or some of the last three joined by +"
    if not isinstance(value, str):
        return f"{value!r} is not known", legal, "", ""
    words = stores_in(value)
    wrong = next((word for word in words if word not in STORES), None)
    if wrong is not None:
        return f"{wrong!r} is not known", legal, nearest(wrong, STORES), ""
    if len(set(words)) < len(words) or ("whole" in words and len(words) > 1):
        return f"{value!r} does not go together", legal, "", ""
    return None


def _check_flag(value: Any) -> Finding | None:
    return None if isinstance(value, bool) else (f"{value!r} is not true or false", "true, false", "", "")


def _check_count(value: Any) -> Finding | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return None
    return f"{value!r} is not a number of checkpoints", "a whole number from 1 on", "", ""


def _check_prefetch(value: Any) -> Finding | None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return None
    return f"{value!r} is not a number of regions", "a whole number from 0 on", "", ""


def _check_state(value: Any) -> Finding | None:
    if isinstance(value, (list, tuple)) and all(isinstance(one, StateProvider) for one in value):
        return None
    return f"{value!r} does not hold state providers", "a tuple of objects with snapshot() and restore(state)", "", ""


def _check_generators(value: Any) -> Finding | None:
    if isinstance(value, (list, tuple)) and all(isinstance(one, torch.Generator) for one in value):
        return None
    return f"{value!r} does not hold generators", "a tuple of torch.Generator", "", ""


def _check_determinism(value: Any) -> Finding | None:
    if value in CHECKS:
        return None
    near = nearest(value, CHECKS) if isinstance(value, str) else ""
    return f"{value!r} is not known", listing(CHECKS), near, ""


_CHECKS_BY_KEY: dict[str, Callable[[Any], Finding | None]] = {
    "keep": _check_keep,
    "store": _check_store,
    "num_checkpoints": _check_count,
    "verify_replicated": _check_flag,
    "prefetch": _check_prefetch,
    "release_input": _check_flag,
    "state": _check_state,
    "generators": _check_generators,
    "freeze_buffers": _check_flag,
    "use_reentrant": _check_flag,
    "distribute_saved_activations": _check_flag,
    "preserve_rng_state": _check_flag,
    "early_stop": _check_flag,
    "determinism_check": _check_determinism,
}


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The arguments of ``sac.checkpoint`` that are no part of ``FullConfig``; in a config value they are keys too."""

    use_reentrant: bool = False
    distribute_saved_activations: bool = False
    tp_group: Any = None
    get_rng_state_tracker: Callable[[], Any] | None = None
    preserve_rng_state: bool = True
    early_stop: bool = True
    determinism_check: str = "default"


DEFAULT_CONFIG = FullConfig()
DEFAULT_OPTIONS = CallOptions()


def settings_of(config: FullConfig, options: CallOptions, where: str) -> Settings:
    """Return what frames are told; raises ``ConfigError`` for options that cannot be carried out.

    ``where`` names the call in messages: ``sac.checkpoint``.
    """
    if config is DEFAULT_CONFIG and options == DEFAULT_OPTIONS:
        return PLAIN
    problems = list(problems_in({key: getattr(options, key) for key in CALL_KEYS}, where))
    tracker = options.get_rng_state_tracker
    if tracker is not None and not callable(tracker):
        found = f"{tracker!r} cannot be called"
        problems.append(Problem(f"{where}.get_rng_state_tracker", found, "a function that returns a tracker"))
    scatters = options.distribute_saved_activations is True or "scattered" in config.stores
    if scatters or (options.tp_group is not None and not problems):
        problems += group_problem(options.tp_group, where)
    if problems:
        raise ConfigError(problems)
    return Settings(
        keeping=_keeping(config, options.tp_group if scatters else None),
        trackers=(tracker,) if tracker is not None else (),
        generators=config.generators,
        providers=config.state,
        preserve_rng_state=options.preserve_rng_state,
        freeze_buffers=config.freeze_buffers,
        early_stop=options.early_stop,
        checks_metadata=options.determinism_check == "default",
        use_reentrant=options.use_reentrant,
    )


def _keeping(config: FullConfig, group: Any) -> Keeping | None:
    """Return which inputs are kept elsewhere and where; None where every input is held whole."""
    inner: Placement | None = config.buffer
    if inner is None and "host" in config.stores:
        inner = Host()
    placement: Placement | None = inner
    if group is not None:
        inner = inner if inner is not None else Here()
        placement = Scattered.over(group, inner, verify=config.verify_replicated, prefetch=config.prefetch)
    return None if placement is None else Keeping(placement, config.keep, config.release_input)
