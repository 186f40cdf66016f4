"""FP8 of TransformerEngine: its own contexts around a forward that will be recomputed, and around its recomputation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from sac.errors import ConfigError, Problem

# A module of TransformerEngine quantises with scales that follow from the maxima of earlier steps, which its kernels
# write unseen. Under the library's contexts it puts a copy of its scales into a queue in the forward, and takes the
# first one from it in the recomputation. So micro-batches must be recomputed in the order of their forwards, once each.

_MODULES = ("transformer_engine.pytorch.quantization", "transformer_engine.pytorch.fp8")  # newer and older
_CONTEXTS = "transformer_engine.pytorch.distributed"
FP8_METAS = frozenset({"fp8_meta", "_fp8_metas"})  # attributes with the state of a module, and of an op of `te.ops`
REASON = "its modules keep FP8 state (TransformerEngine); it runs to its end"
_UNKNOWN = "FP8 is on, and this TransformerEngine, which has to put scales back, is not known (1.6 to 2.20 are)"
_FIX = "run this region without FP8, or call TransformerEngine's own checkpoint for it"


def _library() -> Any:
    """Return the loaded module of TransformerEngine with its FP8 state, None if there is none."""
    loaded = (sys.modules.get(name) for name in _MODULES)
    return next((module for module in loaded if hasattr(module, "FP8GlobalStateManager")), None)


def keeps_fp8_state(owners: Iterable[nn.Module]) -> bool:
    """Return whether FP8 is on, or any of these modules is one of TransformerEngine's that can run in FP8."""
    if (library := _library()) is None:
        return False
    modules = (vars(module) for owner in owners for module in owner.modules())
    return bool(library.FP8GlobalStateManager.is_fp8_enabled()) or not all(map(FP8_METAS.isdisjoint, modules))


class Fp8Function:
    """Runs a function under the contexts of a forward in the first call, of a recomputation in later ones.

    Raises ``ConfigError`` if FP8 is on in a version of TransformerEngine without the contexts.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._function, library = function, _library()
        manager = library.FP8GlobalStateManager
        contexts = getattr(sys.modules.get(_CONTEXTS), "get_activation_recompute_contexts", None)
        is_on, recipe, group = bool(manager.is_fp8_enabled()), None, None
        if is_on:
            if contexts is None or not hasattr(manager, "get_fp8_recipe"):
                raise ConfigError(Problem(where, _UNKNOWN, fix=_FIX))
            recipe, group = manager.get_fp8_recipe(), manager.get_fp8_group()
        if hasattr(library, "autocast"):
            self._autocast = partial(library.autocast, is_on, recipe=recipe, amax_reduction_group=group)
        else:
            self._autocast = partial(library.fp8_autocast, is_on, fp8_recipe=recipe, fp8_group=group)
        # A forward that turns FP8 on itself needs them, too.
        self._contexts: list[AbstractContextManager[Any]] = [*contexts()] if contexts is not None else []

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context around the forward."""
        return self._contexts.pop(0) if self._contexts else nullcontext()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        if len(self._contexts) != 1:
            with self.forward():
                return self._function(*args, **kwargs)
        with self._contexts[0], self._autocast():
            return self._function(*args, **kwargs)
