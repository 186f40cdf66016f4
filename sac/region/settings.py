"""How a region is run: settings that were made from the config, or by `sac.checkpoint`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint

from sac.stores.store import InputStoring
from sac.torch_private import chosen_early_stop

AUTO, RERUN, REPLAY = ENGINES = ("auto", "rerun", "replay")
FIRST, ALWAYS, NEVER = VERIFY = ("first", "always", "never")


@runtime_checkable
class StateProvider(Protocol):
    """State of the user's own that a region's forward reads or changes: FP8 scales, counters."""

    def snapshot(self) -> Any:
        """Return the state as it is now; later changes must not change what was returned."""

    def restore(self, state: Any) -> None:
        """Put back what ``snapshot`` returned."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How regions keep their inputs and meet their surroundings again; one object for many regions.

    ``keeping``: which inputs are kept elsewhere, and where; None: each where the caller holds it. ``trackers``: called
    to get a tracker of named RNG states. ``generators``: put back beside the default ones. ``checks_metadata``: compare
    shape, dtype and device of what recomputation saves with what forward saved. ``engine`` and ``verify``: how it is
    recomputed, and when replayed and served values are compared with those of the forward; see
    ``sac.recompute.replay``.
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

    @property
    def needs_frame(self) -> bool:
        """Whether only our frames can do what is asked; the other settings concern what no compiled graph does."""
        asked = (self.trackers, self.generators, self.providers)
        return self.input_storing is not None or self.use_reentrant or any(asked)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        # The copy of a model uses copies of the generators and providers that its modules hold, and the others as ever.
        return replace(
            self,
            input_storing=copy.deepcopy(self.input_storing, memo),
            generators=(*self.generators, *copy.deepcopy(self.generators, memo)),
            providers=(*self.providers, *copy.deepcopy(self.providers, memo)),
        )


PLAIN = Settings()


def as_torch_says(settings: Settings) -> Settings:
    """Return the settings of a call that starts now: what ``set_checkpoint_early_stop`` says takes precedence."""
    said = chosen_early_stop()  # in the forward, as torch does
    return settings if said is None or said == settings.early_stop else replace(settings, early_stop=said)
