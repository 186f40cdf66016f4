"""``FullConfig``: what the full-recompute path can be told beside the arguments of ``sac.checkpoint``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from sac.errors import ConfigError, Problem
from sac.full.checks import STORES, problems_in, stores_in, word_of
from sac.policy.nodes import shown
from sac.region.settings import PLAIN, Settings, StateProvider
from sac.region.stores.contiguous import ContiguousBuffer
from sac.region.stores.groups import group_problem
from sac.region.stores.host import Host
from sac.region.stores.placements import Here, Keeping, Placement
from sac.region.stores.scatter import FirstCalls, Scattered, Seen

COMPARED_BY_CALLS = FirstCalls()  # where each call has settings of its own


@dataclass(frozen=True, slots=True)
class FullConfig:
    """How regions keep their inputs until backward, and what they put back for their recomputation.

    ``keep``: which inputs ``store`` speaks of, the others being held whole: ``first`` (the first floating-point tensor
    among the leaves of ``(args, kwargs)``), ``all`` of them, or a predicate ``(position, tensor) -> bool``.

    ``store``: ``whole`` (the caller's tensor is held and must not change), ``scattered`` over the tensor-parallel group
    (1 / group size of the bytes per rank), ``host`` (a copy in host memory), ``contiguous`` (a slot of one
    preallocated buffer, of ``num_checkpoints`` slots; one FullConfig has one buffer), or several joined by ``+``:
    ``scattered+host``. All but ``whole`` copy before the forward, so what is written later does not matter.

    ``verify_replicated``: compare the input over the group before it is scattered (costs an all-reduce, so that every
    rank has to make the call): ``first`` in the first call of each region of ``sac.apply``, and in the first 256 calls
    of functions over a group; True in every call, False never.
    ``prefetch``: how many regions ahead, in backward order, gathers are started; regions are found along the autograd
    graph, a few dozen ops from one to the next at most. ``release_input``: after the forward the caller's tensor holds
    this rank's share only, flat, until backward (as in Megatron and TransformerEngine), if nothing else holds its
    memory; ops that saved it before raise while it is so, and what reads it sees the share.

    ``state``: providers of state of your own (``snapshot``, ``restore``). ``generators``: put back beside the default
    ones. ``freeze_buffers``: buffers that a region updates advance once, not again in recomputation.

    Raises ``ConfigError`` with all that is wrong.
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
    host: Host | None = field(default=None, init=False, repr=False, compare=False)

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
            object.__setattr__(self, "host", Host())

    @property
    def stores(self) -> tuple[str, ...]:
        """The words of ``store``, in the order of ``STORES``."""
        return tuple(sorted(stores_in(self.store), key=STORES.index))

    def reset(self) -> None:
        """Take every slot of the contiguous buffer back, as after forwards whose backward will never run."""
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
    """Yield which values of ``FullConfig`` in ``given`` do not go together; each by itself has been checked."""
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
    """Yield what in ``given``, keys of ``FullConfig`` and of the call together, speaks of a store that is not there.

    A ``FullConfig`` by itself cannot tell: the call that it is for may scatter.
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
_REENTRANT_OPTIONS = CallOptions(use_reentrant=True)
REENTRANT = Settings(use_reentrant=True)


def settings_of(config: FullConfig, options: CallOptions, where: str, compared: Seen = COMPARED_BY_CALLS) -> Settings:
    """Return what frames are told; raises ``ConfigError`` for options that cannot be carried out.

    ``where`` names the call in messages: ``sac.checkpoint``. A group is looked at only where inputs are scattered over
    it, so that one launcher can give it to every config. ``compared``: see Note [Compared once].
    """
    if config is DEFAULT_CONFIG and options == DEFAULT_OPTIONS:
        return PLAIN
    if config is DEFAULT_CONFIG and options.use_reentrant is True and options == _REENTRANT_OPTIONS:
        return REENTRANT  # the usual call in this mode; what follows takes as long as a small region
    if not isinstance(config, FullConfig):
        fix = "write sac.full.FullConfig(…); for a keyword of the function's own, functools.partial(function, config=…)"
        raise ConfigError(
            Problem(f"{where}.config", f"{shown(repr(config))} is no FullConfig", "a FullConfig", fix=fix)
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
        keeping=_keeping(config, options.tp_group if scatters else None, compared),
        trackers=(tracker,) if tracker is not None else (),
        generators=config.generators,
        providers=config.state,
        preserve_rng_state=options.preserve_rng_state,
        freeze_buffers=config.freeze_buffers,
        early_stop=options.early_stop,
        checks_metadata=word_of(options.determinism_check) == "default",
        use_reentrant=options.use_reentrant,
    )


def _keeping(config: FullConfig, group: Any, compared: Seen) -> Keeping | None:
    """Return which inputs are kept elsewhere and where; None where every input is held whole."""
    placement: Placement | None = config.buffer or config.host
    if group is not None:
        share = placement if placement is not None else Here()
        verify = config.verify_replicated if isinstance(config.verify_replicated, bool) else compared
        scattered = Scattered.over(group, share, verify=verify, prefetch=config.prefetch)
        placement = scattered if scattered is not None else placement  # a group of one rank has nothing to scatter
    return None if placement is None else Keeping(placement, config.keep, config.release_input)
