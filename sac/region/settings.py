"""Settings of a region, built from the config or by `sac.checkpoint`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.utils.checkpoint
from torch import nn

from sac.config_keys import CONFIG_KEYS, DEFAULTS, StateProvider
from sac.stores.store import InputStoring
from sac.stores.transfers import TransfersByDevice
from sac.torch_private import chosen_early_stop

AUTO, RERUN, REPLAY = CONFIG_KEYS["engine"].words
FIRST, ALWAYS, NEVER = CONFIG_KEYS["verify"].words


class MemoryWatch(Protocol):
    """Explains out-of-memory errors that pass through a region; see Note [Out of memory] in sac/blocks."""

    def begin(self) -> None:
        """A region runs for the first time."""

    def explain(self, error: BaseException, path: str, owners: Sequence[nn.Module], *, in_backward: bool) -> None:
        """Add an explanation to ``error`` if it is an out-of-memory error; never raises."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How regions keep their inputs and restore their ambient state; many regions share one object.

    ``input_storing``: which inputs are kept in an input store, and in which; None: each stays where the caller holds
    it. ``trackers``: functions that return a tracker of named RNG states. ``generators``: restored in addition to the
    default ones. ``checks_metadata``: compare shape, dtype and device of the tensors that recomputation saves with
    those that forward saved. ``engine`` and ``verify``: how regions are recomputed, and when replayed and served values
    are compared with those of the forward; see ``sac.recompute.replay``. ``watch``: explains out-of-memory errors.
    ``transfers``: copy what rules offload.
    """

    input_storing: InputStoring | None = None
    trackers: tuple[Callable[[], Any], ...] = ()
    generators: tuple[torch.Generator, ...] = DEFAULTS["generators"]
    providers: tuple[StateProvider, ...] = DEFAULTS["state"]
    preserve_rng_state: bool = DEFAULTS["preserve_rng_state"]
    freeze_buffers: bool = DEFAULTS["freeze_buffers"]
    early_stop: bool = DEFAULTS["early_stop"]
    checks_metadata: bool = True
    use_reentrant: bool = DEFAULTS["use_reentrant"]
    engine: str = DEFAULTS["engine"]
    verify: str = DEFAULTS["verify"]
    watch: MemoryWatch | None = None
    transfers: TransfersByDevice = field(default_factory=TransfersByDevice, compare=False)

    @property
    def needs_frame(self) -> bool:
        """Whether only sac's frames can apply these settings; the others have no meaning in a compiled graph."""
        asked = (self.trackers, self.generators, self.providers)
        return self.input_storing is not None or self.use_reentrant or any(asked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        # A copied model's modules hold copies of generators and providers. Those are added; the originals stay.
        return replace(
            self,
            input_storing=copy.deepcopy(self.input_storing, memo),
            generators=(*self.generators, *copy.deepcopy(self.generators, memo)),
            providers=(*self.providers, *copy.deepcopy(self.providers, memo)),
        )


PLAIN = Settings()


def as_torch_says(settings: Settings) -> Settings:
    """Return the settings of a call that starts now: ``set_checkpoint_early_stop`` takes precedence."""
    said = chosen_early_stop()  # read in the forward, as torch does
    return settings if said is None or said == settings.early_stop else replace(settings, early_stop=said)
