"""FP8 of TransformerEngine: its own contexts around a forward that will be recomputed, and around its recomputation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from sac.errors import ConfigError, Problem

# Under the library's contexts, a module puts a copy of its scales, which its kernels write unseen, into a queue in the
# forward, and takes it out in recomputation. So micro-batches are recomputed in the order of their forwards, once each.

_PYTORCH, _DISTRIBUTED = "transformer_engine.pytorch", "transformer_engine.pytorch.distributed"
FP8_METAS = frozenset({"fp8_meta", "_fp8_metas"})  # attributes with the state of a module, and of an op of `te.ops`
REASON = "its modules keep FP8 state (TransformerEngine); it runs to its end"
_UNKNOWN = "FP8 is on, and this TransformerEngine, which has to put scales back, is not known (1.6 to 2.20 are)"
_FIX = "run this region without FP8, or call TransformerEngine's own checkpoint for it"


def keeps_fp8_state(owners: Iterable[nn.Module]) -> bool:
    """Return whether FP8 is on, or any of these modules is one of TransformerEngine's that can run in FP8."""
    manager: Any = getattr(sys.modules.get(_DISTRIBUTED), "FP8GlobalStateManager", None)
    if manager is None:
        return False
    modules = (vars(module) for owner in owners for module in owner.modules())
    return bool(manager.is_fp8_enabled()) or not all(map(FP8_METAS.isdisjoint, modules))


class Fp8Function:
    """Runs a function under the library's contexts: of a forward in the first run, of a recomputation in later ones.

    Raises ``ConfigError`` if FP8 is on in a version of TransformerEngine without the contexts.
    """

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        library, distributed = sys.modules[_PYTORCH], sys.modules[_DISTRIBUTED]
        contexts = getattr(distributed, "get_activation_recompute_contexts", None)  # also if FP8 is turned on inside
        manager, self._function, self._arguments = distributed.FP8GlobalStateManager, function, [False]
        if manager.is_fp8_enabled():
            if contexts is None or not hasattr(manager, "get_fp8_recipe"):
                raise ConfigError(Problem(where, _UNKNOWN, fix=_FIX))
            self._arguments = [True, False, manager.get_fp8_recipe(), manager.get_fp8_group()]
        self._autocast = getattr(library, "autocast", None) or library.fp8_autocast  # the same arguments by position
        self._contexts: list[Any] = [*contexts()] if contexts is not None else [nullcontext()] * 2

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the body as a run of the function."""
        contexts, self._contexts = self._contexts, self._contexts[-1:]
        with contexts[0], nullcontext() if len(contexts) > 1 else self._autocast(*self._arguments):
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        with self.entered():
            return self._function(*args, **kwargs)
