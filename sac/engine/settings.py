"""Settings of a region, built from the config or by `sac.checkpoint`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sac.config_keys import CONFIG_KEYS, DEFAULTS, StateProvider
from sac.stores.store import InputStoring
from sac.stores.transfers import TransfersByDevice
from sac.torch_private import chosen_early_stop

AUTO, RERUN, REPLAY = CONFIG_KEYS["engine"].words
FIRST, ALWAYS, NEVER = CONFIG_KEYS["verify"].words


def no_note(error: BaseException) -> None:
    """Leave ``error`` as it is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How regions keep their inputs and restore their ambient state; many regions share one object.

    ``input_storing``: which inputs are kept in an input store, and in which; None: each stays where the caller holds
    it. ``trackers``: functions that return a tracker of named RNG states. ``checks_metadata``: compare shape, dtype
    and device of the tensors that recomputation saves with those that forward saved. ``engine`` and ``verify``: how
    regions are recomputed, and when replayed and served values are compared with those of the forward; see
    ``sac.engine.verify``; ``strict``: a difference is an error. ``add_note``: to out-of-memory errors in a region.
    ``transfers``: copy what rules offload.
    """

    input_storing: InputStoring | None = None
    trackers: tuple[Callable[[], Any], ...] = ()
    providers: tuple[StateProvider, ...] = DEFAULTS["state"]
    preserve_rng_state: bool = DEFAULTS["preserve_rng_state"]
    early_stop: bool = DEFAULTS["early_stop"]
    checks_metadata: bool = True
    use_reentrant: bool = DEFAULTS["use_reentrant"]
    engine: str = DEFAULTS["engine"]
    verify: str = DEFAULTS["verify"]
    strict: bool = False
    add_note: Callable[[BaseException], None] = no_note
    transfers: TransfersByDevice = field(default_factory=TransfersByDevice, compare=False)

    @property
    def refuses_differences(self) -> bool:
        """Whether recomputed values that differ are an error, and not a warning."""
        return self.strict or self.verify == ALWAYS

    @property
    def needs_frame(self) -> bool:
        """Whether only sac's frames can apply these settings; the others have no meaning in a compiled graph."""
        return self.input_storing is not None or self.use_reentrant or bool(self.trackers or self.providers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Settings:
        # A copied model's modules hold copies of providers. Those are added; the originals stay.
        return replace(
            self,
            input_storing=copy.deepcopy(self.input_storing, memo),
            providers=(*self.providers, *copy.deepcopy(self.providers, memo)),
            add_note=copy.deepcopy(self.add_note, memo),
        )


PLAIN = Settings()


def as_torch_says(settings: Settings) -> Settings:
    """Return the settings of a call that starts now: ``set_checkpoint_early_stop`` takes precedence."""
    said = chosen_early_stop()  # read in the forward, as torch does
    return settings if said is None or said == settings.early_stop else replace(settings, early_stop=said)
