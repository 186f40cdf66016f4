"""Settings of a region, built from the config or by `sac.checkpoint`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint
from torch import nn

from sac.stores.store import InputStoring
from sac.torch_private import chosen_early_stop

AUTO, RERUN, REPLAY = ENGINES = ("auto", "rerun", "replay")
FIRST, ALWAYS, NEVER = VERIFY = ("first", "always", "never")


@runtime_checkable
class StateProvider(Protocol):
    """User state that a region's forward reads or changes: FP8 scales, counters."""

    def snapshot(self) -> Any:
        """Return the current state; later changes must not affect the returned object."""

    def restore(self, state: Any) -> None:
        """Restore a state that ``snapshot`` returned."""


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
    """

    input_storing: InputStoring | None = None
    trackers: tuple[Callable[[], Any], ...] = ()
    generators: tuple[torch.Generator, ...] = ()
    providers: tuple[StateProvider, ...] = ()
    preserve_rng_state: bool = True
    freeze_buffers: bool = True
    early_stop: bool = True
    checks_metadata: bool = True
    use_reentrant: bool = False
    engine: str = AUTO
    verify: str = ALWAYS
    watch: MemoryWatch | None = None

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
